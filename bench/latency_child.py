"""One import or one compile in this fresh process: `python -m bench.latency_child <what>` prints its milliseconds.

Nothing that is measured may be imported before the clock starts, so imports are inside the functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def import_ours() -> float:
    start = time.perf_counter()
    import tilewright  # noqa: F401

    return time.perf_counter() - start


def import_base() -> float:
    start = time.perf_counter()
    import llvmlite.binding  # noqa: F401
    import numpy  # noqa: F401

    return time.perf_counter() - start


def compile_for(target: str) -> float:
    """The first call of a kernel on the CPU, or its first compile to PTX; everything after the import counts."""
    import numpy as np

    from bench import kernels

    x, y = np.ones(16, np.float32), np.ones(16, np.float32)
    start = time.perf_counter()
    if target == "cpu":
        kernels.multiply_add(x, y)
    else:
        kernels.multiply_add.compile(x, y, target="sm_90a")
    return time.perf_counter() - start


def first_tiered(which: str) -> float:
    """The first call of a kernel in tiers on a million elements, after one other kernel was compiled."""
    import numpy as np

    import tilewright as tw
    from bench import kernels, transformer_kernels

    tw.tiers(True)
    x = np.linspace(-4, 4, 1 << 20, dtype=np.float32)
    kernels.relu(x)
    while tw.tiers().waiting:
        time.sleep(0.01)
    start = time.perf_counter()
    if which == "elementwise":
        kernels.multiply_add(x, x)
    else:
        transformer_kernels.softmax(x.reshape(1024, 1024))
    return time.perf_counter() - start


def main(what: str) -> None:
    actions: dict[str, Callable[[], float]] = {
        "import-ours": import_ours,
        "import-base": import_base,
        "compile-cpu": lambda: compile_for("cpu"),
        "compile-ptx": lambda: compile_for("ptx"),
        "tiered-elementwise": lambda: first_tiered("elementwise"),
        "tiered-softmax": lambda: first_tiered("softmax"),
    }
    print(actions[what]() * 1e3)


if __name__ == "__main__":
    main(sys.argv[1])
