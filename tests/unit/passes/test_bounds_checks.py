"""Bounds checks compiled into kernels: what they find is what the emulator finds, and they change nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from assembled import assemble
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.compile.build import llvm_text
from tilewright.ir.emulator import run_kernel
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.types import Tensor
from tilewright.ir.verify import verify_kernel
from tilewright.passes.late.bounds_checks import FIELDS, check_bounds, check_kernel, failure_of

HEAD = """kernel @k stage=thread grid=[g, 2] threads=64 {block = [32, 2, 1]} {
  param %x: tensor<f32, [n, m], [m, 1], align=16>
  param %out: tensor<f32, [n, m], [m, 1], align=16>
  %b = program_id {axis = 0} : i64
  %y = program_id {axis = 1} : i64
  %t = thread_id : i64
  %0 = const {value = 0, dtype = i64} : i64
  %2 = const {value = 2, dtype = i64} : i64
  %s = alloc {space = "shared", shape = [50], dtype = f32} : tensor<f32, [50], [1], shared>
"""


def kernel(body: str) -> Kernel:
    made = parse_kernel(HEAD + body + "\n}", "k.py")
    verify_kernel(made)
    return made


def run(body: str, n: int = 4, m: int = 64, g: int = 2) -> tuple[str, np.ndarray]:
    """The error of the kernel with checks, and what it left in `out`."""
    plain = kernel(body)
    checked, sites = check_kernel(plain)
    verify_kernel(checked)
    x = np.arange(n * m, dtype=np.float32).reshape(n, m)
    out = np.zeros((n, m), np.float32)
    failure = np.zeros(FIELDS, np.int64)
    run_kernel(checked, [x, out, failure], {"n": n, "m": m, "g": g})
    error = failure_of(failure.tolist(), sites, plain, (g, 2))
    return "" if error is None else str(error).splitlines()[0], out


def emulated(body: str, n: int = 4, m: int = 64, g: int = 2) -> str:
    x, out = np.zeros((n, m), np.float32), np.zeros((n, m), np.float32)
    with pytest.raises(UserError) as error:
        run_kernel(kernel(body), [x, out], {"n": n, "m": m, "g": g})
    return str(error.value).splitlines()[0]


COPY = """
  %r = mul %b, %2 : i64
  %row = add %r, %y : i64
  %v = load %x, %row, %t : f32
  store %out, %row, %t, %v
"""


def test_nothing_is_wrong() -> None:
    error, out = run(COPY)
    assert error == ""
    np.testing.assert_array_equal(out, np.arange(256).reshape(4, 64))


@pytest.mark.parametrize(("n", "m"), [(4, 50), (3, 64)])
def test_the_emulator_says_the_same(n: int, m: int) -> None:
    error, out = run(COPY, n, m)
    assert error == emulated(COPY, n, m)
    # What is inside is done nevertheless, what is outside is not.
    np.testing.assert_array_equal(out, np.arange(n * m).reshape(n, m))


def test_the_message() -> None:
    assert run(COPY, 4, 50)[0] == (
        "k.py:13:3: error[TW050]: load of 'x' at [0, 50] is out of bounds: index 50 (axis 1), extent 50, in block (0, 0), "
        "thread (18, 1)"
    )


def test_shared_arrays_and_negative_indices() -> None:
    below = "%i = sub %t, %2 : i64\n%v = load %x, %0, %i : f32\nstore %out, %0, %t, %v"
    assert "load of 'x' at [0, -2] is out of bounds: index -2 (axis 1), extent 64, in block (0, 0), thread (0, 0)" in run(below)[0]
    assert "store of 's' at [50] is out of bounds: index 50, extent 50" in run("%v = load %x, %0, %t : f32\nstore %s, %t, %v")[0]


def test_atomics() -> None:
    body = '%v = load %x, %0, %0 : f32\n%old = atomic %out, %t, %0, %v {kind = "add", scope = "device"} : f32'
    assert "atomic of 'out' at [4, 0] is out of bounds: index 4 (axis 0), extent 4" in run(body)[0]


def test_vectors_may_cross_rows_but_not_the_end() -> None:
    body = """
  %four = const {value = 4, dtype = i64} : i64
  %i = mul %t, %four : i64
  %z = lt %i, %last : bool
  if %z {
  %v = load %x, %row, %i {width = 4, unaligned = true} : vec<f32, 4>
  store %out, %row, %i, %v {unaligned = true}
  yield
  } {
  yield
  }
"""
    head = "%row = const {{value = {}, dtype = i64}} : i64\n%last = const {{value = 50, dtype = i64}} : i64"
    assert run(head.format(0) + body, 4, 50)[0] == ""
    text, out = run(head.format(3) + body, 4, 50)
    assert "load of 4 elements of 'x' from [3, 48] on is out of bounds: it has 200 elements" in text
    assert out[3, 47] == 197 and out[3, 48] == 0


def test_masked_accesses_count_where_they_happen() -> None:
    body = """
  %fifty = const {value = 50, dtype = i64} : i64
  %z = lt %t, %fifty : bool
  %v = load %x, %0, %t, %z {masked = true} : f32
  store %out, %0, %t, %v, %z {masked = true}
"""
    assert run(body, 4, 50)[0] == ""
    assert "load of 'x' at [0, 40]" in run(body, 4, 40)[0]


def test_a_thread_that_failed_leaves_its_loop() -> None:
    """A search for a number below 0 that is not there would never end on zeros."""
    body = """
  %one = const {value = 1, dtype = i64} : i64
  %low = const {value = -1.0, dtype = f32} : f32
  %end = while %0 : i64 (%i: i64) {
    %v = load %x, %0, %i : f32
    %c = gt %v, %low : bool
    yield %c, %i
  } (%j: i64) {
    %n = add %j, %one : i64
    yield %n
  }
"""
    assert "load of 'x' at [0, 64]" in run(body)[0]


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_checks_become_code(target: str) -> None:
    plain = kernel(COPY)
    inputs = tuple(ProgramArray(p.name, p.type, "input") for p in plain.params if isinstance(p.type, Tensor))
    program = Program("k", inputs, (), (), (KernelCall(plain, ("x", "out")),))
    checked, sites = check_bounds(program)
    assert [a.name for a in checked.inputs] == ["x", "out", "$failure"] and len(sites) == 2
    text, _ = llvm_text(checked, parse_target(target))
    ptx = emit_assembly(text, parse_target(target))
    assert "atom" in ptx and "cas" in ptx
    assemble(ptx, target)


ASYNC = """
  %four = const {{value = 4, dtype = i64}} : i64
  %at = mul %t, %four : i64
  %far = add %at, %{move} : i64
  %near = add %0, %{offset} : i64
  %z = lt %t, %{most} : bool
  if %z {{
    copy_async %s, %near, %x, %y, %far {{bytes = 16}}
    yield
  }} {{
    yield
  }}
  copy_commit
  copy_wait {{pending = 0}}
"""


def test_copies_by_threads() -> None:
    lines = "\n".join(f"  %c{n} = const {{value = {n}, dtype = i64}} : i64" for n in (0, 1, 4, 8, 48, 64, 256))
    assert run(lines + ASYNC.format(move="c0", offset="c0", most="c1"))[0] == ""
    text = run(lines + ASYNC.format(move="c256", offset="c0", most="c1"))[0]
    assert "copy_async of 4 elements of 'x' from [0, 256] on is out of bounds: it has 256 elements" in text
    text = run(lines + ASYNC.format(move="c0", offset="c48", most="c1"))[0]
    assert "copy_async of 4 elements of 's' from [48] on is out of bounds: it has 50 elements, in block (0, 0), thread (0, 0)" in text


BULK = """
  %c1 = const {{value = 1, dtype = i64}} : i64
  %c48 = const {{value = 48, dtype = i64}} : i64
  %near = const {{value = {near}, dtype = i64}} : i64
  %far = const {{value = {far}, dtype = i64}} : i64
  %count = const {{value = {count}, dtype = i64}} : i64
  %bars = alloc {{space = "shared", shape = [1], dtype = u64, align = 16}} : tensor<u64, [1], [1], shared, align=16>
  %buffer = alloc {{space = "shared", shape = [64], dtype = f32, align = 16}} : tensor<f32, [64], [1], shared, align=16>
  %first = lt %t, %c1 : bool
  if %first {{
    mbarrier_init %bars, %0 {{count = 1}}
    fence_init
    yield
  }} {{
    yield
  }}
  barrier
  if %first {{
    mbarrier_expect %bars, %0 {{bytes = {bytes}}}
    bulk_load %buffer, %near, %x, %0, %far, %count, %bars, %0
    yield
  }} {{
    yield
  }}
  %parity = const {{value = 0, dtype = i32}} : i32
  mbarrier_wait %bars, %0, %parity
  %v = load %buffer, %0 : f32
  barrier
  if %first {{
    store %out, %0, %0, %v
    bulk_store %buffer, %near, %out, %y, %far, %count
    tma_commit
    tma_wait {{pending = 0}}
    yield
  }} {{
    yield
  }}
"""


def test_bulk_copies() -> None:
    def bulk(near: int, far: int, count: int) -> str:
        return run(BULK.format(near=near, far=far, count=count, bytes=4 * count), g=1)[0]

    assert bulk(0, 0, 16) == ""
    # Who waits for the bytes goes on.
    assert "bulk_load of 16 elements of 'x' from [0, 252] on is out of bounds: it has 256 elements" in bulk(0, 252, 16)
    assert "bulk_load of 16 elements of 'buffer' from [56] on is out of bounds: it has 64 elements" in bulk(56, 0, 16)
    store = BULK.replace("%near, %x, %0, %far, %count, %bars", "%0, %x, %0, %0, %count, %bars")
    text = run(store.format(near=0, far=60, count=16, bytes=64), n=1, g=1)[0]
    assert "bulk_store of 16 elements of 'out' from [0, 60] on is out of bounds: it has 64 elements" in text
    verify_kernel(check_kernel(kernel(BULK.format(near=0, far=0, count=512, bytes=2048)))[0])


def test_other_blocks_of_a_cluster() -> None:
    body = """
  %rank = const {value = 0, dtype = i32} : i32
  %v = load_remote %s, %t, %rank : f32
  store_remote %s, %t, %rank, %v
"""
    checked, sites = check_kernel(kernel(body))
    verify_kernel(checked)
    assert [(site.opcode, site.array, site.rank) for site in sites] == [("load_remote", "s", 1), ("store_remote", "s", 1)]
