"""Attributes that ask for something of a schedule: code changes with them, results do not; with @strict they bind; their fate is told."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import DType, f16, f32
from tilewright.base.target import NVPTX, Target, host_cpu
from tilewright.compile.build import build_artifact
from tilewright.compile.driver import Compilation, Signature, compile_stages
from tilewright.frontend.zyn.parse import parse_module
from tilewright.ir.nodes import walk
from tilewright.passes.schedules.loops import Schedule
from tilewright.tree import syntax
from tilewright.tree.typed import ArrayArg

GPU = NVPTX["sm_90a"]
X = np.random.default_rng(5).standard_normal((37, 1000)).astype(np.float32)
MAP = "for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2 + i"
ROWS = "for i in 0..n:\n  var s = 0.0\n  for j in 0..m: s += x[i, j]\n  out[i] = s"
COLUMNS = "for j in 0..m:\n  var s = 0.0\n  for i in 0..n: s += x[i, j]\n  out[j] = s"
SOFTMAX = "for i in 0..n:\n  let e = exp(x[i, :] - reduce(max, x[i, :]))\n  out[i] = e / reduce(+, e)"
PRODUCT = "for i in 0..n, j in 0..m:\n  var s = 0.0\n  for k in 0..d: s += a[i, k] * b[k, j]\n  out[i, j] = s"
WEIGHED = np.exp(X - X.max(1, keepdims=True))
NESTS = {
    "map": (MAP, X * 2 + np.arange(37)[:, None]), "rows": (ROWS, X.sum(1)), "columns": (COLUMNS, X.sum(0)),
    "softmax": (SOFTMAX, WEIGHED / WEIGHED.sum(1, keepdims=True)),
}  # fmt: skip


def compiled(
    attributes: str, body: str, target: Target = GPU, names: tuple[str, ...] = ("x",), dtype: DType = f32, extents: tuple[int, int] = (512, 1024)
) -> Compilation:
    statement = parse_module(f"let y = compute({', '.join(names)}) {{\n {attributes}\n {body}\n}}").body[0]
    assert isinstance(statement, syntax.Let)
    block = statement.value
    assert isinstance(block, syntax.Compute)
    function = syntax.Function("y", tuple(syntax.Param(n) for n in names), None, block.body, "compute", block.attributes, span=block.span)
    known = tuple((name, axis, extent) for name in names for axis, extent in enumerate(extents))
    divisors = tuple((name, axis, 64) for name in names for axis in range(2))
    args = tuple(ArrayArg(dtype, 2, None, 16) for _ in names)
    return compile_stages(function, Signature(args, divisors, hints=known, extents=known), target)


def threads(done: Compilation) -> list[int]:
    return [call.kernel.threads for call in done.stages.thread.calls]


def schedule_of(done: Compilation) -> Schedule:
    found = done.stages.schedules[0]
    assert isinstance(found, Schedule)
    return found


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("asked", [64, 512])
def test_threads_of_any_nest(nest: str, asked: int) -> None:
    body, want = NESTS[nest]
    assert asked in threads(compiled(f"@workgroup({asked})", body))
    attributes = f"@workgroup({asked // 2}, 2) @strict"
    found = tw.load(f"let y = compute(x) {{\n {attributes}\n {body}\n}}").run(x=X, device="emulator")["y"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("wish", "nest"), [("@vector(2)", "map"), ("@tile(4, 64)", "map"), ("@vector(1)", "rows"), ("@vector(2)", "columns")])
def test_vectors_and_tiles(wish: str, nest: str) -> None:
    body, want = NESTS[nest]
    plain, asked = schedule_of(compiled("", body)), schedule_of(compiled(wish, body))
    assert plain != asked
    assert asked.tiles == (4, 64) if wish.startswith("@tile") else asked.vector == int(wish[8])
    found = tw.load(f"let y = compute(x) {{\n {wish} @strict\n {body}\n}}").run(x=X, device="emulator")["y"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


def test_vectors_of_a_cpu() -> None:
    for width in (4, 8, 32):
        assert schedule_of(compiled(f"@vector({width})", MAP, host_cpu())).vector == width
        found = tw.load(f"let y = compute(x) {{\n @vector({width}) @strict\n {MAP}\n}}").run(x=X, device="cpu")["y"]
        np.testing.assert_allclose(found, NESTS["map"][1], rtol=1e-5)


@pytest.mark.parametrize("target", [GPU, host_cpu()])
def test_loops_that_stay_loops_are_unrolled(target: Target) -> None:
    def marks(attributes: str) -> set[object]:
        thread = compiled(attributes, ROWS, target).stages.thread
        return {op.attrs.get("unroll") for call in thread.calls for op in walk(call.kernel.body) if op.opcode == "for"}

    assert marks("@unroll(3)") == {3}
    assert 3 not in marks("")
    code = build_artifact(compiled("@unroll(3)", ROWS, target).stages.thread, target, "k", False, ())
    assert code.code != build_artifact(compiled("@unroll(1)", ROWS, target).stages.thread, target, "k", False, ()).code


def test_registers_of_a_thread() -> None:
    thread = compiled("@max_registers(32)", MAP).stages.thread
    ptx = build_artifact(thread, GPU, "k", False, ()).code.decode()
    assert ".maxnreg 32" in ptx
    assert ".maxnreg" not in build_artifact(compiled("", MAP).stages.thread, GPU, "k", False, ()).code.decode()


def test_tiles_of_attention() -> None:
    body = (
        "for i in 0..n:\n  var top = -inf\n  for j in 0..n: top = max(top, dot(q[i], k[j]))\n"
        "  var total = 0.0\n  for j in 0..n: total += exp(dot(q[i], k[j]) - top)\n"
        "  for c in 0..d:\n   var s = 0.0\n   for j in 0..n: s += exp(dot(q[i], k[j]) - top) / total * v[j, c]\n   out[i, c] = s"
    )
    for queries, keys in ((64, 64), (128, 32)):
        done = compiled(f"@kernel attention @tile(block_q={queries}, block_kv={keys})", body, names=("q", "k", "v"), dtype=f16, extents=(512, 64))
        attention = next(s for s in done.stages.schedules if "attention" in getattr(s, "family", ""))
        assert (getattr(attention, "m", 0), getattr(attention, "n", 0)) == (queries, keys)
        assert [fate.followed for fate in done.fates] == [True]


def test_matrix_instructions_say_why_not() -> None:
    product = {"names": ("a", "b"), "body": PRODUCT}
    (fate,) = compiled("@tensor_cores @precision(ieee)", **product).fates  # type: ignore[arg-type]
    assert not fate.followed
    assert "write @precision(tf32)" in fate.text
    for attributes, dtype in (("@tensor_cores", f32), ("@tensor_cores @precision(tf32)", f32), ("@tensor_cores", f16), ("@async_copy", f16)):
        assert [f.followed for f in compiled(attributes, dtype=dtype, **product).fates] == [True]  # type: ignore[arg-type]
    with pytest.raises(tw.TargetLimit, match="@tensor_cores"):
        compiled("@tensor_cores @strict @precision(ieee)", **product)  # type: ignore[arg-type]
    (fate,) = compiled("@tensor_cores", MAP).fates
    assert fate.text == "nothing here is a sum of products that is computed by tiles"


@pytest.mark.parametrize(
    ("wish", "target", "why"),
    [
        ("@workgroup(96)", GPU, "blocks have 128 threads: of 96 none can be made here"),
        ("@workgroup(64)", host_cpu(), "a CPU has no such thing"),
        ("@max_registers(64)", host_cpu(), "a CPU has no such thing"),
        ("@vector(16)", GPU, "vectors have 4 elements"),
        ("@unroll(2)", GPU, "no loop is left in the code"),
        ("@async_copy", GPU, "only operands of contractions and attention are staged"),
        ("@tile(block_q=64)", GPU, "the schedule is tiles=(1, 1024), vector=4, threads=128"),
    ],
)
def test_what_cannot_be_followed(wish: str, target: Target, why: str) -> None:
    (fate,) = compiled(wish, MAP, target).fates
    assert (fate.followed, fate.text) == (False, why)
    with pytest.raises(tw.TargetLimit) as caught:
        compiled(f"{wish} @strict", MAP, target)
    assert caught.value.diagnostics[0].code == "TW020"
    assert why in caught.value.diagnostics[0].help
