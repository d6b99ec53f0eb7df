"""Who may import whom: each layer only those before it, and no module in a circle."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "tilewright"
BELOW: dict[str, frozenset[str]] = {"base": frozenset()}
for _layer, _imports in (
    ("tree", {"base"}),
    ("ir", {"base"}),
    ("frontend", {"base", "tree", "ir"}),
    ("analysis", {"base", "tree", "ir", "frontend"}),
    ("passes", {"base", "tree", "ir", "frontend", "analysis"}),
    ("primitives", {"base", "tree", "ir", "frontend", "analysis", "passes"}),
    ("codegen", {"base", "tree", "ir", "frontend", "analysis", "passes"}),
    ("runtime", {"base", "tree", "ir", "frontend", "analysis", "passes"}),
    ("compile", {"base", "tree", "ir", "frontend", "analysis", "passes", "primitives", "codegen", "runtime"}),
    ("api", {"base", "tree", "ir", "frontend", "analysis", "passes", "primitives", "codegen", "runtime", "compile"}),
    ("cli", {"base", "tree", "ir", "frontend", "analysis", "passes", "primitives", "codegen", "runtime", "compile", "api"}),
):
    BELOW[_layer] = frozenset(_imports)
BELOW["__main__"] = frozenset({"cli"})


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


def test_no_circles() -> None:
    graph = {name: imports(name, text, for_types=False) for name, text in TEXTS.items()}
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


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tilewright.ir.new", "from tilewright.tree import syntax", ["tilewright.ir.new imports tilewright.tree.syntax"]),
        ("tilewright.codegen.new", "def f():\n    import tilewright.runtime.cuda", ["tilewright.codegen.new imports tilewright.runtime.cuda"]),
        ("tilewright.base.new", "from ..passes.pipeline import lower", ["tilewright.base.new imports tilewright.passes.pipeline"]),
        ("tilewright.passes.new", "import tilewright", ["tilewright.passes.new imports tilewright"]),
        ("tilewright.api.new", "from tilewright.base import errors\nfrom . import kernel", []),
    ],
)  # fmt: skip
def test_the_check_itself(name: str, text: str, expected: list[str]) -> None:
    assert violations(name, imports(name, text)) == expected
