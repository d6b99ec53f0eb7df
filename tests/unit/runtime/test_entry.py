"""Objects that call what they were given last, in both makes."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.runtime.core import entry
from tilewright.runtime.core.entry import PartialEntry, SlotEntry

pytestmark = pytest.mark.requires("cpu")
MAKES = pytest.mark.parametrize("make", [PartialEntry, SlotEntry])


@tw.kernel
def doubled(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        out[i] = 2 * x[i]
    return out


@pytest.fixture(autouse=True)
def _front() -> None:
    doubled(np.ones(2, np.float32))  # brings the machine code
    assert entry._front is not None


@MAKES
def test_calls_go_to_the_latest(make: Any) -> None:
    made = make(lambda *a, **k: ("first", a, k))
    assert made(1, x=2) == ("first", (1,), {"x": 2})
    made.enter(lambda *a, **k: ("second", a, k))
    assert made(1, 2, 3, 4, 5, 6, 7, y=8, z=9) == ("second", (1, 2, 3, 4, 5, 6, 7), {"y": 8, "z": 9})
    assert made() == ("second", (), {})
    made.enter(max)
    assert made([3, 4], key=None) == 4
    assert made.entry is max
    made.label = "attributes stay"
    made.enter(min)
    assert (made.label, made(3, 4)) == ("attributes stay", 3)


@MAKES
def test_errors_come_through(make: Any) -> None:
    def fail() -> None:
        raise ValueError("as it is")

    made = make(len)
    made.enter(fail)
    with pytest.raises(ValueError, match="as it is"):
        made()
    with pytest.raises(TypeError):
        made(1)


@MAKES
def test_a_function_that_replaces_itself_lives_until_it_returns(make: Any) -> None:
    class Function:
        def __call__(self, value: int) -> int:
            made.enter(len)
            gc.collect()
            assert seen() is not None
            return value + self.amount

        amount = 5

    function = Function()
    seen = weakref.ref(function)
    made = make(len)
    made.enter(function)
    del function
    assert made(1) == 6
    gc.collect()
    assert seen() is None
    assert made([1, 2]) == 2


@MAKES
def test_it_goes_with_what_it_calls(make: Any) -> None:
    class Owner(make):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(self.general)
            self.enter(self.general)

        def general(self) -> str:
            return "general"

    owner = Owner()
    assert owner() == "general"
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None


def test_kernels_behave_like_functions() -> None:
    assert list(inspect.signature(doubled).parameters) == ["x"]
    assert copy.copy(doubled) is doubled
    assert copy.deepcopy([doubled])[0] is doubled
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert repr(doubled) == "<kernel doubled(x)>"
