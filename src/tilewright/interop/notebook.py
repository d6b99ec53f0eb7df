"""`%%zyn` in notebooks: `%load_ext tilewright`, then a cell that begins with `%%zyn` is a ZynML program.

In: the cell's text, and the variables of the notebook, from which its inputs are taken by name. Out: the program's results as variables of
the notebook, its functions as functions. Functions of earlier cells can be called in later ones. `%%zyn --device cpu` says where it runs, `--quiet`
that results are not listed.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from tilewright.base.errors import UserError
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.zyn.load import CompiledBlocks
from tilewright.zyn.module import ZynModule


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError.at("TW016", f"%%zyn: {message}", help="write %%zyn [--device NAME] [--quiet]")


class ZynCells:
    """The cells of one notebook. `shell` is IPython's: only its `user_ns` is used."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._functions: dict[str, syntax.Function] = {}
        self._imports: dict[str, syntax.Import] = {}
        """By what they are called, or by their paths."""
        self._count = 0
        self._options = _Options("%%zyn", add_help=False, exit_on_error=False)
        self._options.add_argument("-d", "--device")
        self._options.add_argument("-q", "--quiet", action="store_true")

    def run(self, line: str, cell: str) -> None:
        """Run a cell; `line` is what stands behind `%%zyn`."""
        options = self._options.parse_args(shlex.split(line))
        self._count += 1
        tree = parse_module(cell, f"<zyn cell {self._count}>")
        own = {s.name: s for s in tree.body if isinstance(s, syntax.Function)}
        imports = {s.alias or s.path: s for s in tree.body if isinstance(s, syntax.Import)}
        kept: list[syntax.Stmt] = [i for name, i in self._imports.items() if name not in imports]
        kept += [f for name, f in self._functions.items() if name not in own]
        module = ZynModule(replace(tree, body=(*kept, *tree.body)), CompiledBlocks())
        names = module.inputs()
        known: dict[str, Any] = self._shell.user_ns
        missing = [name for name in names if name not in known]
        if missing:
            raise UserError.at("TW008", f"the notebook has no {', '.join(map(repr, missing))}", help=f"set {missing[0]} in a cell before this one")
        found = module.run(options.device, **{name: known[name] for name in names})
        # Only a cell that ran leaves something behind.
        self._functions |= own
        self._imports |= imports
        known.update({name: getattr(module, name) for name in own})
        known.update(found)
        if not options.quiet:
            for name, value in found.items():
                print(f"{name}: {_described(value)}")


def _described(value: object) -> str:
    if isinstance(value, np.generic | bool | int | float | str):
        return str(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}[{', '.join(map(str, shape))}]"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple | dict) else type(value).__name__


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext tilewright` calls."""
    shell.register_magic_function(ZynCells(shell).run, "cell", "zyn")


def unload_ipython_extension(shell: Any) -> None:
    """What `%unload_ext tilewright` calls."""
    shell.magics_manager.magics["cell"].pop("zyn", None)
