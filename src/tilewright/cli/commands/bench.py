"""`tilewright bench`: hands over to the benchmarks of the repository, `bench/run.py`."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.cli import repository


def bench(kind: str, json: bool, ops: Sequence[str], quick: bool) -> int:
    """Run the benchmarks of one kind of device; the exit status."""
    main = repository.load("bench/run.py", "bench.run").main
    status: object = main(kind, json, list(ops) or None, quick)
    return status if isinstance(status, int) else 0
