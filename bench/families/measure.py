"""Draws are measured here: data on the device, every variant checked in float64, then timed in turns.

In: a seed, draws of each family, a device (`cpu` or `gpu`). Out: cases for `harness.measure`. Every variant makes its result anew, as users' code does.
On a GPU calls go round copies of the inputs that no cache holds together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.families import calls, convolutions, nests, norms, products, spellings, sums, windows
from bench.families.draw import Draw, Family, Problem, Spec
from bench.harness import OURS, Bar, Case, Prepared, Variant

FAMILIES: tuple[Family, ...] = (
    *convolutions.FAMILIES, *spellings.FAMILIES, *windows.FAMILIES, *norms.FAMILIES, *sums.FAMILIES, *products.FAMILIES, *nests.FAMILIES, *calls.FAMILIES,
)  # fmt: skip
COLD_BYTES = 256 << 20
_SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i32": 4, "u8": 1}
_NUMPY: dict[str, Any] = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "i32": np.int32, "u8": np.uint8}


def cases(seed: int, draws: int, device: str, compiled: bool = False) -> Iterator[Case]:
    """`draws` problems of each family that has a bar on the device. With `compiled`, torch.compile is a peer of the first two of each."""
    for family in FAMILIES:
        if device not in family.bars:
            continue
        for index in range(draws):
            problem = family.build(Draw(seed, family.name, index, device))
            yield case_of(family, problem, seed, device, compiled and index < 2)


def case_of(family: Family, problem: Problem, seed: int, device: str, compiled: bool) -> Case:
    nbytes = sum(_bytes(spec) for spec in problem.inputs)

    def prepare() -> Prepared:
        return (_on_gpu if device == "gpu" else _on_cpu)(problem, seed, compiled)

    return Case(family.name, problem.shape, problem.dtype, nbytes, prepare, Bar(family.bars[device]))


def _bytes(spec: Spec) -> int:
    return int(np.prod(spec.shape)) * _SIZES[spec.dtype]


# -- data -----------------------------------------------------------------------------------------------------------


def host_array(spec: Spec, rng: np.random.Generator) -> np.ndarray:
    if spec.kind == "bits":
        limits = np.iinfo(_NUMPY[spec.dtype])
        return rng.integers(limits.min, limits.max, spec.shape, _NUMPY[spec.dtype], endpoint=True)
    if spec.kind == "normal":
        values = rng.standard_normal(spec.shape)
    elif spec.kind == "dominant":
        values = rng.standard_normal(spec.shape) + 2.0 * spec.shape[0] * np.eye(spec.shape[0])
    else:
        values = rng.random(spec.shape) + (0.5 if spec.kind == "positive" else 0.0)
    return (values * spec.scale).astype(_NUMPY[spec.dtype])


def _wrong(found: Any, wanted: np.ndarray, tolerance: float) -> str:
    found, wanted = np.atleast_1d(np.asarray(found).astype(np.float64)), np.atleast_1d(wanted)
    if found.shape != wanted.shape:
        return f"shape {found.shape}, expected {wanted.shape}"
    if not wanted.size:
        return ""
    with np.errstate(invalid="ignore"):
        off = np.abs(found - wanted)
    off[(found == wanted) | (np.isnan(found) & np.isnan(wanted))] = 0.0
    finite = wanted[np.isfinite(wanted)]
    limit = tolerance * float(np.abs(finite).max(initial=0.0))
    worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
    return "" if bool((off <= limit).all()) else f"{found.flat[worst]} at flat index {worst}, expected {wanted.flat[worst]} (limit {limit:.3g})"


# -- CPU ------------------------------------------------------------------------------------------------------------


def exact_on_host(problem: Problem, arrays: list[np.ndarray]) -> np.ndarray:
    """The result in float64: by PyTorch, or by NumPy where the family has a function of it."""
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    if "torch" not in problem.peers:
        return np.asarray(problem.exact(*wide), np.float64)
    import torch

    return np.asarray(problem.exact(*(torch.from_numpy(a) for a in wide)).double().numpy())


def _on_cpu(problem: Problem, seed: int, compiled: bool) -> Prepared:
    rng = np.random.default_rng(seed)
    arrays = [host_array(spec, rng) for spec in problem.inputs]
    wanted = exact_on_host(problem, arrays)
    variants = [Variant(OURS, lambda _: problem.ours(*arrays), returns=True)]
    for name, peer in problem.peers.items():
        if name.startswith("torch"):
            import torch

            torch.set_grad_enabled(False)
            tensors = [torch.from_numpy(a) for a in arrays]
            variants.append(Variant(name, lambda _, f=peer, t=tensors: f(*t), returns=True))  # type: ignore[misc]
        elif name.startswith("numba"):
            variants.append(Variant(name, _first_compiled(peer, arrays), returns=True))
        else:
            variants.append(Variant(name, lambda _, f=peer: f(*arrays), returns=True))  # type: ignore[misc]

    def verify(slot: int, found: object, variant: Variant) -> str:
        if "full product" in variant.name:  # it multiplies the zeros, too: the same work for a library, another result
            return ""
        return _wrong(found, wanted, problem.tolerance * (10 if variant.name != OURS else 1))

    return Prepared(variants, lambda: None, verify, notes=(problem.title,))


def _first_compiled(make: Callable[[], Any], arrays: list[np.ndarray]) -> Callable[[int], Any]:
    made: list[Any] = []

    def run(_: int) -> Any:
        if not made:
            made.append(make())
        return made[0](*arrays)

    return run


# -- GPU ------------------------------------------------------------------------------------------------------------


def _tensor(spec: Spec, torch: Any) -> Any:
    dtype = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32, "u8": torch.uint8}[spec.dtype]
    if spec.kind == "bits":
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, spec.shape, device="cuda", dtype=dtype)
    values = torch.randn(spec.shape, device="cuda") if spec.kind == "normal" else torch.rand(spec.shape, device="cuda") + (0.5 if spec.kind == "positive" else 0.0)
    return (values * spec.scale).to(dtype)


def _on_gpu(problem: Problem, seed: int, compiled: bool) -> Prepared:
    import torch

    torch.manual_seed(seed)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    nbytes = sum(_bytes(spec) for spec in problem.inputs)
    slots = max(1, min(16, -(-COLD_BYTES // nbytes)))
    data = [[_tensor(spec, torch) for spec in problem.inputs] for _ in range(slots)]
    wanted = problem.exact(*(t.double() if t.is_floating_point() else t for t in data[0])).double()
    largest = float(wanted.abs().nan_to_num(posinf=0.0).max()) if wanted.numel() else 0.0
    variants = [Variant(OURS, lambda slot: problem.ours(*data[slot]), returns=True)]
    functions = dict(problem.peers)
    if compiled:
        functions["torch.compile"] = torch.compile(problem.peers["torch"], dynamic=False)
    for name, peer in functions.items():
        variants.append(Variant(name, lambda slot, f=peer: f(*data[slot]), returns=True))  # type: ignore[misc]

    def verify(slot: int, found: Any, variant: Variant) -> str:
        if slot or "full product" in variant.name:
            return ""
        torch.cuda.synchronize()
        got = torch.as_tensor(found, device="cuda").double()
        if got.shape != wanted.shape:
            return f"shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
        limit = problem.tolerance * largest * (10 if variant.name != OURS else 1)
        off = (got - wanted).abs()
        off[(got == wanted) | (got.isnan() & wanted.isnan())] = 0.0
        return "" if bool((off <= limit).all()) else f"error {float(off.nan_to_num(nan=float('inf')).max()):.3g}, limit {limit:.3g}"

    return Prepared(variants, lambda: None, verify, slots, 8 if nbytes < 64 << 20 else 1, notes=(problem.title,))
