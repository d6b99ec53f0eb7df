"""The gallery's Python kernels with typical inputs, for tests that look at generated code."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

import tilewright as tw


@dataclass(frozen=True)
class GalleryKernel:
    name: str
    kernel: tw.Kernel
    arguments: tuple[object, ...]

    def ptx(self, target: str = "sm_90a") -> str:
        return self.kernel.compile(*self.arguments, target=target).code.decode()


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "gallery.py"
    specification = importlib.util.spec_from_file_location("gallery", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["gallery"] = module
    specification.loader.exec_module(module)
    return module


def kernels(elements: int = 1 << 16) -> list[GalleryKernel]:
    """Every kernel of the gallery that is written in Python."""
    random = np.random.default_rng(0)
    return [
        GalleryKernel(example.name, example.program, tuple(example.make(random, elements).values()))
        for example in _load().GALLERY
        if isinstance(example.program, tw.Kernel)
    ]


KERNELS = kernels()
BY_NAME = {k.name: k for k in KERNELS}
