"""Runs every `*.kir` file here by the directives in the comments at its top; `docs/ir.md` explains them.

A directive is a line `; name` or `; name: argument` in the first block of comments (`;;` starts a remark). Directives run
in order and share a `Case`. To add one, write a function `(case, argument)` that fails by `assert`, and list it in
`DIRECTIVES`.

`; pass: name` runs a pass; what it must print stands in the file after the line `; ---- after`. `pytest tests/filetests --update-golden` writes
that anew.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from support import as_wide, assert_close, data
from tilewright.base.dtypes import from_numpy
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.target import parse_target
from tilewright.compile import driver
from tilewright.ir.emulator import run_kernel, run_program
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.program import Program
from tilewright.ir.text import print_kernel, print_program
from tilewright.ir.text_parse import parse_kernel, parse_program
from tilewright.ir.types import Tensor, Type
from tilewright.ir.verify import verify_kernel, verify_program
from tilewright.passes.choose.plan import plan_contractions
from tilewright.passes.pipeline import all_passes
from tilewright.passes.runner import Pass, PassContext, Trace, run_on_kernel, run_on_program
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.packed_rows import PackedRows
from tilewright.passes.schedules.plans import Plan
from tilewright.passes.schedules.text import parse_schedule
from tilewright.passes.windows.join_phases import Phases

FOLDER = Path(__file__).parent
AFTER = "; ---- after\n"
PASSES = {one.name: one for one in all_passes()}


@dataclass
class Case:
    """One file: its text under the directives, and what the directives have made of it so far."""

    path: Path
    text: str
    directives: list[tuple[str, str]]
    changed: Kernel | Program | None = field(default=None)
    """Set by directives that transform the IR."""
    golden: str = ""
    """What stands after the marker."""
    result: str = ""
    """What should stand there."""
    settings: dict[str, str] = field(default_factory=dict)
    """What directives for passes say: target, schedule, sizes, run, golden."""
    remarks: list[str] = field(default_factory=list)
    """What a pass said besides."""
    phases: Phases = ()
    """What the pass that joins phases said of them."""
    scratch: Path = Path()
    """A folder for files."""

    @cached_property
    def parsed(self) -> Kernel | Program:
        whole = self.path.read_text().partition(AFTER)[0]
        return parse_program(whole, self.path.name) if self.is_program else parse_kernel(whole, self.path.name)

    @property
    def is_program(self) -> bool:
        return self.text.startswith("program")

    @property
    def current(self) -> Kernel | Program:
        return self.changed or self.parsed

    @property
    def printed(self) -> str:
        locations = " path=" in self.text.splitlines()[0]
        if isinstance(self.current, Program):
            return print_program(self.current, locations)
        return print_kernel(self.current, locations)


def read_case(path: Path) -> Case:
    lines = path.read_text().splitlines(keepends=True)
    count = 0
    directives: list[tuple[str, str]] = []
    while count < len(lines) and (lines[count].startswith(";") or not lines[count].strip()):
        match = re.match(r"; *([a-z-]+)(?:: *(.*?))? *$", lines[count])
        if match:
            directives.append((match.group(1), match.group(2) or ""))
        else:
            assert not lines[count].startswith("; "), f"{path.name}:{count + 1}: not a directive: {lines[count]}"
        count += 1
    text, _, golden = "".join(lines[count:]).partition(AFTER)
    return Case(path, text, directives, golden=golden)


# -- directives -----------------------------------------------------------------------------------------------------


def expectation(argument: str) -> str | None:
    """None for `ok`, the substring for `error "substring"`."""
    if argument == "ok":
        return None
    match = re.fullmatch(r'error (".*")', argument)
    assert match, f'expected `ok` or `error "substring"`, got {argument!r}'
    return str(json.loads(match.group(1)))


def directive_parse(case: Case, argument: str) -> None:
    """`; parse: ok` or `; parse: error "substring"`."""
    expected = expectation(argument)
    if expected is None:
        assert case.parsed
        return
    with pytest.raises(UserError) as caught:
        _ = case.parsed
    assert caught.value.code == "TW041"
    assert expected in str(caught.value)


def directive_verify(case: Case, argument: str) -> None:
    """`; verify: ok` or `; verify: error "substring"`."""
    expected = expectation(argument)
    current = case.current
    if expected is None:
        verify_program(current) if isinstance(current, Program) else verify_kernel(current)
        return
    with pytest.raises(CompilerBug) as caught:
        verify_program(current) if isinstance(current, Program) else verify_kernel(current)
    assert caught.value.code == "TW042"
    assert expected in str(caught.value)


def directive_roundtrip(case: Case, argument: str) -> None:
    """`; roundtrip`: the text is exactly what its IR prints as."""
    assert case.printed == case.text


def directive_check(case: Case, argument: str) -> None:
    """`; check: substring` of the IR as it is now."""
    assert argument in case.printed


def directive_check_not(case: Case, argument: str) -> None:
    """`; check-not: substring`."""
    assert argument not in case.printed


# -- passes ---------------------------------------------------------------------------------------------------------


def setting(name: str) -> Directive:
    def note(case: Case, argument: str) -> None:
        case.settings[name] = argument

    return note


def directive_pass(case: Case, argument: str) -> None:
    """`; pass: name`, after the settings it needs: the pass runs, and the text after the marker is what comes out."""
    one = PASSES[argument]
    if one.source in ("tree", "blocks"):
        case.changed = from_source(case, one)
    else:
        case.changed = transformed(case, one)
    case.result = shortened(case)


def from_source(case: Case, one: Pass) -> Program:
    """What a pass of trees makes of ZynML. `; run: name shape…` runs one of the text's functions, and the pass's dump tells."""
    name, *shapes = case.settings["run"].split()
    arguments = [np.zeros([int(n) for n in shape.split("x")], np.float32) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "compiler_version", lambda: str(case.scratch))
        patch.setenv("TILEWRIGHT_DUMP", str(case.scratch))
        getattr(tw.load(case.text), name)(*arguments, device="cpu")
    (dumped, *_) = sorted(case.scratch.glob(f"*-{one.name}.kir"))
    return parse_program(dumped.read_text())


def transformed(case: Case, one: Pass) -> Kernel | Program:
    current, target = case.current, parse_target(case.settings.get("target", "sm_90a"))
    sizes = {name: int(number) for name, number in (word.split("=") for word in case.settings.get("sizes", "").split())}
    given = case.settings.get("schedule", "")
    context = PassContext(target, hints=sizes, sizes=sizes, phases=case.phases)
    if isinstance(current, Kernel):
        if "schedule" in one.takes:
            context = replace(context, schedule=read_schedule(given))
        return run_on_kernel(one, current, context, Trace())
    if "plans" in one.takes:
        context = replace(context, plans=plan_contractions(current, target, sizes, given))
    result, context = run_on_program(one, current, replace(context, given=given, loop=current), Trace())
    if one.gives == "plans":
        case.remarks += [f"plan of {call.kernel.name}: {plan.describe() if plan else '-'}" for call, plan in zip(result.calls, context.plans, strict=True)]
    elif one.gives == "fusion":
        assert context.fusion is not None
        case.remarks += [f"fused {fused.array}: {fused.how}" for fused in context.fusion.fused]
        case.remarks += [f"not fused {refused.array}: {refused.reason}" for refused in context.fusion.refused]
    elif one.gives == "phases":
        case.phases = context.phases
        for phase in filter(None, context.phases):
            case.remarks.append(f"{phase.name}: {', '.join(f'{name} = {size}' for name, size in phase.numbers.items())}")
    elif one.gives == "sites":
        case.remarks += [f"site: {site.opcode} {site.array}" for site in context.sites]
    return result


def read_schedule(text: str) -> Plan:
    """A schedule as `describe` prints it."""
    if text.startswith("family="):
        return parse_schedule(text)
    words = (word.split("=", 1) for word in re.split(r", (?=[a-z_]+=)", text))
    return (PackedRows if "block_rows=" in text else Schedule)(**{name: ast.literal_eval(value) for name, value in words})


def shortened(case: Case) -> str:
    """The golden text: remarks, and the IR. `; golden: N lines` leaves the first lines of it and how often each op occurs."""
    remarks = "".join(f";; {remark}\n" for remark in case.remarks)
    current = case.current
    text = print_program(current) if isinstance(current, Program) else print_kernel(current)
    if "golden" not in case.settings:
        return remarks + text
    count = int(case.settings["golden"].split()[0])
    kernels = [call.kernel for call in current.calls] if isinstance(current, Program) else [current]
    ops = Counter(op.opcode for kernel in kernels for op in walk(kernel.body))
    lines = text.splitlines(keepends=True)
    assert len(lines) > count, f"{case.path.name}: {len(lines)} lines need no `; golden`"
    return remarks + "".join(lines[:count]) + ";; …\n" + "".join(f";; {number} {name}\n" for name, number in sorted(ops.items()))


def viewed(array: np.ndarray, type_: Type, sizes: Mapping[str, int]) -> np.ndarray:
    return array.reshape(tuple(size.evaluate(sizes) for size in type_.shape)) if isinstance(type_, Tensor) else array


def directive_emulate(case: Case, argument: str) -> None:
    """`; emulate`, after `; pass`: the emulator computes the same before and after, for arrays of the sizes given."""
    sizes = {name: int(number) for name, number in (word.split("=") for word in case.settings.get("sizes", "").split())}
    before, after = case.parsed, case.current
    rng = np.random.default_rng(0)

    def filled(type_: Tensor) -> np.ndarray:
        return np.asarray(data(rng, tuple(size.evaluate(sizes) for size in type_.shape), type_.dtype, 0.5))

    if isinstance(before, Program):
        assert isinstance(after, Program)
        inputs = {a.name: filled(a.type) for a in before.input_arrays}
        wanted, found = run_program(before, inputs), run_program(after, inputs)
    else:
        assert isinstance(after, Kernel)
        arrays = {p.name: filled(p.type) if isinstance(p.type, Tensor) else np.float32(0.5) for p in before.params}
        wanted, found = ({name: array.copy() for name, array in arrays.items()} for _ in range(2))
        run_kernel(before, list(wanted.values()), sizes)
        # A pass may view an array in another shape.
        run_kernel(after, [viewed(found[p.name], p.type, sizes) for p in after.params], sizes)
    for name, array in wanted.items():
        dtype = from_numpy(array.dtype)
        assert dtype is not None
        assert_close(found[name], array, dtype, 16, np.abs(as_wide(array)).max(initial=1.0), name)


Directive = Callable[[Case, str], None]
DIRECTIVES: dict[str, Directive] = {
    "parse": directive_parse,
    "verify": directive_verify,
    "roundtrip": directive_roundtrip,
    "check": directive_check,
    "check-not": directive_check_not,
    "target": setting("target"),
    "schedule": setting("schedule"),
    "sizes": setting("sizes"),
    "run": setting("run"),
    "golden": setting("golden"),
    "pass": directive_pass,
    "emulate": directive_emulate,
}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.kir")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_file(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    case = read_case(path)
    case.scratch = tmp_path
    assert case.directives, f"{path.name} asks for nothing"
    for name, argument in case.directives:
        assert name in DIRECTIVES, f"{path.name}: unknown directive {name!r}"
        DIRECTIVES[name](case, argument)
    if case.result != case.golden and request.config.getoption("--update-golden", default=False):
        path.write_text(path.read_text().partition(AFTER)[0] + AFTER + case.result)
        return
    assert case.result == case.golden, "pytest tests/filetests --update-golden writes what comes out now"


def passes_of(path: Path) -> set[str]:
    return {argument for name, argument in read_case(path).directives if name == "pass"}


def test_every_pass_has_a_file() -> None:
    tested = set().union(*map(passes_of, (FOLDER / "passes").glob("*.kir")))
    assert PASSES.keys() == tested


def test_files_of_passes_show_something() -> None:
    """What comes out differs from what goes in, or the pass says something about it."""
    for path in (FOLDER / "passes").glob("*.kir"):
        case = read_case(path)
        assert case.golden and case.golden != case.text, path.name
