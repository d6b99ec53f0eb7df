"""The gallery's Python kernels as test cases: typical inputs, references, the PTX they become."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import tilewright as tw
from support import as_wide, assert_close
from tilewright.base.dtypes import from_numpy


@dataclass(frozen=True)
class GalleryCase:
    name: str
    kernel: tw.Kernel
    make: Callable[[np.random.Generator, int], dict[str, object]]
    reference: Callable[..., object]

    def arguments(self, elements: int = 1 << 16) -> tuple[object, ...]:
        return tuple(self.make(np.random.default_rng(0), elements).values())

    def ptx(self, target: str = "sm_90a", elements: int = 1 << 16) -> str:
        return self.kernel.compile(*self.arguments(elements), target=target).code.decode()

    def check(self, device: str, arguments: tuple[object, ...]) -> None:
        got = self.kernel(*arguments, device=device)
        want = self.reference(*(as_wide(a) if isinstance(a, np.ndarray) else a for a in arguments))
        found, wanted = (v if isinstance(v, tuple) else (v,) for v in (got, want))
        # Sums of normal numbers cancel: their error is relative to the root of the count.
        scale = max(1.0, max(float(np.size(a)) for a in arguments) ** 0.5)
        for a, b in zip(found, wanted, strict=True):
            dtype = from_numpy(np.asarray(a).dtype)
            assert dtype is not None
            assert_close(a, b, dtype, 32, scale * np.ones_like(as_wide(b)), self.name)


@dataclass(frozen=True)
class ZynCase:
    name: str
    path: Path
    make: Callable[[np.random.Generator, int], dict[str, object]]
    reference: Callable[..., object]
    result: str


def _load() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "gallery.py"
    specification = importlib.util.spec_from_file_location("gallery", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["gallery"] = module
    specification.loader.exec_module(module)
    return module


def _python_cases(examples: Iterable[Any]) -> list[GalleryCase]:
    return [GalleryCase(e.name, e.program, e.make, e.reference) for e in examples if isinstance(e.program, tw.Kernel)]


_GALLERY = _load()
GALLERY_CASES = _python_cases(_GALLERY.GALLERY)
CONTRACTION_CASES = _python_cases(_GALLERY.CONTRACTIONS)
ZYN_CASES: list[ZynCase] = [
    ZynCase(example.name, example.program, example.make, example.reference, example.result)
    for example in (*_GALLERY.GALLERY, *_GALLERY.CONTRACTIONS)
    if isinstance(example.program, Path)
]
GALLERY_BY_NAME = {case.name: case for case in GALLERY_CASES}


def code_hash(ptx: str) -> str:
    """Of the instructions alone: line tables name the file, which lies elsewhere on every machine."""
    lines = [line for line in ptx.splitlines() if not line.lstrip().startswith((".loc", ".file", "//"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def proven_sizes() -> tuple[int, ...]:
    """Sizes whose code is run on hardware: an odd few, one that divides everything, a large one."""
    return (1, 1000, 1 << 16, 1 << 20)
