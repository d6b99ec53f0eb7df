"""The parts that come with the repository and not with the installed package: the gallery and the benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tilewright.base.errors import UserError

_HERE = Path(__file__).resolve()


def find(part: str) -> Path:
    """A file of the repository: below the working directory, or beside the package when it is installed in place."""
    for root in (Path.cwd(), *_HERE.parents[3:4]):
        if (root / part).is_file():
            return root / part
    raise UserError.at(
        "TW007", f"{part} is not here: it comes with the repository, not with the package",
        help="clone the Tilewright repository and run this command in its folder",
    )  # fmt: skip


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
