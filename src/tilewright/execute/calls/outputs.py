"""What goes with the results of a call on any device: `out=`, numbers as parameters want them, the value a call returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from tilewright.base.artifact import Artifact, ScalarParam
from tilewright.base.errors import UserError
from tilewright.base.source import NOWHERE, Span
from tilewright.execute.calls.arguments import Number

K = TypeVar("K")
V = TypeVar("V")
MOST_SPECIALISATIONS = 128
"""Loaded programs one kernel keeps per kind of device."""


def keep(programs: dict[K, V], key: K, program: V) -> None:
    """Remember a loaded program; the oldest goes when a kernel has been asked for too many kinds of arguments."""
    while len(programs) >= MOST_SPECIALISATIONS:
        programs.pop(next(iter(programs)))
    programs[key] = program


def converted(artifact: Artifact, given: Mapping[str, Number]) -> dict[str, Number]:
    """Numbers as their parameters want them; a float never silently becomes an integer."""
    values: dict[str, Number] = {}
    for param in artifact.inputs:
        if isinstance(param, ScalarParam):
            value = given[param.name]
            values[param.name] = float(value) if param.dtype.is_float else value
    return values


def given_outputs(artifact: Artifact, out: object, span: Span = NOWHERE) -> dict[str, object]:
    if out is None:
        return {}
    if not artifact.outputs:
        raise UserError.at("TW018", f"out= is given, but {artifact.name} returns nothing", span, "leave it out")
    several = list(out) if isinstance(out, tuple | list) else [out]
    if len(several) != len(artifact.outputs):
        raise UserError.at(
            "TW018", f"out= has {len(several)} array(s), but the kernel returns {len(artifact.outputs)}", span
        )
    return {p.name: o for p, o in zip(artifact.outputs, several, strict=True) if o is not None}


def result_of(artifact: Artifact, outputs: Mapping[str, object], out: object) -> object:
    if out is not None or not artifact.outputs:
        return out
    values = [outputs[p.name] for p in artifact.outputs]
    plain = [v[()] if isinstance(v, np.ndarray) and v.ndim == 0 else v for v in values]
    return plain[0] if len(plain) == 1 else tuple(plain)
