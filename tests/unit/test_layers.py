"""Who may import whom: each layer only those before it, and no module in a circle."""

from __future__ import annotations

import ast
import importlib.util
import io
import tokenize
from pathlib import Path

import pytest

from tilewright.compile.driver import COMPILER

ROOT = Path(__file__).parents[2] / "src" / "tilewright"
BELOW: dict[str, frozenset[str]] = {
    layer: frozenset(imports.split())
    for layer, imports in {
        "base": "",
        "tree": "base",
        "ir": "base",
        "frontend": "base tree ir",
        "analysis": "base ir",
        "passes": "base tree ir analysis",
        "primitives": "base tree ir passes",
        "codegen": "base ir",
        "runtime": "base",
        "compile": "base tree ir frontend analysis passes primitives codegen runtime",
        "execute": "base tree ir frontend analysis passes primitives codegen runtime compile",
        # Each kind of device that comes along; nobody but the package's `__init__` imports it, which registers it with its loader.
        "device_kinds": "base ir frontend codegen runtime compile execute",
        "distributed": "base tree frontend analysis runtime compile execute",
        "zyn": "base tree frontend runtime compile execute distributed",
        "graphs": "base tree ir frontend runtime compile execute",
        "models": "base frontend runtime compile execute graphs",
        "mega": "base tree ir frontend analysis passes codegen runtime compile execute graphs models",
        "interop": "base tree frontend runtime compile execute zyn",
        "api": "base tree ir frontend analysis passes primitives codegen runtime compile execute distributed zyn graphs models mega interop",
        "cli": "base tree ir frontend analysis passes codegen runtime compile execute distributed zyn graphs models mega interop api",
        "__main__": "cli",
    }.items()
}
"""What each layer may import besides itself: what its code needs, and no more. `mega` is a place for what comes."""


def module_name(path: Path) -> str:
    parts = ("tilewright", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


class _RunTimeOnly(ast.NodeTransformer):
    """Leaves out what only type checkers see."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)


def imports(name: str, text: str, for_types: bool = True) -> set[str]:
    """The modules of the package that a module imports, also inside functions."""
    found: set[str] = set()
    is_package = MODULES.get(name, Path()).name == "__init__.py"
    tree = ast.parse(text)
    for node in ast.walk(tree if for_types else _RunTimeOnly().visit(tree)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name if is_package else name.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            # `from package import module` names a module; `from module import thing` does not.
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return {f for f in found if f.split(".")[0] == "tilewright"}


TEXTS = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}


def violations(name: str, imported: set[str]) -> list[str]:
    layer = name.split(".")[1]
    return sorted(f"{name} imports {other}" for other in imported if other.split(".")[1:2] != [layer] and "".join(other.split(".")[1:2]) not in BELOW[layer])


@pytest.mark.parametrize("name", [name for name in MODULES if "." in name])
def test_imports_go_down(name: str) -> None:
    assert name.split(".")[1] in BELOW, f"{name} is in no known layer"
    assert violations(name, imports(name, TEXTS[name])) == []


def test_the_version_of_the_compiler_covers_all_that_it_imports() -> None:
    assert set(COMPILER) == BELOW["compile"] | {"compile"}


@pytest.mark.parametrize("for_types", [False, True])
def test_no_circles(for_types: bool) -> None:
    """Neither at run time nor through what only type checkers see."""
    graph = {name: imports(name, text, for_types=for_types) for name, text in TEXTS.items()}
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(graph.get(name, set()) - {name}):
                visit(other)
            path.pop()
            done.add(name)

    for name in graph:
        visit(name)


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for name, text in TEXTS.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    shared = {name: modules for name, modules in places.items() if len(modules) > 1}
    # A kernel is what users call (`tw.Kernel`) and what the IR computes: both are the field's word.
    assert shared == {"Kernel": ["tilewright.execute.kernel", "tilewright.ir.nodes"]}


def test_a_folder_has_about_twenty_files_and_says_what_it_holds() -> None:
    for package in {path.parent for path in MODULES.values()}:
        assert len(list(package.glob("*.py"))) <= 23, package
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))), package


# -- private names --------------------------------------------------------------------------------------------------

NOBODYS = tuple(BELOW)
"""All layers: no module uses another module's underscore names."""


def private_names(name: str, text: str) -> list[str]:
    """Underscore names of other modules of the package that a module imports or reads."""
    tree = ast.parse(text)
    modules: set[str] = set()
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "tilewright"):
            base = node.module or ""
            modules |= {a.asname or a.name for a in node.names if f"{base}.{a.name}" in MODULES}
            found += [f"{node.lineno}: {a.name}" for a in node.names if a.name.startswith("_")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found += [f"{node.lineno}: {node.value.id}.{node.attr}"] if node.attr.startswith("_") and node.attr != "__name__" else []
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in NOBODYS])
def test_no_private_names_of_others(name: str) -> None:
    assert private_names(name, TEXTS[name]) == []


def test_the_search_for_private_names_itself() -> None:
    text = "from tilewright.base.sizes import _x\nfrom tilewright.base import sizes\nimport os\nsizes._y\nos._exit(self._z)\n"
    assert private_names("tilewright.api.new", text) == ["1: _x", "4: sizes._y"]


# -- devices --------------------------------------------------------------------------------------------------------

GENERIC = ("compile", "execute", "zyn", "distributed", "api", "cli")
"""Layers that know devices by their protocol (`runtime/core/device.py`, `execute/kinds.py`) and ask none what it is."""
NAMED_ANYWAY = {
    # Names of devices as examples, where users read them: the command line's help.
    "tilewright.cli.main": 2,
}


def cuda_words(text: str) -> list[str]:
    """Tokens of code that name CUDA: identifiers, and string literals other than docstrings (also the text of f-strings)."""
    if "cuda" not in text.lower():
        return []
    tree = ast.parse(text)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    prose = {
        (statement.value.lineno, statement.value.col_offset)
        for body in bodies
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return [f"{t.start[0]}: {t.string}" for t in tokens if t.type in kinds and t.start not in prose and "cuda" in t.string.lower()]


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in GENERIC])
def test_no_device_is_named(name: str) -> None:
    found = cuda_words(TEXTS[name])
    assert len(found) == NAMED_ANYWAY.get(name, 0), found


def test_the_search_for_names_itself() -> None:
    assert cuda_words('"""Says CUDA."""\nx = 1  # cuda\n') == []
    assert cuda_words('def f():\n    """cuda"""\n    return kind == "cuda"\n') == ["3: \"cuda\""]
    assert [found.split(":")[0] for found in cuda_words('from runtime import cuda\nx = f"{y} cuda"\n')] == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tilewright.ir.new", "from tilewright.tree import syntax", ["tilewright.ir.new imports tilewright.tree.syntax"]),
        ("tilewright.codegen.new", "def f():\n    import tilewright.runtime.cuda.device", ["tilewright.codegen.new imports tilewright.runtime.cuda.device"]),
        ("tilewright.base.new", "from ..passes.pipeline import lower", ["tilewright.base.new imports tilewright.passes.pipeline"]),
        ("tilewright.passes.new", "import tilewright", ["tilewright.passes.new imports tilewright"]),
        ("tilewright.api.new", "from tilewright.base import errors\nfrom . import kernel", []),
    ],
)  # fmt: skip
def test_the_check_itself(name: str, text: str, expected: list[str]) -> None:
    assert violations(name, imports(name, text)) == expected
