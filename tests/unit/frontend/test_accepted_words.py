"""Every word that Python kernels and commands accept acts, or is refused with the reason; the page of words is current."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tools import accepted_words

import tilewright as tw
from tilewright.cli.main import cli

ROOT = Path(__file__).parents[3]
A = np.ones((512, 512), np.float32)


def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, depth = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = 0.0
        for k in range(depth):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out


def scaled(x: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = x[i, j] * v[j]
    return out


def schedule(**options: object) -> str:
    return tw.kernel(product, **options).compile(A, A, target="sm_90a").schedule


def test_the_page_is_current_and_whole() -> None:
    assert accepted_words.missing() == []
    assert accepted_words.DOCUMENT.read_text(encoding="utf-8") == accepted_words.page(), "python tools/accepted_words.py --write"


def test_options_act_when_the_function_is_given_with_them() -> None:
    assert "family=mma" in schedule() and "tf32_terms=4" in schedule()
    assert "family=fma" in schedule(precision="ieee")
    assert "family=wgmma" in schedule(precision="tf32")
    assert "m=64 n=64" in schedule(tile=(64, 64))
    assert "m=64" in schedule(tile={"m": 64})
    with pytest.raises(tw.TargetLimit, match="no schedule"):
        schedule(tile=(64, 7), strict=True)
    with pytest.raises(tw.UserError, match="carries values"):
        schedule(kind="elementwise")
    assert schedule(kind="matmul") == schedule()


def test_gpu_options_act_when_the_function_is_given_with_them() -> None:
    def body(x: tw.Array) -> None:
        s = tw.shared((1024,), tw.f32)
        s[tw.thread.x] = x[tw.thread.x]
        tw.barrier()
        x[tw.thread.x] = s[tw.thread.x]

    x = np.ones(1024, np.float32)
    assert ".minnctapersm 2" in tw.gpu(body, min_blocks=2)[1, 1024].compile(x, target="sm_90a").code.decode()
    with pytest.raises(tw.TargetLimit, match="min_blocks=3, but a multiprocessor of sm_90a holds 2"):
        tw.gpu(body, min_blocks=3)[1, 1024].compile(x, target="sm_90a")
    with pytest.raises(tw.TargetLimit, match="shared memory"):
        tw.gpu(body, min_blocks=8)[1, 32, 100_000].compile(x, target="sm_90a")
    with pytest.raises(tw.UserError, match="max_threads is 128"):
        tw.gpu(body, max_threads=128)[1, 1024]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": "large"}, "tile is 'large'"),
        ({"workgroup": 1 << 20}, "at most 1024"),
        ({"shared": 1 << 30}, "at most"),
        ({"strict": 1}, "strict is 1"),
        ({"kind": "mtmul"}, "did you mean 'matmul'"),
        ({"kind": "mine"}, "unknown kernel kind"),
        ({"kind": "scan"}, "call tw.scan"),
        ({"kind": "matmul", "reduce": "+"}, "leave kind= out"),
        ({"broadcast": "v"}, "broadcast is 'v'"),
        ({"device": 3}, "device is 3"),
        ({"asynchronous": "no"}, "asynchronous is 'no'"),
        ({"precision": "f8"}, "precision is 'f8'"),
        ({"axis": 1}, "without reduce="),
        ({"schedule": 4}, "schedule is 4"),
        ({"launches": 2}, "launches is 2"),
    ],
)
def test_options_of_the_wrong_form_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        tw.kernel(scaled, **options)


def test_other_options_and_other_things_than_functions_are_refused() -> None:
    for call in (lambda: tw.kernel(scaled, tlie=4), lambda: tw.gpu(scaled, tile=4), lambda: tw.cpu(scaled, tile=4)):
        with pytest.raises(TypeError, match="unexpected keyword"):
            call()
    for give in (tw.kernel, tw.gpu, tw.inline_always):
        with pytest.raises(tw.UserError, match="given a int"):
            give(3)  # type: ignore[operator]
    with pytest.raises(tw.UserError, match="nothing to choose"):
        tw.kernel(scaled, launches=1)(A, A[0], tune=True)
    with pytest.raises(tw.UserError, match="tune= is 'yes'"):
        tw.kernel(scaled)(A, A[0], tune="yes")


def test_promises_are_checked() -> None:
    assert np.array_equal(tw.kernel(scaled, broadcast={"v": 1})(A, A[0]), A)
    with pytest.raises(tw.UserError, match="broadcast"):
        tw.kernel(scaled, broadcast={"v": 0})(A, A[0])
    for kind in ("matmul", "conv2d_depthwise", "attention"):
        with pytest.raises(tw.UserError, match=f"@kernel {kind}, but"):
            tw.kernel(scaled, kind=kind)(A, A[0])
    with pytest.raises(tw.TilewrightError, match="gpu_compute"):
        tw.kernel(scaled, gpu_compute=True)(A, A[0], device="cpu")


def test_metadata_are_public_and_filled_in() -> None:
    said = tw.kernel(product, kind="matmul", tile=(64, 32), workgroup=(16, 8), shared=4096, precision="tf32", device="cuda:1", asynchronous=True).metadata
    assert isinstance(said, tw.KernelMetadata)
    assert said.kind is tw.KernelKind.MATMUL
    assert said.device == tw.DeviceTarget(("cuda:1",))
    assert said.compile_target is tw.CompileTarget.GPU
    assert (said.workgroup_size, said.shared_memory_bytes, said.precision, said.is_async) == ((16, 8, 1), 4096, "tf32", True)
    assert said.hints == tw.KernelHints(tile=(("0", 64), ("1", 32)))
    assert said.constraints == tw.ExecutionConstraints()


# -- annotations ----------------------------------------------------------------------------------------------------------


def annotated(param: str, result: str, tmp_path: Path) -> str:
    path = tmp_path / "kernel.py"
    path.write_text(f"import tilewright as tw\n\n\n@tw.kernel\ndef f(x: {param}) -> {result}:\n    return 2 * x\n")
    done = CliRunner().invoke(cli, ["check", str(path), "--args", "x=f32[4,8]"])
    return done.output if done.exit_code else ""


@pytest.mark.parametrize(
    ("param", "result", "message"),
    [
        ("tw.Array", "tw.Array", ""),
        ('"f32[rows, 8]"', '"f32[rows, 8]"', ""),
        ("list", "tw.Array", "'list', which is no type"),
        ('"f32[n * 2, 8]"', "tw.Array", "unknown name 'n'"),
        ('"f32[n, 2 * n]"', '"f32[n, 2 * n]"', ""),
        ('"f32[n, n + 1]"', "tw.Array", "axis 1 of 'x' is 8"),
        ('"f32[n, n / 2]"', "tw.Array", "is no size"),
        ('"f32[4, 8, bf16]"', "tw.Array", "is a dtype"),
        ('"f32[n <= 8, 8]"', "tw.Array", "is not available in a type"),
        ("tw.Array", '"f64[rows, cols]"', "annotated as f64, and is f32"),
        ("tw.Array", '"f32[rows]"', "annotated with rank 1"),
        ("tw.Array", "float", "annotated as a number"),
        ("tw.Array", "tuple[tw.Array, tw.Array]", "returns 1"),
    ],
)
def test_annotations_hold(param: str, result: str, message: str, tmp_path: Path) -> None:
    found = annotated(param, result, tmp_path)
    assert message in found
    assert bool(found) == bool(message)


def test_numbers_are_what_they_are_annotated_as() -> None:
    @tw.kernel
    def times(x: tw.Array, n: int, on: bool) -> tw.Array:
        return n * x if on else x

    with pytest.raises(tw.UserError, match="whole number"):
        times(A, 2.5, True)
    with pytest.raises(tw.UserError, match="True or False"):
        times(A, 2, 1.5)


def test_packed_blocks_are_refused_where_one_would_compute_with_them() -> None:
    for call in (lambda: tw.gpu_scan(A[0], dtype=tw.q4_0, device="cpu"), lambda: tw.gpu_reduce(A[0], dtype=tw.q8_0, device="cpu")):
        with pytest.raises(tw.UserError, match=r"q[48]_0 is a type of packed blocks, which tw\.quantize makes"):
            call()


# -- commands -------------------------------------------------------------------------------------------------------------


def output(*words: str | Path) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    return done.output if done.exit_code else ""


def test_options_that_would_do_nothing_are_refused() -> None:
    relu, saxpy, gallery = ROOT / "examples/zyn/relu.zyn", ROOT / "examples/simt/saxpy.py", ROOT / "examples/gallery.py"
    for words, option in (
        (("check", "--json", "-v", gallery), "--verbose"),
        (("compile", relu, "--block", "32"), "--block"),
        (("compile", saxpy, "--target", "cpu", "--stage", "ptx"), "--target"),
        (("inspect", gallery, "--fusion", "--plot", "x.png"), "--plot"),
        (("inspect", saxpy, "--kernel", "saxpy", "--precision", "tf32"), "--precision"),
        (("emulate", relu, "--thread", "3"), "--thread"),
        (("emulate", relu, "--", "3"), "arguments after --"),
        (("emulate", saxpy, "--stage", "loop"), "--stage"),
    ):
        assert f"{option} does nothing here" in output(*words), words
    assert "no result 'nosuch'" in output("emulate", relu, "--out", "nosuch=x.npy")


OPTIONS = """
import tilewright as tw


@tw.kernel({options})
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, depth = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = 0.0
        for k in range(depth):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out
"""


def test_decorators_of_files_that_are_read_act_too(tmp_path: Path) -> None:
    def inspected(options: str) -> str:
        path = tmp_path / "file.py"
        path.write_text(OPTIONS.format(options=options))
        return CliRunner().invoke(cli, ["inspect", str(path), "--target", "H100", "--args", "a=f32[512,512] b=f32[512,512]"]).output

    assert "family=wgmma" in inspected('precision="tf32"')
    assert "m=64 n=64" in inspected("tile=(64, 64)")
    assert "did you mean 'tile'" in inspected("tlie=(64, 64)")
    assert "must be a literal" in inspected("tile=TILE")
    assert "nothing in product" in inspected('schedule="family=wgmma m=1"') or "schedule" in inspected('schedule="family=wgmma m=1"')
    np.save(tmp_path / "a.npy", np.ones((4, 4), np.float32))
    inspected('device="emulator:loop"')
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "file.py"), "--in", f"a={tmp_path}/a.npy", "--in", f"b={tmp_path}/a.npy"])
    assert "emulator:loop" in done.output


def test_names_of_chips_and_gpus_are_other_words() -> None:
    from tilewright.base.target import parse_target
    from tilewright.execute.devices import find_device

    assert parse_target("h100").name == parse_target("H100").name == "sm_90a"
    assert parse_target("RTX 4090").name == "sm_89"
    with pytest.raises(tw.TilewrightError, match="cuda"):
        raise_or_fail(lambda: find_device("gpu:99"))


def raise_or_fail(call: Callable[[], object]) -> None:
    call()
    pytest.fail("found a device that nobody has")
