"""Settings all tests share: what a test needs of the machine.

`@pytest.mark.requires("ptxas")`, or `requires("ptxas")` inside a test through the fixture, skips with the reason where the machine
lacks it. A name listed in `TILEWRIGHT_REQUIRE=cpu,emulator,ptxas` must be there: then what would be a skip is a failure.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# `support` is beside this file, `bench` beside `tests`.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


# Tests run many slow kernels on purpose; those of the warnings themselves turn them on.
os.environ.setdefault("TILEWRIGHT_WARN", "off")
os.environ.setdefault("TILEWRIGHT_VERIFY", "passes")

# Compilers make many objects that live: looking for cycles among them so often would be a seventh of the time of all tests.
gc.set_threshold(50_000, 10, 10)


# A busy machine makes an example slow, not wrong. In CI Hypothesis draws the same examples each time.
settings.register_profile("tilewright", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tilewright")


def _cpu() -> str:
    from tilewright.codegen.host import interpreter

    return "" if interpreter.stubs_work() else "this interpreter takes no entry stubs"


def _ptxas() -> str:
    from tilewright.codegen.nvptx.ptxas import ptxas_path

    return "" if ptxas_path() else "ptxas is not installed (pip install nvidia-cuda-nvcc)"


def _cuda() -> str:
    from tilewright.runtime.cuda import device as cuda

    return "" if cuda.devices() else f"no CUDA device: {cuda.unavailable_reason()}"


def _webgpu() -> str:
    from tilewright.runtime.webgpu.adapters import adapters

    return adapters(os.getpid())[1]


def _tint() -> str:
    from tint import absence

    return absence()


def _browser() -> str:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if Path("/usr/bin/chromium").exists() else "/usr/bin/chromium is not installed"


def _opencl() -> str:
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
    from tilewright.runtime.opencl import device as opencl

    return "" if opencl.FOUND.devices() else f"no OpenCL device: {opencl.FOUND.unavailable_reason()}"


def _qemu() -> str:
    from other_machines import emulator_lacks

    return emulator_lacks()


def _vulkan() -> str:
    from tilewright.runtime.vulkan import device as vulkan

    return "" if vulkan.FOUND.devices() else f"no Vulkan device: {vulkan.FOUND.unavailable_reason()}"


_LACKING: dict[str, Callable[[], str]] = {
    "cpu": _cpu, "emulator": lambda: "", "ptxas": _ptxas, "cuda": _cuda, "webgpu": _webgpu, "tint": _tint, "browser": _browser, "opencl": _opencl,
    "vulkan": _vulkan, "qemu": _qemu,
}  # fmt: skip


@functools.cache
def lacking(name: str) -> str:
    """Why this machine cannot run tests that need `name`; empty when it can."""
    return _LACKING[name]()


def require(*names: str) -> None:
    """Skip the running test where something is missing, or fail it where that was promised."""
    promised = {n.strip() for n in os.environ.get("TILEWRIGHT_REQUIRE", "").split(",") if n.strip()}
    unknown = promised - _LACKING.keys()
    if unknown:
        pytest.fail(f"TILEWRIGHT_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(_LACKING)}")
    for name in names:
        reason = lacking(name)
        if reason and name in promised:
            pytest.fail(f"TILEWRIGHT_REQUIRE promises {name}, but {reason}")
        if reason:
            pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def settled_heap() -> None:
    """What is alive when a module's tests begin is not looked at again: tests of leaks collect often, and modules and caches stay anyway."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def stages_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of one file in `tests/run` share what they lower."""
    if request.path.parent != Path(__file__).parent / "run":
        yield
        return
    from shared_stages import shared_stages

    with shared_stages():
        yield


@pytest.fixture
def requires() -> Callable[..., None]:
    return require


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what tests/slow.py lists")
    parser.addoption("--soak", action="store_true", help="let tests of long runs take their minute")
    parser.addoption("--update-golden", action="store_true", help="write what passes print now into tests/filetests")
    parser.addoption("--record-assembled", action="store_true", help="write what ptxas said of new PTX to tests/data/assembled.json")
    parser.addoption("--record", action="store_true", help="write the hashes of PTX that ran right to tests/gpu/proven.json")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast`, files that are listed as slow are not even read."""
    if not config.getoption("--fast"):
        return None
    from slow import is_slow

    path = collection_path.resolve()
    here = Path(__file__).parent
    return True if path.is_relative_to(here) and is_slow(path.relative_to(here).as_posix()) else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(*names): needs cpu, emulator, ptxas or cuda on this machine")


# -- PTX that was assembled before ----------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands what it assembled to the controller; the process that saw all of it writes the table."""
    assembled = sys.modules.get("assembled")
    if assembled is None:
        return
    config, seen = session.config, assembled.SESSION
    if hasattr(config, "workeroutput"):
        config.workeroutput["assembled"] = (sorted(seen.used), seen.new)
    elif config.getoption("--record-assembled"):
        everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (config.option.keyword or config.option.markexpr)
        assembled.write_table(seen, forget_unused=everything and not session.testsfailed)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    used, new = getattr(node, "workeroutput", {}).get("assembled", ((), {}))
    if used or new:
        from assembled import SESSION

        SESSION.add(used, new)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    assembled = sys.modules.get("assembled")
    if assembled is not None and (assembled.SESSION.used or assembled.SESSION.new):
        terminalreporter.write_line(assembled.SESSION.summary())


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("requires"):
        require(*mark.args)
