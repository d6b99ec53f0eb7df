"""What lies beside the package: the examples, which every wheel carries, and the benchmarks, which only the repository has."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from tilewright.base.errors import UserError

_HERE = Path(__file__).resolve()


def _roots() -> tuple[Path, ...]:
    """Where parts are looked for: the working directory, the repository of a package installed in place, the package of a wheel."""
    return (Path.cwd(), *_HERE.parents[3:4], _HERE.parents[1])


def find(part: str) -> Path:
    """A file of the repository, or of the examples that come with the package."""
    for root in _roots():
        if (root / part).is_file():
            return root / part
    raise UserError.at(
        "TW007", f"{part} is not here: it comes with the repository, not with the package",
        help="clone the Tilewright repository and run this command in its folder",
    )  # fmt: skip


def examples() -> Path:
    """The folder of examples that belongs to this package."""
    return next(root / "examples" for root in _roots()[1:] if (root / "examples" / "gallery.py").is_file())


def existing(path: str) -> str:
    """A path as given; `examples/…` that is not in the working directory is that of the package."""
    if path.startswith("examples/") and not Path(path).exists():
        there = examples().parent / path
        if there.exists():
            return str(there)
    return path


def copy_examples(folder: str) -> list[Path]:
    """All examples as files of a new folder; a folder that has something in it is refused."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError.at("TW007", f"'{folder}' is there already, and not empty", help="name another folder")
    shutil.copytree(examples(), target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return sorted(p for p in target.rglob("*") if p.is_file())


def load(part: str, name: str) -> ModuleType:
    """Import a file of the repository as a module of that name."""
    path = find(part)
    if name.count("."):
        folder = str(path.parents[name.count(".")])
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
