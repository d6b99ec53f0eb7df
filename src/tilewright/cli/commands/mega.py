"""`tilewright inspect --mega`: a launch of a megakernel, task by task.

In: an ONNX file, a model (GGUF, or a folder of safetensors), or a Python file that builds tapes, and a device. Out: what each kernel of the launch waited for, where and when it ran, the bytes it
moved, the critical path, and a picture. The numbers of weights and inputs that the file does not have are random.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from tilewright import models
from tilewright.base.errors import UserError
from tilewright.cli.guess import GuessedArguments, parse_arguments
from tilewright.execute.devices import default_device, find_device
from tilewright.execute.packed.arrays import quantize
from tilewright.mega.engine import MegaStep
from tilewright.mega.entry import plan
from tilewright.mega.gantt import gantt_svg
from tilewright.mega.report import MegaReport
from tilewright.mega.tape import Tape, TapeSlot
from tilewright.models.generation import SamplingSettings
from tilewright.models.language_model import LanguageModel


def inspect_mega(path: str, name: str | None, arguments: str, device: str, as_json: bool, picture: str | None) -> None:
    """Print what one launch did."""
    place = find_device(default_device() if device == "auto" else device)
    if not Path(path).exists():
        raise UserError.at("TW007", f"{path}: there is no such file")
    if Path(path).is_dir() or path.endswith(".gguf"):
        found = _model(path, place.id)
    else:
        found = _tape(_tape_of(path, name, arguments), place.id)
    click.echo(json.dumps(found.as_data(), indent=2) if as_json else found.text())
    if picture is not None:
        Path(picture).write_text(gantt_svg(found), encoding="utf-8")
        click.echo(f"{picture}: {len(found.times)} tasks", err=as_json)


def _model(path: str, device: str) -> MegaReport:
    """One step of a decoder."""
    model = models.load(path, device, context=64)
    if not isinstance(model, LanguageModel):
        raise UserError.at("TW016", f"{Path(path).name} is an encoder: it has no steps", help="export it to ONNX, or write it as a tape")
    step = model.generator.step(SamplingSettings(), "mega")
    assert isinstance(step, MegaStep)
    for _ in range(3):
        step(1)
    return step.report(f"{model.architecture}, a step")


def _tape_of(path: str, name: str | None, arguments: str) -> Tape:
    if path.endswith(".onnx"):
        given = parse_arguments(arguments)
        return Tape.from_onnx(path, {n: _extents(n, spec) for n, spec in given.items()})
    if not path.endswith(".py"):
        raise UserError.at("TW007", f"{path}: no tape is read from such files", help="give an .onnx or .gguf file, a folder of a model, or a .py file that builds tapes")
    tapes = {n: value for n, value in runpy.run_path(path).items() if isinstance(value, Tape)}
    chosen = {n: tape for n, tape in tapes.items() if name in (None, n, tape.name)}
    if len(chosen) != 1:
        raise UserError.at("TW016", f"{path} builds {len(tapes)} tape(s): {', '.join(tapes) or 'none'}", help="choose one with --kernel NAME" if tapes else "tape = tw.mega.Tape(…)")
    return next(iter(chosen.values()))


def _extents(name: str, given: GuessedArguments) -> tuple[int, ...]:
    if given.extents is None or any(n is None for n in given.extents):
        raise UserError.at("TW016", f"the input '{name}' needs a shape", help=f'--args "{name}=f32[2,4]"')
    return tuple(n for n in given.extents if n is not None)


def _tape(tape: Tape, device: str) -> MegaReport:
    rng = np.random.default_rng(0)
    with plan(tape).compile(device).load() as runner:
        if tape.source is None and tape.weights:
            runner.set_weights({slot.name: _random(slot, rng) for slot in tape.weights})
        inputs: Mapping[str, Any] = {name: _random(tape.slots[slot], rng) for name, slot in tape.inputs.items() if name != "position"}
        for clocks in (False, False, True):
            runner.launch(inputs, clocks=clocks)
        return runner.report()


def _random(slot: TapeSlot, rng: np.random.Generator) -> Any:
    assert slot.shape is not None and slot.dtype is not None
    if slot.dtype.is_packed:
        return quantize(rng.standard_normal(slot.shape).astype(np.float32), slot.dtype)
    if slot.dtype.is_float:
        return (rng.standard_normal(slot.shape) / max(1, slot.shape[-1] if slot.shape else 1) ** 0.5).astype(slot.dtype.numpy)
    return np.zeros(slot.shape, slot.dtype.numpy)
