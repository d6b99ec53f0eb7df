"""The pages of docs/api: where every public name of Tilewright stands, for mkdocstrings to fill from docstrings.

    python tools/api_reference.py             says which pages are not as they should be
    python tools/api_reference.py --write     writes them

`::: module.name` is what mkdocstrings replaces by signature and docstring. Words of kernels have theirs in a stub of overloads, which
mkdocstrings does not read: they are written out. Element types have no docstrings: they are tables.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import tilewright as tw
from tilewright.base.dtypes import DType
from tilewright.base.simd import SimdType

FOLDER = Path(__file__).parents[1] / "docs/api"

GROUPS = (
    ("kernels", "Kernels and tools", "Decorators, what they make, and what looks at it.", (
        "base.dtypes",
        "execute.kernel", "execute.simt.kernels", "api.simd", "execute.critical", "frontend.critical", "compile.critical_proof", "zyn.load", "api.marks", "api.regions", "tree.metadata",
        "execute.tune", "compile.tiers", "api.export", "api.profile", "api.occupancy", "api.debugging",
        "api", "compile", "execute", "frontend", "tree", "zyn",
    )),
    ("runtime", "Arrays, devices and streams", "Memory, devices, streams, graphs of launches, several devices.", (
        "execute.arrays", "execute.array_files", "execute.transfers", "execute.devices", "execute.memory", "execute.simt.memory", "execute.streams", "execute.graphs", "runtime", "distributed",
    )),
    ("primitives", "Functions over whole arrays", "Map, reduce, scan, sort, random numbers, packed arrays.", ("execute.primitives", "execute.random_arrays", "execute.packed")),
    ("graphs", "Graphs, models, other libraries", "Tensor graphs, model files, megakernels, PyTorch and JAX.", ("graphs", "interop", "models", "mega")),
    ("errors", "Errors and warnings", "Every error has a code, a place, the values and one thing to do: [errors.md](../errors.md).", ("base.errors",)),
    ("words", "Words of kernels", "What kernels are written with. They have a meaning only inside a kernel.", ("frontend.words",)),
)  # fmt: skip
"""Page, title, first sentence, and the modules whose names it has: a module stands for those below it that no longer entry names."""

TYPES = "types"
PACKAGES = ("models", "mega")
OBJECTS = {"graph": "GraphEntry", "random": "RandomFunctions"}
"""Objects that are shown by their class as well, which has what they can do."""


def home(name: str) -> str:
    """The module in which a public name is defined, without `tilewright.`."""
    if name in tw._HOMES:
        return tw._HOMES[name]
    value = getattr(tw, name)
    if isinstance(value, type) and issubclass(value, (Exception, Warning)):
        return "base.errors"
    objects = import_module("tilewright.frontend.words.objects")
    return "frontend.words.objects" if name in vars(objects) else "frontend.words"


def entries(name: str) -> list[tuple[str, str]]:
    """What stands for a public name: its heading and the path mkdocstrings looks up."""
    if name in PACKAGES:
        package = import_module(f"tilewright.{name}")
        return [(f"{name}.{item}", f"{getattr(package, item).__module__}.{item}") for item in package.__all__]
    module = f"tilewright.{home(name)}"
    found = [(name, f"{module}.{name}")]
    return [*found, (f"{name} (its functions)", f"{module}.{OBJECTS[name]}")] if name in OBJECTS else found


def group_of(name: str) -> str:
    value = getattr(tw, name)
    if isinstance(value, (DType, SimdType)) or value is DType:
        return TYPES
    pages = [(len(module), page) for page, _, _, modules in GROUPS for module in modules if is_below(place_of(name), module)]
    if not pages:
        raise ValueError(f"no page of docs/api is for {name} of {place_of(name)}: name the module in GROUPS")
    return max(pages)[1]


def place_of(name: str) -> str:
    return name if name in PACKAGES else home(name)


def is_below(place: str, module: str) -> bool:
    return place == module or place.startswith(f"{module}.")


@lru_cache
def stub() -> dict[str, list[ast.FunctionDef]]:
    """The overloads of every word."""
    tree = ast.parse((Path(tw.__file__).parent / "frontend/words/__init__.pyi").read_text(encoding="utf-8"))
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def written_out(name: str) -> list[str]:
    """Signatures and docstring of a word."""
    overloads = stub()[name]
    signatures = [f"{name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "") for node in overloads]
    return ["```python", *signatures, "```", "", ast.get_docstring(overloads[0]) or ""]


def type_page(names: list[str]) -> str:
    kinds = {"b": "true or false", "i": "signed integer", "u": "unsigned integer", "f": "float", "c": "complex", "q": "packed quantised block"}
    lines = ["# Element types", "", "| name | what it is | bits |", "|---|---|---|"]
    for name in names:
        value = getattr(tw, name)
        if isinstance(value, DType):
            bits = f"{8 * value.block_bytes / value.block:g} for each of {value.block} elements" if value.block > 1 else str(value.bits)
            lines.append(f"| `tw.{name}` | {kinds[value.kind]} | {bits} |")
    lines += ["", "Values of several lanes, for `@tw.cpu` functions ([simd.md](../simd.md)):", "", "| name | lanes | of |", "|---|---|---|"]
    for name in names:
        value = getattr(tw, name)
        if isinstance(value, SimdType):
            lines.append(f"| `tw.{name}` | {value.width} | `{value.dtype}` |")
    return "\n".join([*lines, "", "::: tilewright.base.dtypes.DType", "    options:", "      heading: tw.DType", "      toc_label: tw.DType", ""])


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    grouped: dict[str, list[str]] = {}
    for name in tw.__all__:
        grouped.setdefault(group_of(name), []).append(name)
    made: dict[str, str] = {f"{TYPES}.md": type_page([n for n in grouped[TYPES] if n != "DType"])}
    for page, title, said, modules in GROUPS:
        order = {module: number for number, module in enumerate(modules)}

        def place(name: str, order: dict[str, int] = order) -> tuple[int, str]:
            return min(number for module, number in order.items() if is_below(place_of(name), module)), name.lower()

        lines = [f"# {title}", "", said, ""]
        for name in sorted(grouped[page], key=place):
            for heading, path in entries(name):
                if path == f"tilewright.frontend.words.{name}":
                    lines += [f"## tw.{heading}", "", *written_out(name), ""]
                else:
                    lines += [f"::: {path}", "    options:", f"      heading: tw.{heading}", f"      toc_label: tw.{heading}", ""]
        made[f"{page}.md"] = "\n".join(lines)
    return made


def main() -> int:
    made = pages()
    wrong = [name for name, text in made.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != text]
    wrong += [path.name for path in FOLDER.glob("*.md") if path.name not in made]
    if "--write" in sys.argv[1:]:
        FOLDER.mkdir(exist_ok=True)
        for name, text in made.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        for name in wrong:
            if name not in made:
                (FOLDER / name).unlink()
        return 0
    for name in wrong:
        print(f"docs/api/{name} is not as it should be: python tools/api_reference.py --write")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
