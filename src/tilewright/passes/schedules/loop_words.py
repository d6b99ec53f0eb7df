"""The text form of what tuning says of loop nests: `family=loops chunk=16384 vector=16`.

In: text. Out: numbers that take the place of the compiler's own (`Target.tuned`). Each word is a parameter of the schedules that
`passes/choose/loops.py` and `passes/choose/windows.py` choose for maps, rows, reductions, windows and scans; the rest of a schedule stays as chosen.
"""

from __future__ import annotations

from tilewright.base.cost_model import CostModel
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.target import Target

FAMILY = "family=loops"
MOST = 1 << 24


@record
class LoopWord:
    """One parameter: where its number is in the cost model (empty for a wish), and what it means."""

    name: str
    number: str
    meaning: str
    least: int = 1


CPU_WORDS = (
    LoopWord("vector", "", "elements that a step along memory has: several registers", 2),
    LoopWord("chunk", "caches.chunk", "elements of one unit of work for the thread pool, in maps"),
    LoopWord("columns", "caches.columns", "results of one unit of work, in reductions across rows"),
    LoopWord("rows", "caches.rows_per_block", "rows of one unit of work, in windows and short sums"),
    LoopWord("square", "caches.square", "bytes of a side of the squares of transposed reads", 32),
    LoopWord("pairs", "caches.paired", "results of one unit of work along rows, in sums over two rows"),
    LoopWord("stretch", "reductions.cpu_stretch", "elements that one unit of work reduces"),
    LoopWord("stretch_rows", "reductions.cpu_rows", "rows that one unit of work adds up"),
    LoopWord("scan_stretch", "scans.cpu_stretch", "turns of a part of a loop that is a scan"),
    LoopWord("scan_parts", "scans.cpu_parts", "parts of a loop that is a scan"),
)
GPU_WORDS = (
    LoopWord("vector", "", "elements that a thread accesses at once"),
    LoopWord("threads", "", "threads of a block, in maps and reductions"),
    LoopWord("vectors", "maps.vectors", "vectors of a thread in flight, in maps"),
    LoopWord("row_threads", "rows.threads", "threads that hold a row, where rows stay in registers", 32),
    LoopWord("row_share", "rows.share", "elements of such a row that one thread has"),
    LoopWord("row_block", "rows.block", "threads of a block that has several short rows", 32),
    LoopWord("window_threads", "maps.window_threads", "threads of a block, in windows", 32),
    LoopWord("window_results", "maps.window_results", "results of a thread, in windows", 4),
    LoopWord("window_along", "maps.window_along", "results of a thread along the index it walks, in windows"),
    LoopWord("window_lanes", "maps.window_lanes", "threads along memory, in windows"),
    LoopWord("window_widest", "maps.window_widest", "elements of a vector, in windows"),
    LoopWord("blocks", "reductions.blocks", "blocks of a split reduction on each multiprocessor"),
    LoopWord("stretch", "reductions.shortest", "elements of a split reduction that are worth a block"),
    LoopWord("blocks_across", "reductions.blocks_across", "the same of sums across rows"),
    LoopWord("range_threads", "ranges.threads", "threads of a block, where data say how long rows are", 32),
    LoopWord("range_terms", "ranges.terms", "terms of such a row that a thread has in flight"),
    LoopWord("scan_stretch", "scans.stretch", "turns of a part of a loop that is a scan"),
    LoopWord("scan_blocks", "scans.blocks", "blocks of such a loop on each multiprocessor"),
)


def words_of(target: Target) -> tuple[LoopWord, ...]:
    """The parameters that a target's loop nests have."""
    return GPU_WORDS if target.simt else CPU_WORDS


@record
class LoopNumbers:
    """A way to run the loop nests of a kernel: numbers by word, in the order of the words. None at all is the compiler's own choice."""

    numbers: tuple[tuple[str, int], ...] = ()

    def describe(self) -> str:
        return " ".join((FAMILY, *(f"{name}={number}" for name, number in self.numbers)))

    def with_number(self, word: str, number: int, target: Target) -> LoopNumbers:
        found = {**dict(self.numbers), word: number}
        return LoopNumbers(tuple((w.name, found[w.name]) for w in words_of(target) if w.name in found))

    def without(self, word: str) -> LoopNumbers:
        return LoopNumbers(tuple((name, number) for name, number in self.numbers if name != word))

    def tuned(self, target: Target) -> tuple[tuple[str, int], ...]:
        """As `Target.tuned` has them."""
        places = {word.name: word.number or word.name for word in words_of(target)}
        return tuple((places[name], number) for name, number in self.numbers)


def is_loops(text: str) -> bool:
    """Whether a schedule is one of loop nests."""
    return FAMILY in text.split()


def default_number(word: LoopWord, costs: CostModel) -> int:
    """What the cost model says."""
    part, _, name = word.number.rpartition(".")
    return int(getattr(getattr(costs, part), name))


def parse_loops(text: str, target: Target) -> LoopNumbers:
    """The numbers in a text. Raises UserError for words that the target does not have, and for numbers that cannot be."""
    known = {word.name: word for word in words_of(target)}
    found: dict[str, int] = {}
    for item in text.split():
        if item == FAMILY:
            continue
        name, _, value = item.partition("=")
        word = known.get(name)
        if word is None:
            raise UserError.at("TW005", f"'{item}' is not part of a schedule of family loops for {target.name}", help=f"words are {', '.join(known)}")
        if name in found:
            raise UserError.at("TW005", f"a schedule gives '{name}' twice: {text}")
        if not value.isdigit() or not word.least <= int(value) <= MOST or int(value) & (int(value) - 1):
            raise UserError.at("TW005", f"'{item}': {name} is a power of two from {word.least} to {MOST}", help=f"{name}: {word.meaning}")
        if word.number == "" and name == "threads" and not target.warp_size <= int(value) <= target.max_threads:
            raise UserError.at("TW005", f"'{item}': blocks of {target.name} have {target.warp_size} to {target.max_threads} threads")
        found[name] = int(value)
    return LoopNumbers(tuple((name, found[name]) for name in known if name in found))


# -- what to try ----------------------------------------------------------------------------------------------------

FACTORS = (2, 0.5, 4, 0.25)
"""By what numbers of the cost model are multiplied, first what is likely to help."""


def alternatives(target: Target) -> list[LoopNumbers]:
    """The compiler's own choice, then every parameter changed by itself. Which of them make other code, only lowering tells."""
    found = [LoopNumbers()]
    own = LoopNumbers()
    words = words_of(target)
    found += [own.with_number(word.name, number, target) for word in words if not word.number for number in _wishes(word, target)]
    for factor in FACTORS:
        found += [own.with_number(w.name, number, target) for w in words if w.number and (number := _scaled(default_number(w, target.costs), factor)) >= w.least]
    return list(dict.fromkeys(found))


def around(numbers: LoopNumbers, target: Target) -> list[LoopNumbers]:
    """One step away: a number doubled or halved, a parameter more, a parameter less."""
    said, found = dict(numbers.numbers), [numbers.without(name) for name, _ in numbers.numbers]
    for word in words_of(target):
        if not word.number:
            values = _wishes(word, target)
            near = [v for v in values if word.name not in said or v in (2 * said[word.name], said[word.name] // 2)]
        else:
            number = said.get(word.name, default_number(word, target.costs))
            near = [n for f in (2, 0.5) if (n := _scaled(number, f)) >= word.least]
        found += [numbers.with_number(word.name, n, target) for n in near]
    return found


def _wishes(word: LoopWord, target: Target) -> list[int]:
    if word.name == "threads":
        return [t for t in (128, 256, 64, 512, 1024) if target.warp_size <= t <= target.max_threads]
    if target.simt:
        return [v for v in (2, 4, 1, 8) if v <= target.vector_bytes]
    return [v for v in (8, 16, 32, 4, 64) if v >= word.least]


def _scaled(number: int, factor: float) -> int:
    """A power of two."""
    return 1 << max(0, round(number * factor) - 1).bit_length()
