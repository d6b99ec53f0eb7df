"""Kernels from source to the loop stage, run by the emulator and compared with NumPy."""

from __future__ import annotations

import textwrap

import ml_dtypes
import numpy as np
import pytest

from tilewright.analysis.alias import alias_safe
from tilewright.base import dtypes
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.frontend.zyn.parse import parse_module
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.program import Program
from tilewright.ir.verify import verify_program
from tilewright.passes.from_tree.lower_tree import lower_kernel
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg

RANDOM = np.random.default_rng(7)
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _same_numbers_in_every_test() -> None:
    RANDOM.bit_generator.state = START


def arg_of(value: object) -> ArgSpec:
    if isinstance(value, np.ndarray):
        dtype = dtypes.from_numpy(value.dtype)
        assert dtype is not None
        return ArrayArg(dtype, value.ndim)
    if isinstance(value, bool):
        return ScalarArg(dtypes.bool_)
    return ScalarArg(dtypes.f64 if isinstance(value, float) else dtypes.i64, weak=True)


def python(text: str) -> syntax.Function:
    body = "import tilewright as tw\nimport math\n\n@tw.kernel\n" + textwrap.dedent(text).lstrip()
    (function,) = parse_python_file(body, "k.py")
    return function


def compute(text: str) -> syntax.Function:
    statement = parse_module(textwrap.dedent(text).strip() + "\n", "k.zyn").body[0]
    assert isinstance(statement, syntax.Let)
    block = statement.value
    assert isinstance(block, syntax.Compute)
    params = tuple(syntax.Param(i.id, span=i.span) for i in block.inputs if isinstance(i, syntax.Name))
    return syntax.Function("k", params, None, block.body, "compute", block.attributes, span=block.span)


def build(function: syntax.Function, *values: object) -> Program:
    program = lower_kernel(check_kernel(function, [arg_of(v) for v in values]))
    verify_program(program)
    return program


def run(function: syntax.Function, *values: object) -> dict[str, np.ndarray]:
    program = build(function, *values)
    names = [p.name for p in function.params]
    return run_program(program, dict(zip(names, values, strict=True)))  # type: ignore[arg-type]


def only(results: dict[str, np.ndarray]) -> np.ndarray:
    (value,) = results.values()
    return value


def f32(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def opcodes(program: Program) -> list[str]:
    return [op.opcode for call in program.calls for op in walk(call.kernel.body)]


# -- ZynML ----------------------------------------------------------------------------------------------------------


def test_elementwise() -> None:
    function = compute("""
        let z = compute(x, y) {
            @kernel elementwise
            for i in 0..len:
                out[i] = x[i] * y[i] + 1.0
        }""")
    x, y = f32(13), f32(13)
    result = run(function, x, y)
    assert list(result) == ["out"]
    assert result["out"].dtype == np.float32
    np.testing.assert_allclose(result["out"], x * y + 1, rtol=1e-6)
    program = build(function, x, y)
    assert alias_safe(program)
    assert [str(i.type) for i in program.input_arrays] == ["tensor<f32, [len], [1]>"] * 2


def test_broadcast_rows() -> None:
    function = compute("""
        let scaled = compute(matrix, vector) {
            @kernel elementwise
            @broadcast(vector, axis=1)
            for i in 0..rows, j in 0..cols:
                out[i, j] = matrix[i, j] * vector[j]
        }""")
    matrix, vector = f32(3, 5), f32(5)
    np.testing.assert_allclose(only(run(function, matrix, vector)), matrix * vector)
    assert alias_safe(build(function, matrix, vector))


@pytest.mark.parametrize(
    ("kind", "reference"),
    [("+", np.sum), ("*", np.prod), ("max", np.max), ("min", np.min), ("argmax", np.argmax), ("argmin", np.argmin)],
)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_reduce(kind: str, reference: object, axis: int | None) -> None:
    suffix = "" if axis is None else f", axis={axis}"
    function = compute(f"""
        let r = compute(m) {{
            @kernel reduce({kind}{suffix})
            for i in 0..rows, j in 0..cols:
                yield m[i, j]
        }}""")
    m = f32(4, 6)
    assert callable(reference)
    np.testing.assert_allclose(only(run(function, m)), reference(m, axis=axis), rtol=1e-5, atol=1e-6)


def test_argmax_yields_its_own_index() -> None:
    function = compute("""
        let r = compute(x) {
            @kernel reduce(argmax)
            for i in 0..len:
                yield (x[i], i * 10)
        }""")
    x = np.array([1, 5, 5, np.nan, 2, np.nan], np.float32)
    assert only(run(function, x)) == 30
    assert only(run(function, x[:3])) == 10


def test_guarded_argmin() -> None:
    function = compute("""
        let r = compute(x) {
            @kernel reduce(argmin)
            for i in 0..len:
                if x[i] > 0.0:
                    yield (x[i], i)
        }""")
    x = np.array([-3, 4, 2, -9, 2], np.float32)
    assert only(run(function, x)) == 2


def test_guarded_and_transformed_sum() -> None:
    function = compute("""
        let r = compute(x) {
            @kernel reduce(+)
            for i in 0..len:
                if x[i] > 0.0:
                    yield x[i] * x[i]
        }""")
    x = f32(50)
    np.testing.assert_allclose(only(run(function, x)), (x[x > 0] ** 2).sum(), rtol=1e-5, atol=1e-6)


def test_integer_sums_are_wide() -> None:
    function = compute("""
        let r = compute(x) {
            @kernel reduce(+)
            for i in 0..len:
                yield x[i]
        }""")
    for dtype, wide in ((np.int8, np.int64), (np.uint16, np.uint64), (np.bool_, np.int64)):
        x = np.full(300, 1, dtype) * (100 if dtype != np.bool_ else 1)
        result = only(run(function, x.astype(dtype)))
        assert result.dtype == wide
        assert result == x.astype(wide).sum()


def test_matmul() -> None:
    function = compute("""
        let C = compute(A, B) {
            @kernel matmul
            @workgroup(16, 16)
            @shared(16 * 16 * 4 * 2)
            for i in 0..M, j in 0..N:
                var sum = 0.0
                for k in 0..K:
                    sum += A[i, k] * B[k, j]
                out[i, j] = sum
        }""")
    a, b = f32(5, 7), f32(7, 3)
    np.testing.assert_allclose(only(run(function, a, b)), a @ b, rtol=1e-5, atol=1e-6)
    program = build(function, a, b)
    assert opcodes(program).count("reduce") == 1
    assert "for" not in opcodes(program)
    assert str(program.input_arrays[1].type) == "tensor<f32, [K, N], [N, 1]>"
    assert not alias_safe(program)
    half = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    result = only(run(function, *half))
    assert result.dtype == ml_dtypes.bfloat16
    exact = half[0].astype(np.float64) @ half[1].astype(np.float64)
    np.testing.assert_allclose(result.astype(np.float64), exact, rtol=2**-8, atol=1e-6)


def test_conv2d_with_padding_and_stride() -> None:
    function = compute("""
        let output = compute(input, kernel, bias) {
            @kernel conv2d(stride=2, padding=1)
            for b in 0..batch, oc in 0..out_channels:
                for oh in 0..out_h, ow in 0..out_w:
                    var sum = bias[oc]
                    for ic in 0..in_channels:
                        for kh in 0..kernel_h, kw in 0..kernel_w:
                            let ih = oh * stride + kh - padding
                            let iw = ow * stride + kw - padding
                            if ih >= 0 and ih < in_h and iw >= 0 and iw < in_w:
                                sum += input[b, ic, ih, iw] * kernel[oc, ic, kh, kw]
                    out[b, oc, oh, ow] = sum
        }""")
    image, kernel, bias = f32(2, 3, 7, 6), f32(4, 3, 3, 3), f32(4)
    result = only(run(function, image, kernel, bias))
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = np.zeros((2, 4, 4, 3))
    for oh in range(4):
        for ow in range(3):
            window = padded[:, :, 2 * oh : 2 * oh + 3, 2 * ow : 2 * ow + 3]
            expected[:, :, oh, ow] = np.einsum("bchw,ochw->bo", window, kernel) + bias
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    reduces = [op for c in build(function, image, kernel, bias).calls for op in walk(c.kernel.body) if op.opcode == "reduce"]
    assert [len(op.operands) for op in reduces] == [3]


def test_depthwise() -> None:
    function = compute("""
        let output = compute(input, kernel) {
            @kernel conv2d_depthwise
            for b in 0..batch, c in 0..channels:
                for oh in 0..out_h, ow in 0..out_w:
                    var sum = 0.0
                    for kh in 0..kernel_h, kw in 0..kernel_w:
                        sum += input[b, c, oh + kh, ow + kw] * kernel[c, kh, kw]
                    out[b, c, oh, ow] = sum
        }""")
    image, kernel = f32(1, 2, 5, 6), f32(2, 3, 2)
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 2), axis=(2, 3))
    expected = np.einsum("bcijhw,chw->bcij", windows, kernel)
    np.testing.assert_allclose(only(run(function, image, kernel)), expected, rtol=1e-4, atol=1e-5)


def test_fused_softmax_is_three_kernels() -> None:
    function = compute("""
        let probs = compute(logits) {
            @kernel fused
            let max_val = reduce(max, logits)
            let shifted = logits - max_val
            let exp_vals = exp(shifted)
            let sum_exp = reduce(+, exp_vals)
            out = exp_vals / sum_exp
        }""")
    x = f32(4, 9)
    e = np.exp(x - x.max())
    np.testing.assert_allclose(only(run(function, x)), e / e.sum(), rtol=1e-5, atol=1e-6)
    assert len(build(function, x).calls) == 3


LAYER_NORM = """
    let normalized = compute(x, gamma, beta, eps) {
        @kernel fused
        @workgroup(256)
        for b in 0..batch:
            var mean = 0.0
            for i in 0..hidden:
                mean += x[b, i]
            mean /= hidden
            var var = 0.0
            for i in 0..hidden:
                let diff = x[b, i] - mean
                var += diff * diff
            var /= hidden
            let inv_std = rsqrt(var + eps)
            for i in 0..hidden:
                out[b, i] = (x[b, i] - mean) * inv_std * gamma[i] + beta[i]
    }"""


def test_layer_norm() -> None:
    x, gamma, beta = f32(3, 16), f32(16), f32(16)
    result = run(compute(LAYER_NORM), x, gamma, beta, 1e-5)["out"]
    expected = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * gamma + beta
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    program = build(compute(LAYER_NORM), x, gamma, beta, 1e-5)
    loops = [op for op in walk(program.calls[0].kernel.body) if op.opcode == "for"]
    assert [op.attrs.get("independent") for op in loops] == [True]


def test_attention_with_a_mask() -> None:
    function = compute("""
        let attn = compute(Q, K, V, mask) {
            @kernel attention
            for b in 0..batch, h in 0..heads, i in 0..seq_len:
                var max_score = -inf
                for j in 0..seq_len:
                    if mask[i, j]:
                        var score = 0.0
                        for d in 0..head_dim:
                            score += Q[b, h, i, d] * K[b, h, j, d]
                        max_score = max(max_score, score / sqrt(head_dim))
                var sum_exp = 0.0
                for j in 0..seq_len:
                    if mask[i, j]:
                        var score = 0.0
                        for d in 0..head_dim:
                            score += Q[b, h, i, d] * K[b, h, j, d]
                        sum_exp += exp(score / sqrt(head_dim) - max_score)
                for d in 0..head_dim:
                    var acc = 0.0
                    for j in 0..seq_len:
                        if mask[i, j]:
                            var score = 0.0
                            for e in 0..head_dim:
                                score += Q[b, h, i, e] * K[b, h, j, e]
                            acc += exp(score / sqrt(head_dim) - max_score) / sum_exp * V[b, h, j, d]
                    out[b, h, i, d] = acc
        }""")
    q, k, v = f32(1, 2, 5, 4), f32(1, 2, 5, 4), f32(1, 2, 5, 4)
    mask = np.tril(np.ones((5, 5), bool))
    scores = np.where(mask, q @ k.transpose(0, 1, 3, 2) / 2, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    result = only(run(function, q, k, v, mask))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_rope_pairs() -> None:
    function = compute("""
        let rotated = compute(x, cos_cache, sin_cache) {
            @kernel elementwise
            for b in 0..batch, s in 0..seq, d in 0..head_dim/2:
                let x0 = x[b, s, d * 2]
                let x1 = x[b, s, d * 2 + 1]
                let c = cos_cache[s, d]
                let sine = sin_cache[s, d]
                out[b, s, d * 2] = x0 * c - x1 * sine
                out[b, s, d * 2 + 1] = x0 * sine + x1 * c
        }""")
    x, c, s = f32(2, 3, 8), f32(3, 4), f32(3, 4)
    expected = np.empty_like(x)
    expected[..., 0::2] = x[..., 0::2] * c - x[..., 1::2] * s
    expected[..., 1::2] = x[..., 0::2] * s + x[..., 1::2] * c
    result = only(run(function, x, c, s))
    assert result.shape == x.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    program = build(function, x, c, s)
    assert "for" not in opcodes(program)
    assert [str(e) for e in program.input_arrays[1].type.shape] == ["seq", "floordiv(head_dim, 2)"]


def test_two_outputs_of_different_extents() -> None:
    function = compute("""
        let r = compute(x) {
            for i in 0..n:
                out_a[i] = x[i] * 2
                out_b[2 * i + 1] = x[i]
                out_b[2 * i] = 0.0
        }""")
    x = f32(4)
    result = run(function, x)
    assert list(result) == ["out_a", "out_b"]
    np.testing.assert_allclose(result["out_a"], 2 * x)
    np.testing.assert_allclose(result["out_b"], np.stack([np.zeros(4), x], 1).ravel())


def test_inclusive_range_with_a_step() -> None:
    function = compute("""
        let r = compute(x) {
            for i in 1..=3 step 2:
                out[i - 1] = x[i]
            for i in 0..=3 step 3:
                out_b[i] = x[i + 1]
        }""")
    x = f32(5)
    result = run(function, x)
    assert result["out"].shape == (3,)
    assert result["out_b"].shape == (4,)
    np.testing.assert_array_equal(result["out"][[0, 2]], x[[1, 3]])
    np.testing.assert_array_equal(result["out_b"][[0, 3]], x[[1, 4]])


def test_loop_bounded_by_an_argument_is_serial() -> None:
    function = python("""
        def k(x, n):
            out = tw.zeros((len(x),), tw.f32)
            total = 0.0
            for i in range(n):
                out[i] = x[i] * 2
            for i in range(1, n):
                total += x[i]
            return out, total
        """)
    x = f32(6)
    result = run(function, x, 3)
    np.testing.assert_array_equal(result["out"], np.concatenate([2 * x[:3], np.zeros(3, np.float32)]))
    np.testing.assert_allclose(result["result1"], x[1:3].sum(), rtol=1e-6)


# -- Python ---------------------------------------------------------------------------------------------------------


def test_range_loops_become_parallel() -> None:
    function = python("""
        def k(a, b):
            n, m = a.shape
            out = tw.empty((n, m), tw.f32)
            for i in range(n):
                for j in range(m):
                    out[i, j] = a[i, j] + b[j, i]
            return out
        """)
    a, b = f32(4, 3), f32(3, 4)
    np.testing.assert_allclose(run(function, a, b)["out"], a + b.T)
    program = build(function, a, b)
    assert len(program.calls) == 1
    assert "for" not in opcodes(program)
    assert not alias_safe(program)


def test_scalar_results_fold_their_epilogue() -> None:
    function = python("""
        def norm(x):
            total = 0.0
            for i in range(len(x)):
                total += x[i] * x[i]
            return tw.sqrt(total)
        """)
    x = f32(33)
    program = build(function, x)
    assert len(program.calls) == 1
    assert not program.scratch
    result = run(function, x)
    assert list(result) == ["result"]
    assert result["result"].shape == ()
    np.testing.assert_allclose(result["result"], np.linalg.norm(x), rtol=1e-6)


def test_mean_and_variance_then_a_map() -> None:
    function = python("""
        def standardise(x):
            n = x.shape[0]
            total = 0.0
            for i in range(n):
                total += x[i]
            mean = total / n
            spread = 0.0
            for i in range(n):
                spread += (x[i] - mean) ** 2
            deviation = tw.sqrt(spread / n)
            out = tw.empty((n,), tw.f32)
            for i in range(n):
                out[i] = (x[i] - mean) / deviation
            return out, mean
        """)
    x = f32(40)
    result = run(function, x)
    assert list(result) == ["out", "result1"]
    np.testing.assert_allclose(result["out"], (x - x.mean()) / x.std(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result["result1"], x.mean(), rtol=1e-5, atol=1e-6)


def test_accumulating_stores() -> None:
    function = python("""
        def matmul(a, b):
            m, k = a.shape
            n = b.shape[1]
            c = tw.zeros((m, n), tw.f32)
            for i in range(m):
                for j in range(n):
                    for p in range(k):
                        c[i, j] += a[i, p] * b[p, j]
            return c
        """)
    a, b = f32(3, 4), f32(4, 5)
    np.testing.assert_allclose(run(function, a, b)["c"], a @ b, rtol=1e-5, atol=1e-6)
    program = build(function, a, b)
    assert opcodes(program).count("reduce") == 1
    assert "for" not in opcodes(program)


def test_loop_order_that_cannot_be_parallel() -> None:
    function = python("""
        def matmul(a, b):
            m, k = a.shape
            n = b.shape[1]
            c = tw.zeros((m, n), tw.f32)
            for p in range(k):
                for i in range(m):
                    for j in range(n):
                        c[i, j] += a[i, p] * b[p, j]
            return c
        """)
    a, b = f32(3, 4), f32(4, 5)
    np.testing.assert_allclose(run(function, a, b)["c"], a @ b, rtol=1e-5, atol=1e-6)


def test_prefix_sum_is_serial() -> None:
    function = python("""
        def scan(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.f32)
            total = 0.0
            for i in range(n):
                total = total + x[i]
                out[i] = total
            return out
        """)
    x = f32(20)
    np.testing.assert_allclose(run(function, x)["out"], np.cumsum(x), rtol=1e-4, atol=1e-6)


def test_recurrence_through_the_output() -> None:
    function = python("""
        def scan(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.f32)
            out[0] = x[0]
            for i in range(1, n):
                out[i] = out[i - 1] * 0.5 + x[i]
            return out
        """)
    x = f32(10)
    expected = x.copy()
    for i in range(1, 10):
        expected[i] = expected[i - 1] * np.float32(0.5) + x[i]
    np.testing.assert_allclose(run(function, x)["out"], expected, rtol=1e-6)


def test_rows_in_parallel_columns_in_order() -> None:
    function = python("""
        def scan_rows(x):
            rows, cols = x.shape
            out = tw.empty_like(x)
            for i in range(rows):
                total = 0.0
                for j in range(cols):
                    total += x[i, j]
                    out[i, j] = total
            return out
        """)
    x = f32(5, 6)
    np.testing.assert_allclose(run(function, x)["out"], np.cumsum(x, 1), rtol=1e-5, atol=1e-6)
    (call,) = build(function, x).calls
    (parallel,) = [op for op in call.kernel.body.ops if op.opcode == "parallel"]
    assert len(parallel.operands) == 1


def test_store_and_accumulate_are_split() -> None:
    function = python("""
        def k(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.f32)
            total = 0.0
            for i in range(n):
                out[i] = x[i] * 2
                total += x[i]
            return out, total
        """)
    x = f32(12)
    result = run(function, x)
    np.testing.assert_allclose(result["out"], 2 * x)
    np.testing.assert_allclose(result["result1"], x.sum(), rtol=1e-5, atol=1e-6)
    assert "for" not in opcodes(build(function, x))


def test_branches_assign_variables() -> None:
    function = python("""
        def k(x, limit):
            n = x.shape[0]
            out = tw.empty((n,), tw.f32)
            for i in range(n):
                y = x[i]
                if x[i] > limit:
                    y = limit
                elif x[i] < -limit:
                    y = -limit
                z = 0.0
                if y > 0:
                    z = y * 2
                out[i] = z + y
            return out
        """)
    x = f32(30)
    y = np.clip(x, -0.5, 0.5)
    np.testing.assert_allclose(run(function, x, 0.5)["out"], np.where(y > 0, 2 * y, 0) + y, rtol=1e-6)


def test_guards_protect_loads() -> None:
    function = python("""
        def blur(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.f32)
            for i in range(n):
                left = x[i - 1] if i > 0 else 0.0
                right = 0.0
                if i + 1 < n and x[i + 1] > 0:
                    right = x[i + 1]
                out[i] = left + right
            return out
        """)
    x = f32(9)
    right = np.append(x[1:], 0)
    np.testing.assert_allclose(run(function, x)["out"], np.append(0, x[:-1]) + np.where(right > 0, right, 0), rtol=1e-6)
    assert not build(function, x).checks


def test_shifted_reads_and_negative_indices() -> None:
    function = python("""
        def difference(x):
            n = x.shape[0]
            out = tw.empty((n - 1,), tw.f32)
            for i in range(n - 1):
                out[i] = x[i + 1] - x[i] + x[-1]
            return out
        """)
    x = f32(9)
    np.testing.assert_allclose(run(function, x)["out"], np.diff(x) + x[-1], rtol=1e-5, atol=1e-6)
    assert run(function, f32(1))["out"].shape == (0,)


def test_steps_and_reversed_ranges() -> None:
    function = python("""
        def k(x):
            n = x.shape[0]
            out = tw.zeros((n,), tw.f32)
            for i in range(0, n, 3):
                out[i] = x[i]
            last = 0.0
            for i in range(n - 1, -1, -1):
                last = last * 0.5 + x[i]
            return out, last
        """)
    x = f32(11)
    expected = np.zeros(11, np.float32)
    expected[::3] = x[::3]
    last = 0.0
    for value in x[::-1]:
        last = last * 0.5 + float(value)
    result = run(function, x)
    np.testing.assert_allclose(result["out"], expected)
    np.testing.assert_allclose(result["result1"], last, rtol=1e-5, atol=1e-6)


def test_triangular_reduction() -> None:
    function = python("""
        def k(m):
            n = m.shape[0]
            out = tw.empty((n,), tw.f32)
            for i in range(n):
                total = 0.0
                for j in range(i + 1):
                    total += m[i, j]
                out[i] = total
            return out
        """)
    m = f32(6, 6)
    np.testing.assert_allclose(run(function, m)["out"], np.tril(m).sum(1), rtol=1e-5, atol=1e-6)
    assert "for" not in opcodes(build(function, m))


def test_while_loop() -> None:
    function = python("""
        def collatz(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.i64)
            for i in range(n):
                value = x[i]
                steps = 0
                while value != 1:
                    value = value // 2 if value % 2 == 0 else value * 3 + 1
                    steps += 1
                out[i] = steps
            return out
        """)
    x = np.array([1, 2, 3, 6, 7], np.int64)
    assert run(function, x)["out"].tolist() == [0, 1, 7, 8, 16]


def test_gather_and_scalars() -> None:
    function = python("""
        def gather(x, idx, shift, scale):
            out = tw.empty(idx.shape, tw.f32)
            for i in range(len(idx)):
                out[i] = x[idx[i] + shift] * scale
            return out
        """)
    x, idx = f32(10), np.array([3, 1, 4, 1], np.int32)
    np.testing.assert_allclose(run(function, x, idx, 2, 1.5)["out"], x[idx + 2] * 1.5, rtol=1e-6)


def test_scalar_bound_loops() -> None:
    function = python("""
        def power(x, times):
            out = tw.empty_like(x)
            for i in range(len(x)):
                y = x[i]
                for _ in range(times):
                    y = y * y
                out[i] = y
            return out
        """)
    x = f32(5)
    np.testing.assert_allclose(run(function, x, 3)["out"], x**8, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("expression", "reference"),
    [
        ("tw.relu(x[i])", lambda x: np.maximum(x, 0)),
        ("tw.silu(x[i])", lambda x: x / (1 + np.exp(-x))),
        ("tw.gelu(x[i])", lambda x: x * 0.5 * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))),
        ("tw.softplus(x[i])", lambda x: np.log1p(np.exp(x))),
        ("tw.clamp(x[i], -0.5, 0.5)", lambda x: np.clip(x, -0.5, 0.5)),
        ("tw.where(x[i] > 0, x[i], x[i] * 0.1)", lambda x: np.where(x > 0, x, x * 0.1)),
        ("abs(x[i]) ** 0.5", lambda x: np.abs(x) ** 0.5),
        ("x[i] ** 3 + x[i] ** -2", lambda x: x**3 + x**-2.0),
        ("min(x[i], 0.25, i)", lambda x: np.minimum(np.minimum(x, 0.25), np.arange(x.size))),
        ("x[i] // 0.5 + x[i] % 0.5", lambda x: x // 0.5 + x % 0.5),
        ("tw.fma(x[i], 2, 1) if x[i] > 0 else -x[i]", lambda x: np.where(x > 0, 2 * x + 1, -x)),
        ("tw.floor(x[i]) + tw.sigmoid(x[i])", lambda x: np.floor(x) + 1 / (1 + np.exp(-x))),
        ("i / len(x) + i // 2 + i % 3", lambda x: np.arange(x.size) / x.size + np.arange(x.size) // 2 + np.arange(x.size) % 3),
        ("tw.isnan(x[i]) + math.pi", lambda x: np.full(x.size, np.pi)),
        ("x[i] * (not x[i] > 0 or i > 3)", lambda x: x * (~(x > 0) | (np.arange(x.size) > 3))),
    ],
)
def test_functions(expression: str, reference: object) -> None:
    function = python(f"""
        def k(x):
            out = tw.empty_like(x)
            for i in range(len(x)):
                out[i] = {expression}
            return out
        """)
    x = f32(17)
    assert callable(reference)
    np.testing.assert_allclose(run(function, x)["out"], reference(x.astype(np.float64)), rtol=2e-5, atol=1e-6)


def test_explicit_cast_rounds_and_arithmetic_does_not() -> None:
    function = python("""
        def k(x):
            a = tw.empty((len(x),), tw.f32)
            b = tw.empty((len(x),), tw.f32)
            for i in range(len(x)):
                y = x[i] * x[i]
                a[i] = y
                b[i] = tw.bf16(y)
            return a, b
        """)
    x = f32(20).astype(ml_dtypes.bfloat16)
    result = run(function, x)
    square = x.astype(np.float32) ** 2
    np.testing.assert_array_equal(result["a"], square)
    np.testing.assert_array_equal(result["b"], square.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_whole_arrays_and_axis_reductions() -> None:
    function = python("""
        def k(x, y):
            z = x * 2 + y
            lengths = tw.sqrt(tw.sum(z * z, axis=1))
            best = tw.argmax(z, axis=-1)
            low = tw.min(z)
            return lengths, best, low, tw.sum(x > 0), tw.any(x > 10)
        """)
    x, y = f32(4, 5), f32(5)
    z = 2 * x + y
    result = run(function, x, y)
    assert list(result) == ["lengths", "best", "result2", "result3", "result4"]
    np.testing.assert_allclose(result["lengths"], np.sqrt((z * z).sum(1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result["best"], z.argmax(1))
    np.testing.assert_allclose(result["result2"], z.min())
    assert result["result3"].dtype == np.int64
    assert result["result3"] == (x > 0).sum()
    assert result["result4"].dtype == np.bool_
    assert not result["result4"]


def test_axis_reduction_and_epilogue_are_one_kernel() -> None:
    function = python("""
        def lengths(x):
            return tw.sqrt(tw.sum(x * x, axis=0))
        """)
    x = f32(4, 5)
    program = build(function, x)
    assert len(program.calls) == 1
    assert not program.scratch
    np.testing.assert_allclose(only(run(function, x)), np.sqrt((x * x).sum(0)), rtol=1e-5, atol=1e-6)


def test_array_value_used_in_a_loop() -> None:
    function = python("""
        def k(m):
            rows, cols = m.shape
            means = tw.sum(m, axis=1) / cols
            out = tw.empty_like(m)
            for i, j in tw.grid(rows, cols):
                out[i, j] = m[i, j] - means[i]
            return out
        """)
    m = f32(3, 7)
    np.testing.assert_allclose(run(function, m)["out"], m - m.mean(1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_top_level_value_of_a_changing_array() -> None:
    function = python("""
        def k(x):
            out = tw.full((3,), 1.0, tw.f32)
            before = out[0] + x[0]
            out[0] = 7.0
            out[1] = before
            return out
        """)
    assert run(function, np.array([4.0], np.float32))["out"].tolist() == [7, 5, 1]


def test_scratch_array_inside_a_row() -> None:
    function = python("""
        def k(x):
            rows, cols = x.shape
            tmp = tw.empty((rows, cols), tw.f32)
            out = tw.empty((rows,), tw.f32)
            for i in range(rows):
                for j in range(cols):
                    tmp[i, j] = x[i, j] * 2
                best = -math.inf
                for j in range(cols):
                    best = max(best, tmp[i, j])
                out[i] = best
            return out
        """)
    x = f32(4, 3)
    np.testing.assert_allclose(run(function, x)["out"], 2 * x.max(1))
    program = build(function, x)
    assert [s.name for s in program.scratch] == ["tmp"]
    assert len(program.calls) == 1


def test_initial_values_count() -> None:
    function = python("""
        def k(x):
            total = x[0]
            high = 3
            product = 2.0
            every = True
            for i in range(len(x)):
                total += x[i]
                high = max(high, x[i])
                product *= x[i]
                every = every and x[i] > -100
            return total, high, product, every
        """)
    x = f32(6)
    result = [float(v) for v in run(function, x).values()]
    np.testing.assert_allclose(result, [x[0] + x.sum(), max(3, x.max()), 2 * x.prod(), 1], rtol=1e-5, atol=1e-6)


def test_strided_input() -> None:
    function = python("""
        def k(x):
            out = tw.empty_like(x)
            for i, j in tw.grid(x.shape[0], x.shape[1]):
                out[i, j] = x[i, j] + 1
            return out
        """)
    program = lower_kernel(check_kernel(function, [ArrayArg(dtypes.f32, 2, (None, 0), align=16)]))
    verify_program(program)
    assert str(program.input_arrays[0].type) == "tensor<f32, [x$0, x$1], [x$s0, 0], align=16>"
    assert not alias_safe(program)


def test_empty_reductions() -> None:
    function = python("""
        def k(x):
            return tw.max(x), tw.min(x), tw.sum(x)
        """)
    assert [float(v) for v in run(function, f32(0)).values()] == [-np.inf, np.inf, 0]
    checked = build(python("def k(x):\n    return tw.argmax(x)\n"), f32(3))
    assert [(str(c.left), c.relation, str(c.right), c.message, c.code) for c in checked.checks] == [
        ("1", "le", "x$0", "argmax of an empty axis", "TW004")
    ]


def test_unproven_index_is_checked_at_the_call() -> None:
    function = python("""
        def k(x, y):
            n = x.shape[0]
            out = tw.empty((n,), tw.f32)
            for i in range(n):
                out[i] = y[2 * i + 1]
            return out
        """)
    (check,) = build(function, f32(3), f32(6)).checks
    assert check.code == "TW013"
    assert check.message == "index (2 * i) + 1 of 'y' reaches {left}, but axis 0 has extent {right}"
    values = {"n": 3, "y$0": 6}
    assert check.left.evaluate(values) == 5
    assert check.left.evaluate({"n": 0, "y$0": 0}) == -1
