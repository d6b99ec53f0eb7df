"""Isolated compilation: crashes, hangs and errors of the worker come back as errors, and the next request works."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.base.errors import CompilerBug, TargetLimit
from tilewright.compile import isolate
from tilewright.compile.isolate import IsolatedCompiler, compile_isolated, emit_assembly

NVPTX = ("nvptx64-nvidia-cuda", "sm_90a", "+ptx83")
EMIT = "tilewright.compile.isolate:emit_assembly"
HEAD = """target datalayout = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"
"""
GOOD = HEAD + "define ptx_kernel void @k(ptr addrspace(1) %x) {\n  store float 1.0, ptr addrspace(1) %x\n  ret void\n}\n"
FATAL = (
    HEAD
    + "declare float @llvm.log2.f32(float)\n"
    + "define float @k(float %x) {\n  %r = call float @llvm.log2.f32(float %x)\n  ret float %r\n}\n"
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[IsolatedCompiler]:
    sys.path.insert(0, str(Path(__file__).parent))
    client = IsolatedCompiler(package="isolate_functions")
    yield client
    client.close()
    sys.path.remove(str(Path(__file__).parent))


def saved_file(error: CompilerBug) -> Path:
    found = re.search(r"its input is in (\S+)", str(error))
    assert found
    return Path(found.group(1))


def test_llvm_backend_abort_does_not_end_this_process() -> None:
    with pytest.raises(CompilerBug, match="ended its process") as caught:
        compile_isolated(EMIT, FATAL, *NVPTX)
    assert caught.value.code == "TW040"
    assert "flog2" in str(caught.value)
    path = saved_file(caught.value)
    assert FATAL in path.read_text()
    assert "; argument: sm_90a" in path.read_text()
    path.unlink()
    assert b".entry k" in compile_isolated(EMIT, GOOD, *NVPTX)


def test_result_equals_the_direct_one() -> None:
    assert compile_isolated(EMIT, GOOD, *NVPTX) == emit_assembly(GOOD, *NVPTX)


def test_refused_text_is_an_ordinary_error() -> None:
    with pytest.raises(CompilerBug, match="LLVM refused its input"):
        compile_isolated(EMIT, "no such thing\n", *NVPTX)


def test_bytes_and_text_arguments(compiler: IsolatedCompiler) -> None:
    blob = bytes(range(256)) * 40000
    assert compiler.request("isolate_functions:double", [blob]) == blob * 2
    assert compiler.request("isolate_functions:greet", ["wörld"]) == "hello wörld".encode()
    assert compiler.request("isolate_functions:double", [b""]) == b""


def test_the_worker_is_another_process_and_stays(compiler: IsolatedCompiler) -> None:
    first = compiler.request("isolate_functions:process_id", [])
    assert int(first) == compiler.worker_id != os.getpid()
    assert compiler.request("isolate_functions:process_id", []) == first


def test_printing_and_reading_do_not_disturb_the_pipe(compiler: IsolatedCompiler) -> None:
    assert compiler.request("isolate_functions:chatter", ["x" * 100000]) == b""
    assert compiler.request("isolate_functions:double", [b"a"]) == b"aa"


def test_signal_is_named_with_what_was_printed(compiler: IsolatedCompiler) -> None:
    with pytest.raises(CompilerBug, match=r"by signal 6") as caught:
        compiler.request("isolate_functions:abort", ["text\nof two lines"])
    assert "about to abort: text" in str(caught.value)
    saved_file(caught.value).unlink()


def test_timeout(compiler: IsolatedCompiler) -> None:
    with pytest.raises(CompilerBug, match=r"did not finish within 0\.3 s") as caught:
        compiler.request("isolate_functions:sleep", ["30"], timeout=0.3)
    saved_file(caught.value).unlink()
    assert compiler.request("isolate_functions:double", [b"a"]) == b"aa"


def test_errors_keep_their_kind(compiler: IsolatedCompiler) -> None:
    with pytest.raises(TargetLimit) as caught:
        compiler.request("isolate_functions:limit", [])
    assert str(caught.value) == "error[TW020]: too much\nhelp: use less"
    with pytest.raises(CompilerBug, match="ZeroDivisionError: none of ours"):
        compiler.request("isolate_functions:fault", [])
    with pytest.raises(CompilerBug, match="no attribute 'missing'"):
        compiler.request("isolate_functions:missing", [])


def test_functions_of_other_packages_are_refused() -> None:
    with pytest.raises(CompilerBug, match="not a function of tilewright"):
        compile_isolated("os:abort")
    with pytest.raises(CompilerBug, match="not a function of tilewright"):
        compile_isolated("tilewrightish:run")


def test_a_worker_killed_while_idle_is_replaced(compiler: IsolatedCompiler) -> None:
    compiler.request("isolate_functions:double", [b"a"])
    before = compiler.worker_id
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert compiler.request("isolate_functions:double", [b"a"]) == b"aa"
    assert compiler.worker_id != before
    with pytest.raises(ChildProcessError):
        os.waitpid(before, os.WNOHANG)


def test_a_request_whose_worker_is_killed_is_tried_again(compiler: IsolatedCompiler, tmp_path: Path) -> None:
    assert compiler.request("isolate_functions:killed_once", [str(tmp_path / "marker")]) == b"second time"


def test_threads(compiler: IsolatedCompiler) -> None:
    results: dict[int, bytes] = {}

    def work(number: int) -> None:
        results[number] = compiler.request("isolate_functions:double", [str(number).encode()])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number).encode() * 2 for number in range(16)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_uses_its_own_worker() -> None:
    compile_isolated(EMIT, GOOD, *NVPTX)
    mine = isolate._shared.worker_id
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = compile_isolated(EMIT, GOOD, *NVPTX)
            os.write(send, f"{isolate._shared.worker_id} {len(text)}".encode())
            isolate._shared.close()
        finally:
            os._exit(0)
    os.close(send)
    theirs, length = os.read(receive, 100).decode().split()
    os.waitpid(child, 0)
    assert int(theirs) != mine
    assert int(length) == len(compile_isolated(EMIT, GOOD, *NVPTX))
    assert isolate._shared.worker_id == mine


def test_interrupt_leaves_no_stale_answer(compiler: IsolatedCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.request("isolate_functions:double", [b"a"])
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_receive", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compiler.request("isolate_functions:double", [b"old"])
    assert compiler.request("isolate_functions:double", [b"new"]) == b"newnew"


def test_without_processes_it_compiles_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    client = IsolatedCompiler()
    assert b".entry k" in client.request(EMIT, [GOOD, *NVPTX])
    assert b".entry k" in client.request(EMIT, [GOOD, *NVPTX])
    assert client.worker_id is None
    assert len([r for r in caplog.records if "inside this process" in r.message]) == 1


def test_close_ends_the_worker(compiler: IsolatedCompiler) -> None:
    compiler.request("isolate_functions:double", [b"a"])
    worker = compiler.worker_id
    assert worker is not None
    compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert compiler.request("isolate_functions:double", [b"a"]) == b"aa"
