"""Primitives on the CPU. In: a primitive's program and NumPy arrays; out: the arrays written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.compile.primitives import compile_program
from tilewright.execute.calls.outputs import keep
from tilewright.execute.places import Array, Build, HostPlace, Number
from tilewright.runtime.cpu import program as cpu

_primitives: dict[str, cpu.CpuProgram] = {}


class CpuPlace(HostPlace):
    """The CPU, for one primitive."""

    def run(self, what: str, build: Build, arrays: Mapping[str, Array], scalars: Mapping[str, Number] | None = None) -> None:
        artifact = compile_program(what, self.target, build)
        program = _primitives.get(artifact.key)
        if program is None:
            program = cpu.load(artifact)
            keep(_primitives, artifact.key, program)
        program.run({name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}, scalars or {})
