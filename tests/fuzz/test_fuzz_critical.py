"""Random critical functions give what Python's ints and floats give, or the same exception.

`TILEWRIGHT_CRITICAL_FUNCTIONS=1000` is how many are drawn; a thousand take two minutes of processor time.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
from pathlib import Path
from types import ModuleType

import pytest
from critical_programs import Int, outcome, sources
from hypothesis import given, settings
from hypothesis import strategies as st

INTS = (0, 1, -1, 2, 7, -13, 1000, -(1 << 20), 1 << 33, (1 << 62) + 5, -(1 << 63), (1 << 63) - 1)
FLOATS = (0.0, 1.0, -1.5, 0.1, 1e10, -3e-4)


def _loaded(path: Path, text: str, name: str) -> ModuleType:
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(seed: int, folder: Path) -> None:
    ours, python = sources(seed)
    compiled = _loaded(folder / f"critical_{seed}.py", ours, f"critical_{seed}").function
    module = _loaded(folder / f"python_{seed}.py", python, f"python_{seed}")
    module.K = Int
    module.TABLE = tuple(Int(int(v)) for v in module.TABLE)
    chosen = random.Random(seed)
    for _ in range(12):
        a, b, x, y = chosen.choice(INTS), chosen.choice(INTS), chosen.choice(FLOATS), chosen.choice(FLOATS)
        wanted = outcome(module.function, (Int(a), Int(b), x, y))
        found = outcome(compiled, (a, b, x, y))
        same = found == wanted or (isinstance(wanted, float) and isinstance(found, float) and math.isnan(wanted) and math.isnan(found))
        assert same, f"seed {seed}, {(a, b, x, y)}: {found!r}, but Python gives {wanted!r}\n{ours}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critical")


@settings(max_examples=int(os.environ.get("TILEWRIGHT_CRITICAL_FUNCTIONS", "60")), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_random_functions(seed: int, folder: Path) -> None:
    compare(seed, folder)
