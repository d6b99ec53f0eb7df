"""The body language in both front ends: slices, tiles, reductions in loops, shared arrays, against NumPy in f64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw

Arrays = tuple[np.ndarray, ...]
LENGTHS = (1, 7, 63, 64, 65)


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return tuple(generator.standard_normal(shape).astype(np.float32) for shape in shapes)


def run_zyn(text: str, device: str, **inputs: np.ndarray) -> np.ndarray:
    result = tw.load(text).run(device=device, **inputs)["y"]
    assert isinstance(result, np.ndarray)
    return result


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)


# -- attention, as in the books -------------------------------------------------------------------------------------


@tw.kernel
def masked(q, k, v, mask):
    batch, heads, length, width = q.shape
    out = tw.empty((batch, heads, length, width), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        top = -tw.inf
        for j in range(length):
            if mask[i, j]:
                top = max(top, tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(width))
        total = 0.0
        for j in range(length):
            if mask[i, j]:
                total += tw.exp(tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(width) - top)
        for d in range(width):
            acc = 0.0
            for j in range(length):
                if mask[i, j]:
                    weight = tw.exp(tw.dot(q[b, h, i], k[b, h, j]) / tw.sqrt(width) - top) / total
                    acc += weight * v[b, h, j, d]
            out[b, h, i, d] = acc
    return out


MASKED = """
let y = compute(Q, K, V, mask) {
    @kernel attention
    @workgroup(32, 4)
    @shared(32 * 64 * 4)
    for b in 0..batch, h in 0..heads, i in 0..seq_len:
        // Compute max for numerical stability
        var max_score = -inf
        for j in 0..seq_len:
            if mask[i, j]:
                let score = dot(Q[b, h, i], K[b, h, j]) / sqrt(head_dim)
                max_score = max(max_score, score)
        // Compute softmax denominator
        var sum_exp = 0.0
        for j in 0..seq_len:
            if mask[i, j]:
                let score = dot(Q[b, h, i], K[b, h, j]) / sqrt(head_dim)
                sum_exp += exp(score - max_score)
        // Weighted sum of values
        for d in 0..head_dim:
            var acc = 0.0
            for j in 0..seq_len:
                if mask[i, j]:
                    let score = dot(Q[b, h, i], K[b, h, j]) / sqrt(head_dim)
                    let weight = exp(score - max_score) / sum_exp
                    acc += weight * V[b, h, j, d]
            out[b, h, i, d] = acc
}
"""


@tw.kernel
def flash(q, k, v):
    batch, heads, length, width = q.shape
    out = tw.empty((batch, heads, length, width), q.dtype)
    for b, h, block in tw.grid(batch, heads, range(0, length, 64)):
        m = -tw.inf
        total = 0.0
        o = tw.zeros((64, width))
        for kv in range(0, length, 64):
            s = q[b, h, block : block + 64] @ tw.transpose(k[b, h, kv : kv + 64]) / tw.sqrt(width)
            m_new = tw.maximum(m, tw.row_max(s))
            p = tw.exp(s - m_new)
            total = tw.exp(m - m_new) * total + tw.row_sum(p)
            o = tw.exp(m - m_new) * o + p @ v[b, h, kv : kv + 64]
            m = m_new
        out[b, h, block : block + 64] = o / total
    return out


FLASH = """
let y = compute(Q, K, V) {
    @kernel flash_attention
    @workgroup(64)
    @tile(block_q=64, block_kv=64)
    for b in 0..batch, h in 0..heads:
        for q_block in 0..seq_len step 64:
            // Attention softmax computation
            var m = -inf // Running max
            var l = 0.0 // Running sum of exp
            var o = zeros(64, head_dim) // Running output
            for kv_block in 0..seq_len step 64:
                let K_block = K[b, h, kv_block:kv_block+64]
                let V_block = V[b, h, kv_block:kv_block+64]
                let S = Q[b, h, q_block:q_block+64] @ transpose(K_block) / sqrt(head_dim)
                // Update running statistics
                let m_new = max(m, row_max(S))
                let l_new = exp(m - m_new) * l + row_sum(exp(S - m_new))
                // Update output
                o = exp(m - m_new) * o + exp(S - m_new) @ V_block
                m = m_new
                l = l_new
            // Normalize
            out[b, h, q_block:q_block+64] = o / l
}
"""


@pytest.mark.parametrize("device", ["cpu", "emulator:loop"])
@pytest.mark.parametrize("length", LENGTHS)
def test_masked_attention(length: int, device: str) -> None:
    q, k, v = numbers((1, 2, length, 4), (1, 2, length, 4), (1, 2, length, 4))
    mask = np.tril(np.ones((length, length), bool))
    wanted = attention(q, k, v, mask)
    np.testing.assert_allclose(masked(q, k, v, mask, device=device), wanted, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(run_zyn(MASKED, device, Q=q, K=k, V=v, mask=mask), wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", ["cpu", "emulator:loop"])
@pytest.mark.parametrize("length", LENGTHS)
def test_flash_attention(length: int, device: str) -> None:
    q, k, v = numbers((2, 1, length, 4), (2, 1, length, 4), (2, 1, length, 4))
    wanted = attention(q, k, v)
    found = run_zyn(FLASH, device, Q=q, K=k, V=v)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(flash(q, k, v, device=device), wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", ["emulator:tile", "emulator:thread"])
def test_attention_at_later_stages(device: str) -> None:
    q, k, v = numbers((1, 1, 7, 4), (1, 1, 7, 4), (1, 1, 7, 4))
    np.testing.assert_allclose(run_zyn(FLASH, device, Q=q, K=k, V=v), attention(q, k, v), rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(masked(q, k, v, np.ones((7, 7), bool), device=device), attention(q, k, v), rtol=1e-4, atol=2e-6)


def test_flash_attention_is_one_parallel_nest() -> None:
    q, k, v = numbers((1, 1, 7, 4), (1, 1, 7, 4), (1, 1, 7, 4))
    flash(q, k, v)
    assert len(flash.last.launches) == 1
    half = [x.astype(np.float16) for x in (q, k, v)]
    found = flash(*half)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, attention(*half), rtol=2e-3, atol=2e-3)


def test_sizes_of_slices_must_agree() -> None:
    q, k, v = numbers((1, 1, 65, 4), (1, 1, 65, 4), (1, 1, 64, 4))
    with pytest.raises(tw.UserError, match="TW004"):
        run_zyn(FLASH, "cpu", Q=q, K=k, V=v)


# -- tiles ----------------------------------------------------------------------------------------------------------


@tw.kernel
def tiled_product(a, b):
    rows, depth = a.shape
    columns = b.shape[1]
    out = tw.empty((rows, columns), a.dtype)
    for i, j in tw.grid(range(0, rows, 8), range(0, columns, 4)):
        acc = tw.zeros((8, 4), tw.f32)
        for t in range(0, depth, 8):
            acc += a[i : i + 8, t : t + 8] @ b[t : t + 8, j : j + 4]
        out[i : i + 8, j : j + 4] = acc
    return out


TILED_PRODUCT = """
let y = compute(a, b) {
    for i in 0..rows step 8, j in 0..columns step 4 {
        var acc: f32 = zeros(8, 4)
        for t in 0..depth step 8 { acc += a[i:i+8, t:t+8] @ b[t:t+8, j:j+4] }
        out[i:i+8, j:j+4] = acc
    }
}
"""


@tw.kernel
def log_sum_exp(x):
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(range(0, rows, 4)):
        m = -tw.inf
        total = 0.0
        for j in range(0, columns, 8):
            part = x[i : i + 4, j : j + 8]
            alpha = tw.exp(m - tw.maximum(m, tw.row_max(part)))
            m = tw.maximum(m, tw.row_max(part))
            total = total * alpha + tw.row_sum(tw.exp(part - m))
        out[i : i + 4] = m + tw.log(total)
    return out


LOG_SUM_EXP = """
let y = compute(x) {
    for i in 0..rows step 4:
        var m = -inf
        var total = 0.0
        for j in 0..columns step 8:
            let part = x[i:i+4, j:j+8]
            let alpha = exp(m - max(m, row_max(part)))
            m = max(m, row_max(part))
            total = total * alpha + row_sum(exp(part - m))
        out[i:i+4] = m + log(total)
}
"""


@tw.kernel
def softmax_and_top(x):
    """A column is stored beside a tile that has more axes."""
    rows, columns = x.shape
    out = tw.empty((rows, columns + 1), x.dtype)
    for i in tw.grid(range(0, rows, 4)):
        m = -tw.inf
        scaled = tw.zeros((4, columns))
        for _ in range(2):
            m = tw.maximum(m, tw.row_max(x[i : i + 4]))
            scaled = scaled * 0.5 + tw.exp(x[i : i + 4] - m)
        out[i : i + 4, 0:columns] = scaled
        out[i : i + 4, columns] = m
    return out


SOFTMAX_AND_TOP = """
let y = compute(x) {
    for i in 0..rows step 4:
        var m = -inf
        var scaled = zeros(4, columns)
        for step in 0..2:
            m = max(m, row_max(x[i:i+4]))
            scaled = scaled * 0.5 + exp(x[i:i+4] - m)
        out[i:i+4, 0:columns] = scaled
        out[i:i+4, columns] = m
}
"""


@tw.kernel
def causal(q, k, v):
    length, width = q.shape
    out = tw.empty((length, width), q.dtype)
    for i in tw.grid(length):
        scores = k[: i + 1] @ q[i] / tw.sqrt(width)
        weights = tw.exp(scores - tw.max(scores))
        out[i] = weights @ v[: i + 1] / tw.sum(weights)
    return out


CAUSAL = """
let y = compute(q, k, v) {
    for i in 0..length:
        let scores = k[:i+1] @ q[i] / sqrt(4)
        let weights = exp(scores - reduce(max, scores))
        out[i] = weights @ v[:i+1] / reduce(+, weights)
}
"""


@tw.kernel
def folded_rows(x):
    """Blocks of rows added up: the last block may be short, and adds nothing to the rows it does not have."""
    rows, columns = x.shape
    out = tw.empty((1, 4, columns), x.dtype)
    for once in tw.grid(1):
        acc = tw.zeros((4, columns))
        for i in range(0, rows, 4):
            acc += x[i : i + 4]
        out[once] = acc
    return out


FOLDED_ROWS = """
let y = compute(x) {
    for once in 0..1:
        var acc = zeros(4, columns)
        for i in 0..rows step 4:
            acc += x[i:i+4]
        out[once] = acc
}
"""


@tw.kernel
def windows(x, w):
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = tw.dot(x[i, j : j + 3], w) if j > 0 else tw.max(x[i, :2])
    return out


WINDOWS = """
let y = compute(x, w) {
    for i in 0..rows, j in 0..columns:
        out[i, j] = dot(x[i, j:j+3], w) if j > 0 else reduce(max, x[i, :2])
}
"""


@tw.kernel
def nested_parts(x):
    outer, rows, columns = x.shape
    out = tw.empty((outer, rows, columns), x.dtype)
    for b in tw.grid(outer):
        plane = x[b]
        for i in range(0, rows, 4):
            block = plane[i : i + 4, :]
            out[b, i : i + 4] = block - tw.row_min(block) + plane[0, 1]
    return out


NESTED_PARTS = """
let y = compute(x) {
    for b in 0..outer:
        let plane = x[b]
        for i in 0..rows step 4:
            let block = plane[i:i+4, :]
            out[b, i:i+4] = block - row_min(block) + plane[0, 1]
}
"""


@tw.kernel
def top_level(a, b):
    product = a @ b
    return product[1:3] * 2.0 + tw.row_sum(product)[1:3] + product.T[0, 1]


TOP_LEVEL = """
let y = compute(a, b) {
    let product = a @ b
    out = product[1:3] * 2.0 + row_sum(product)[1:3] + transpose(product)[0, 1]
}
"""


def _folded(x: np.ndarray) -> np.ndarray:
    padded = np.concatenate([x, np.zeros((-len(x) % 4, x.shape[1]))])
    return padded.reshape(-1, 4, x.shape[1]).sum(0)[None]


def _windows(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    padded = np.concatenate([x, np.zeros((len(x), 2))], axis=1)
    result = sum(padded[:, d : d + x.shape[1]] * w[d] for d in range(3))
    result[:, 0] = x[:, :2].max(1)
    return result


def _softmax_and_top(x: np.ndarray) -> np.ndarray:
    top = x.max(1, keepdims=True)
    return np.concatenate([1.5 * np.exp(x - top), top], axis=1)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b


def _top_level(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = a @ b
    return product[1:3] * 2 + product.sum(1, keepdims=True)[1:3] + product[1, 0]


def _causal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return attention(q, k, v, np.tril(np.ones((len(q), len(q)), bool)))


Case = tuple[Callable[..., np.ndarray], str, Callable[..., np.ndarray], dict[str, tuple[int, ...]]]
CASES: dict[str, Case] = {
    "tiled product": (tiled_product, TILED_PRODUCT, _product, {"a": (13, 21), "b": (21, 6)}),
    "tiled product, even": (tiled_product, TILED_PRODUCT, _product, {"a": (16, 8), "b": (8, 4)}),
    "log sum exp": (log_sum_exp, LOG_SUM_EXP, lambda x: np.log(np.exp(x).sum(1)), {"x": (7, 21)}),
    "softmax and top": (softmax_and_top, SOFTMAX_AND_TOP, _softmax_and_top, {"x": (7, 5)}),
    "causal": (causal, CAUSAL, _causal, {"q": (9, 4), "k": (9, 4), "v": (9, 4)}),
    "folded rows": (folded_rows, FOLDED_ROWS, _folded, {"x": (10, 3)}),
    "windows": (windows, WINDOWS, _windows, {"x": (3, 6), "w": (3,)}),
    "nested parts": (nested_parts, NESTED_PARTS, lambda x: x - x.min(2, keepdims=True) + x[:, :1, 1:2], {"x": (2, 6, 5)}),
    "top level": (top_level, TOP_LEVEL, _top_level, {"a": (5, 4), "b": (4, 3)}),
}


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:tile", "emulator:thread"])
@pytest.mark.parametrize("name", CASES)
def test_tiles(name: str, device: str) -> None:
    kernel, text, reference, shapes = CASES[name]
    arrays = numbers(*shapes.values(), seed=len(name))
    wanted = reference(*(a.astype(np.float64) for a in arrays))
    found = kernel(*arrays, device=device)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    found = run_zyn(text, device, **dict(zip(shapes, arrays, strict=True)))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# -- shared arrays --------------------------------------------------------------------------------------------------


@tw.kernel
def mlp(x, up_weights, down_weights):
    rows, hidden = x.shape
    inner = up_weights.shape[1]
    out = tw.empty((rows, hidden), x.dtype)
    for i in tw.grid(rows):
        up = tw.shared((inner,), tw.f32)
        for f in range(inner):
            up[f] = tw.gelu(tw.dot(x[i], up_weights[:, f]))
        tw.barrier()
        for h in range(hidden):
            out[i, h] = tw.dot(up, down_weights[:, h])
    return out


MLP = """
let y = compute(normed, ffn_up, ffn_down) {
    @kernel fused
    for s in 0..seq:
        // Up projection + GELU
        shared var up[ffn_hidden]
        for f in 0..ffn_hidden:
            var sum = 0.0
            for h in 0..hidden:
                sum += normed[s, h] * ffn_up[h, f]
            let x = sum
            let x3 = x * x * x
            up[f] = x * 0.5 * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x3)))
        barrier()
        // Down projection
        for h in 0..hidden:
            var sum = 0.0
            for f in 0..ffn_hidden:
                sum += up[f] * ffn_down[f, h]
            out[s, h] = sum
}
"""


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:thread"])
def test_shared_arrays(device: str) -> None:
    x, up, down = numbers((5, 6), (6, 9), (9, 6))
    inner = x.astype(np.float64) @ up
    inner = inner * 0.5 * (1 + np.tanh(0.7978845608028654 * (inner + 0.044715 * inner**3)))
    np.testing.assert_allclose(mlp(x, up, down, device=device), inner @ down, rtol=1e-4, atol=1e-5)
    found = run_zyn(MLP, device, normed=x, ffn_up=up, ffn_down=down)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, inner @ down, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_what_is_computed_from_shared_arrays_has_the_type_of_what_is_stored_to_them(dtype: type) -> None:
    x, up, down = (a.astype(dtype) for a in numbers((5, 6), (6, 9), (9, 6)))
    assert run_zyn(MLP, "cpu", normed=x, ffn_up=up, ffn_down=down).dtype == dtype
    turned = MLP.replace("            up[f] = ", "            up[f] = 0.0\n            up[f] += ")
    assert run_zyn(turned, "cpu", normed=x, ffn_up=up, ffn_down=down).dtype == dtype


def test_a_barrier_between_independent_parts_makes_two_nests() -> None:
    x, up, down = numbers((5, 6), (6, 9), (9, 6))
    mlp(x, up, down)
    assert [line.split()[1] for line in mlp.last.schedule.splitlines()] == ["family=cpu", "family=cpu"]  # both are contractions


@tw.kernel
def carried_over(x):
    """A variable lives across the barrier, so the loop stays one."""
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        turned = tw.shared((columns,), tw.f32)
        largest = tw.max(x[i])
        for j in range(columns):
            turned[j] = x[i, columns - 1 - j]
        tw.barrier()
        out[i] = turned / largest
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:thread"])
def test_a_variable_across_a_barrier(device: str) -> None:
    (x,) = numbers((4, 7))
    found = carried_over(x, device=device)
    np.testing.assert_allclose(found, x[:, ::-1] / x.max(1, keepdims=True), rtol=1e-6)


# -- the rest of the language ---------------------------------------------------------------------------------------

BODIES: dict[str, tuple[str, Callable[..., object]]] = {
    "step": ("for i in 0..n step 2: out[i] = x[i]", lambda x: (x[::2], slice(None, None, 2))),
    "inclusive": ("for i in 0..=4: out[i] = x[i]", lambda x: (x[:5], slice(None))),
    "logic": ("for i in 0..n: out[i] = 1.0 if x[i] > 0 and not (i == 2 or i == 3) else 2.0",
              lambda x: (np.where((x > 0) & ~np.isin(np.arange(len(x)), [2, 3]), 1.0, 2.0), slice(None))),
    "compound": ("for i in 0..n {\n var a = 1.0\n a += x[i]\n a -= 2\n a *= 3\n a /= 2\n out[i] = a }", lambda x: ((x - 1) * 1.5, slice(None))),
    "lazy and": ("for i in 0..n: out[i] = x[i] if i > 1 and reduce(+, x[i-2:i]) > 0 else 0.0",
                 lambda x: (np.array([x[i] if i > 1 and x[i - 2 : i].sum() > 0 else 0.0 for i in range(len(x))]), slice(None))),
    "argmax": ("for i in 0..n: out[i] = reduce(argmax, x[:i+1])", lambda x: (np.array([x[: i + 1].argmax() for i in range(len(x))]), slice(None))),
    "extremes": ("for i in 0..n: out[i] = maximum(minimum(x[i], 0.5), -inf)", lambda x: (np.minimum(x, 0.5), slice(None))),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:thread"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str, device: str) -> None:
    body, reference = BODIES[name]
    (x,) = numbers((9,), seed=3)
    wanted, where = reference(x.astype(np.float64))  # type: ignore[misc]
    found = run_zyn("let y = compute(x) {\n" + body + "\n}", device, x=x)
    np.testing.assert_allclose(found[where], wanted, rtol=1e-5, atol=1e-6)


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh,
    "relu": lambda x: np.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_functions_of_tiles(device: str) -> None:
    """Every function takes a slice: here all of them, one statement each."""
    x = np.abs(numbers((3, 9))[0]) + 0.25
    lines = [f"out[i, {place}] = reduce(+, {name}(x[i, 0:9]))" for place, name in enumerate(FUNCTIONS)]
    lines.append(f"out[i, {len(FUNCTIONS)}] = reduce(max, pow(x[i], 1.5) + clamp(x[i], 0.5, 1.0) + min(x[i], 2.0) + erf(x[i]) * 0 + gelu(x[i]) * 0)")
    found = run_zyn("let y = compute(x) {\n for i in 0..n {\n" + "\n".join(lines) + "\n}\n}", device, x=x)
    exact = x.astype(np.float64)
    for place, function in enumerate(FUNCTIONS.values()):
        np.testing.assert_allclose(found[:, place], function(exact).sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[:, -1], (exact**1.5 + np.clip(exact, 0.5, 1) + np.minimum(exact, 2)).max(1), rtol=1e-5)


# -- a running maximum, sum and result carried together, and the logarithm of the sums ---------------------------------


@tw.kernel
def carried(q, k, v):
    length, width = q.shape
    out = tw.empty((length, width), q.dtype)
    sums = tw.empty((length,), tw.f32)
    for i in tw.grid(range(0, length, 16)):
        m, total, o = -tw.inf, 0.0, tw.zeros((16, width))
        for j in range(0, length, 16):
            s = q[i : i + 16] @ tw.transpose(k[j : j + 16]) / tw.sqrt(width)
            m_new = tw.maximum(m, tw.row_max(s))
            p = tw.exp(s - m_new)
            scale = tw.exp(m - m_new)
            m, total, o = m_new, scale * total + tw.row_sum(p), scale * o + p @ v[j : j + 16]
        out[i : i + 16] = o / total
        sums[i : i + 16] = m + tw.log(total)
    return out, sums


CARRIED = """
let (y, sums) = compute(Q, K, V) {
    @kernel flash_attention
    for i in 0..length step 16:
        var m = -inf
        var total = 0.0
        var o = zeros(16, width)
        for j in 0..length step 16:
            let s = Q[i:i+16] @ transpose(K[j:j+16]) / sqrt(width)
            let m_new = max(m, row_max(s))
            let p = exp(s - m_new)
            let scale = exp(m - m_new)
            (m, total, o) = (m_new, scale * total + row_sum(p), scale * o + p @ V[j:j+16])
        out_y[i:i+16] = o / total
        out_sums[i:i+16] = m + log(total)
}
"""


@pytest.mark.parametrize("device", ["cpu", "emulator:thread"])
@pytest.mark.parametrize("length", [1, 33])
def test_carried_together(length: int, device: str) -> None:
    q, k, v = numbers((length, 8), (length, 8), (length, 8))
    scores = q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(8)
    expected = attention(q, k, v), np.log(np.exp(scores).sum(1))
    found = tw.load(CARRIED).run(device=device, Q=q, K=k, V=v)
    for results in (carried(q, k, v, device=device), (found["y"], found["sums"])):
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.asarray(one).reshape(other.shape), other, rtol=2e-5, atol=2e-5)
