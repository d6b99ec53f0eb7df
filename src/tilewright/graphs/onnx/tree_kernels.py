"""Kernels that come as trees: what the rules build, callable and joinable like kernels that somebody wrote.

Equal trees are one kernel, so nodes that compute the same are compiled once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tilewright.execute.calls.run import Runner
from tilewright.execute.kernel import Kernel
from tilewright.tree.syntax import Function


class TreeKernel(Kernel[..., Any]):
    """A kernel of a tree instead of a Python function."""

    def __init__(self, tree: Function) -> None:
        def stand_in(*args: object) -> None:
            raise AssertionError("a kernel of a tree has no Python function")

        stand_in.__name__ = stand_in.__qualname__ = tree.name
        stand_in.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in tree.params]
        )
        self._tree = tree
        super().__init__(stand_in)

    @property
    def function(self) -> Function:
        """The tree."""
        return self._tree

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            self._runner = Runner(self._tree)
        return self._runner

    def __reduce__(self) -> Any:
        return kernel_of, (self._tree,)


@functools.lru_cache(4096)
def kernel_of(tree: Function) -> TreeKernel:
    """The kernel of a tree; one for equal trees."""
    return TreeKernel(tree)
