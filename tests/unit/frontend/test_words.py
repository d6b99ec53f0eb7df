"""Words are declared once: what Python, the explicit front end, the checker, the stubs and the documents have comes from their rows."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
from pathlib import Path

import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.frontend.simt import expressions as simt_expressions  # noqa: F401 - it fills the table of words
from tilewright.frontend.simt.words import CALLS
from tilewright.frontend.words.python_words import NAMES
from tilewright.frontend.words.rows import EXPLICIT, KERNEL, SECTIONS, WORDS, explicit_parameters, parameters
from tilewright.ir.ops import OPS
from tilewright.tree.check.expressions import FUNCTIONS, STATISTICS
from tilewright.tree.metadata import REDUCTION_NAMES

TOOL = Path(__file__).parents[3] / "tools" / "words.py"
OFFERED = [name for name, row in WORDS.items() if row.offered]


def test_what_is_generated_is_current() -> None:
    spec = importlib.util.spec_from_file_location("words_tool", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert not tool.outdated(), "run tools/words.py --write"


@pytest.mark.parametrize("name", OFFERED)
def test_a_word_is_a_python_function(name: str) -> None:
    """It has the row's signature and documentation, pickles as a name of `tilewright`, and cannot be called."""
    row, function = WORDS[name], getattr(tw, name)
    assert name in tw.__all__ and name in dir(tw)
    assert function.__doc__ == row.doc
    signature = inspect.signature(function)
    assert list(signature.parameters) == [parameter for parameter, _ in parameters(row.signature)]
    assert pickle.loads(pickle.dumps(function)) is function
    required = [0 for p in signature.parameters.values() if p.default is inspect.Parameter.empty]
    where = "a kernel" if row.kinds & KERNEL else "a GPU kernel"
    with pytest.raises(UserError, match=rf"tilewright.{name} has a meaning only inside {where}"):
        function(*required)


def test_explicit_kernels_know_every_word_that_says_so() -> None:
    for name, row in WORDS.items():
        if row.kinds & EXPLICIT and name != "unrolled":  # a mark on a loop, not a call
            assert name in CALLS, name
        else:
            assert name not in CALLS, name


def test_kernels_know_every_word_that_says_so() -> None:
    known = {*FUNCTIONS, *REDUCTION_NAMES, *STATISTICS, "median", "sum", "prod", "all", "any", "argmin", "argmax"}
    assert {name for name, row in WORDS.items() if row.kinds & KERNEL} <= known


def test_ops_are_ops() -> None:
    for row in WORDS.values():
        assert set(row.ops.split()) <= OPS.keys(), row.name


def test_overloads_are_within_the_signature() -> None:
    for row in WORDS.values():
        names = [name for name, _ in parameters(row.signature)]
        for overload in row.overloads:
            assert [name for name, _ in parameters(overload)] == names[: len(parameters(overload))], row.name


def test_words_are_unique() -> None:
    assert len(WORDS) == sum(len(section.rows) for section in SECTIONS)
    assert set(tw.__all__) >= NAMES


def test_parameters_of_explicit_kernels() -> None:
    assert explicit_parameters("shared") == (("shape", "dtype", "align"), 2)
    assert explicit_parameters("elect") == ((), 0)
    assert parameters('(a: int, *rest: int, b: str = "x") -> int') == (("a", ""), ("*rest", ""), ("b", "'x'"))


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'tilewright' has no attribute 'shufle'"):
        tw.shufle  # type: ignore[attr-defined]  # noqa: B018


def test_arguments_by_name_in_any_order() -> None:
    import numpy as np

    @tw.gpu
    def limited(x: tw.GpuBuffer[tw.f32]) -> None:
        i = tw.gpu_thread_id()
        x[i] = tw.clamp(high=3.0, x=x[i], low=1.0)

    values = np.arange(6, dtype=np.float32)
    limited[1, 6](values, device="emulator")
    assert values.tolist() == [1, 1, 2, 3, 3, 3]
