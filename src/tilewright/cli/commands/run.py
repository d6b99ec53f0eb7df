"""`tilewright run` and `tilewright emulate`: execute a file with inputs from `.npy` files, literals or, to emulate, at random.

In: a ZynML program, an ONNX model (run only), or a Python file whose kernels are read and never executed as Python. Out: results on the terminal or in `.npy`
files, and the device that ran.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click
import numpy as np

from tilewright.base.errors import UserError
from tilewright.cli.guess import GuessedArguments, parse_arguments
from tilewright.cli.results import describe, on_host, save, text
from tilewright.cli.sources import File, Walk, choose, inputs_of, read_source, walk
from tilewright.execute.array_files import read_values
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import find_device
from tilewright.execute.numpy_files import read_npy
from tilewright.graphs.onnx.imported import OnnxGraph
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArrayInfo
from tilewright.zyn.module import ZynModule
from tilewright.zyn.parallel import run_spread, spread_over

T = TypeVar("T")
_DISTINCT = (37, 11, 5, 3)
"""Extents of random inputs, in turn: no two axes alike, none a round number."""
_UNIFORM = 8


def run(
    path: str, kernel: str | None, given: Sequence[str], wanted: Sequence[str], device: str | None, launch: tuple[str | None, str] | None = None
) -> None:  # fmt: skip
    """Run with the inputs given; print or save the results. `launch` is the grid and the block of an explicit kernel."""
    if Path(path).suffix.lower() == ".onnx":
        _run_onnx(path, kernel, given, wanted, device)
        return
    inputs = _once("--in", [_read_input(item) for item in given])
    outputs = _once("--out", [_pair(item, "--out", "y=y.npy") for item in wanted])
    used: list[str] = []
    if launch is not None:
        from tilewright.cli.commands.simt import run_explicit

        results, place = run_explicit(path, kernel, inputs, device, *launch)
        used.append(place)
    else:
        results = execute(read_source(path), kernel, inputs, device, used)
    for name in outputs:
        if name not in results:
            raise UserError.at("TW008", f"there is no result '{name}' to save", help=f"the results are {', '.join(results)}")
    for name, value in results.items():
        if name in outputs:
            save(name, value, outputs[name])
            click.echo(f"{name}: {describe(value)} -> {outputs[name]}")
        elif not outputs:
            click.echo(f"{name}: {describe(value)}\n{text(value)}")
    click.echo(f"ran on {', '.join(dict.fromkeys(used)) or 'the host alone'}", err=True)


def _run_onnx(path: str, kernel: str | None, given: Sequence[str], wanted: Sequence[str], device: str | None) -> None:
    """Run a model. `--out y.npy` without a name saves its only output."""
    if kernel is not None:
        raise UserError.at("TW016", f"{path} is a model, which has no kernels to choose from", help="leave --kernel out")
    model = OnnxGraph(path)
    inputs = _once("--in", [_read_input(item, any_name=True) for item in given])
    only = len(model.outputs) == 1
    outputs = _once("--out", [(model.outputs[0], item) if only and "=" not in item else _pair(item, "--out", "y=y.npy", True) for item in wanted])
    for name in outputs:
        if name not in model.outputs:
            raise UserError.at("TW008", f"there is no result '{name}' to save", help=f"the results are {', '.join(model.outputs)}")
    place = find_device(device or "auto")
    made = model.run(inputs, device=place.id)
    results = {model.outputs[0]: made} if only else made
    for name, value in results.items():
        value = on_host(value)
        if name in outputs:
            save(name, value, outputs[name])
            click.echo(f"{name}: {describe(value)} -> {outputs[name]}")
        elif not outputs:
            click.echo(f"{name}: {describe(value)}\n{text(value)}")
    click.echo(f"ran on {place.id} ({place.name})", err=True)


def emulate(path: str, kernel: str | None, given: Sequence[str], wanted: Sequence[str], stage: str, arguments: str) -> None:
    """Run in the emulator. Without inputs, every kernel runs once on small random ones."""
    device = f"emulator:{stage}"
    if given:
        run(path, kernel, given, wanted, device)
        click.echo(f"OK: no fault at the {stage} stage")
        return
    file = read_source(path)
    known = parse_arguments(arguments)
    found = walk(file, known, kernel).raise_if_errors()
    if file.program is not None and found.records:
        raise UserError.at("TW008", f"'{found.records[0]}' is a record, which is not made at random", help=f"add --in {found.records[0]}=FILE.safetensors")
    names = [e.name for e in choose(found.entries, kernel, path)] if file.program is None else [""]
    targets = _once("--out", [_pair(item, "--out", "y=y.npy") for item in wanted])
    known_results: set[str] = set()
    for name in names:
        results, inputs = _execute_random(file, name or None, found, known, device)
        taken = ", ".join(f"{n}: {describe(v)}" for n, v in inputs.items())
        made = ", ".join(f"{n}: {describe(v)}" for n, v in results.items())
        click.echo(f"{name or path}({taken}) -> {made}")
        known_results |= results.keys()
        for result, target in targets.items():
            if result in results:
                save(result, results[result], target)
    missing = [name for name in targets if name not in known_results]
    if missing:
        raise UserError.at("TW008", f"there is no result '{missing[0]}' to save", help=f"the results are {', '.join(sorted(known_results))}")
    click.echo(f"OK: no fault at the {stage} stage on random inputs")


def execute(file: File, kernel: str | None, inputs: Mapping[str, object], device: str | None, used: list[str]) -> dict[str, object]:
    """Run a program, or one kernel of a Python file; the results by name. Devices that ran are added to `used`."""
    if file.program is not None:

        def compute(function: Function, arguments: dict[str, object], chosen: str) -> object:
            several = spread_over(function.attributes)
            places = [find_device(name) for name in several or (chosen,)]
            used.extend(f"{place.id} ({place.name})" for place in places)
            runner = Runner(function)
            return run_spread(runner, function, arguments) if several else runner.run(arguments, places[0])

        module = ZynModule(file.program, compute)
        if kernel is None:
            try:
                results = module.run(device=device, **inputs)
            except UserError as error:
                raise UserError(*(replace(d, help=_as_options(d.help)) for d in error.diagnostics)) from None
            return {name: on_host(value) for name, value in results.items()}
        if kernel not in module.functions():
            known = ", ".join(module.functions()) or "none"
            raise UserError.at("TW016", f"{file.path} has no function '{kernel}'", help=f"its functions are {known}")
        found = module.call(kernel, (), dict(inputs), device)
        several = found if isinstance(found, tuple) else (found,)
        names = [kernel] if len(several) == 1 else [f"{kernel}_{n}" for n in range(len(several))]
        return {name: on_host(value) for name, value in zip(names, several, strict=True)}
    names = [f.name for f in file.kernels]
    if kernel is None and len(names) != 1:
        raise UserError.at("TW016", f"{file.path} has {len(names)} kernels: {', '.join(names)}", help="choose one with --kernel NAME")
    function = next((f for f in file.kernels if f.name == (kernel or names[0])), None)
    if function is None:
        raise UserError.at("TW016", f"{file.path} has no kernel '{kernel}'", help=f"it has {', '.join(names)}")
    params = [p.name for p in function.params]
    for name in inputs:
        if name not in params:
            raise UserError.at("TW008", f"unexpected input '{name}'", function.span, f"{function.name} takes {', '.join(params)}")
    missing = [name for name in params if name not in inputs]
    if missing:
        raise UserError.at("TW008", f"missing input {', '.join(map(repr, missing))}", function.span, f"add --in {missing[0]}=FILE.npy")
    if device is None and function.option("devices"):
        raise UserError.at("TW016", f"{function.name} is split over devices={list(function.option('devices'))}", function.span, "say where it runs: --device NAME")  # type: ignore[call-overload]
    place = find_device(device or str(function.option("device") or "auto"))
    used.append(f"{place.id} ({place.name})")
    watchdog, launches = function.option("watchdog"), function.option("launches")
    runner = Runner(function, "auto", str(function.option("schedule") or ""), watchdog, 1 if launches == 1 else 0)  # type: ignore[arg-type]  # checked there
    result = runner.run({name: inputs[name] for name in params}, place)
    assert runner.last is not None
    several = result if isinstance(result, tuple) else (result,)
    return {param.name: value for param, value in zip(runner.last.outputs, several, strict=True)}


# -- random inputs --------------------------------------------------------------------------------------------------


def _execute_random(
    file: File, kernel: str | None, found: Walk, known: Mapping[str, GuessedArguments], device: str
) -> tuple[dict[str, object], dict[str, object]]:
    """Results and inputs. Sizes all different are tried first; some kernels want sizes that fit together in ways of their own."""
    inputs = _random_inputs(file, kernel, found, known, _DISTINCT)
    try:
        return execute(file, kernel, inputs, device, []), inputs
    except UserError as error:
        if error.code not in ("TW004", "TW013"):
            raise
    inputs = _random_inputs(file, kernel, found, known, (_UNIFORM,))
    return execute(file, kernel, inputs, device, []), inputs


def _random_inputs(
    file: File, kernel: str | None, found: Walk, known: Mapping[str, GuessedArguments], extents: Sequence[int]
) -> dict[str, object]:
    generator = np.random.default_rng(0)
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    wanted = {} if file.program is None else inputs_of(file, known)
    for entry, typed in zip(found.entries, found.typed, strict=True):
        if file.program is None and entry.name != kernel:
            continue
        if file.program is None:
            wanted = dict(entry.args)
        for item in typed.inputs:
            if isinstance(item, ArrayInfo) and item.name in wanted and item.name not in shapes:
                for name in sorted({n for extent in item.shape for n in extent.names}):
                    sizes.setdefault(name, extents[len(sizes) % len(extents)])
                shapes[item.name] = tuple(extent.evaluate(sizes) for extent in item.shape)
    return {name: _random(given, shapes.get(name), generator) for name, given in wanted.items()}


def _random(given: GuessedArguments, shape: tuple[int, ...] | None, generator: np.random.Generator) -> object:
    if given.extents is None:
        if given.plain:
            return 0.75 if given.plain == "float" else 1
        return given.dtype.numpy.type(1)
    shape = shape if shape is not None else (_UNIFORM,) * len(given.extents)
    shape = tuple(s if e is None else e for s, e in zip(shape, given.extents))
    if given.dtype.is_float:
        return generator.standard_normal(shape).astype(given.dtype.numpy)
    return generator.integers(0, 2 if given.dtype.is_bool else 100, shape).astype(given.dtype.numpy)


# -- files and values -----------------------------------------------------------------------------------------------


def _once(option: str, pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise UserError.at("TW016", f"{option} {name} is given twice", help="keep one of them")
        found[name] = value
    return found


def _pair(item: str, option: str, example: str, any_name: bool = False) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not (name.isidentifier() or (any_name and name)) or not value:
        raise UserError.at("TW016", f"{option} {item}: this is not name=value", help=f"write for example {option} {example}")
    return name, value


def _read_input(item: str, any_name: bool = False) -> tuple[str, object]:
    """`x=x.npy` is an array, `w=w.safetensors` a record of arrays, `eps=1e-5` and `flag=true` are numbers."""
    name, text = _pair(item, "--in", "x=x.npy", any_name)
    if text.lower() in ("true", "false"):
        return name, text.lower() == "true"
    try:
        literal = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        literal = float(text) if text.lower().lstrip("+-") in ("inf", "nan") else None
    if isinstance(literal, int | float):
        return name, literal
    records = Path(text).suffix.lower() in (".npz", ".safetensors")
    try:
        return name, read_values(text) if records else read_npy(text)
    except UserError as error:
        found = error.diagnostics[0]
        help_ = found.help if records else "give a .npy, .npz or .safetensors file, or a number"
        raise UserError.at(found.code, f"--in {name}: {found.message}", help=help_) from None


def _as_options(help: str) -> str:
    """`call run(x=…, w=…)` as the command line writes it."""
    return re.sub(r"call run\(([^)]*)\)", lambda found: "give " + " ".join(f"--in {part}" for part in found[1].split(", ")), help)
