"""Subscripts of whole arrays: slices with steps, axes that are added or have extent 1, arrays of indices. Drawn from a source of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .model import Binary, Expr, Extent, Lit, Load, Size

if TYPE_CHECKING:
    from .draw import Drawing, Place


@dataclass(frozen=True)
class View:
    """An array of `shape` under the subscript `text`; its element that meets the loop's indices is the one at `indices`."""

    shape: tuple[Size, ...]
    indices: tuple[Expr, ...]
    text: str


def scaled(size: Size, times: int, plus: int = 0) -> Size:
    return Size(size.dim, size.times * times, size.plus * times + plus)


def arithmetic(left: Expr, op: str, right: Expr | int) -> Expr:
    return Binary("i64", op, left, Lit("i64", right) if isinstance(right, int) else right, "i64")


class Views:
    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.r = random.Random(f"views {drawing.seed}")

    def draw(self, places: Sequence[Place], smaller: bool) -> View:
        """An array whose subscript has the axes of the loop indices `places`; where it may be `smaller`, some have extent 1."""
        if self.r.random() < 0.5:
            return View(tuple(p.size for p in places), tuple(p.expr for p in places), "")
        shape: list[Size] = []
        indices: list[Expr] = []
        words: list[str] = []
        # An array of indices beside a number moves its axis to the front: numbers stand in subscripts of their own.
        numbers, gathered = self.r.random() < 0.5, False
        for place in places:
            if numbers and self.r.random() < 0.2:
                shape.append(Size("", 1, 3))
                indices.append(Lit("i64", 1))
                words.append(self.r.choice(("1", "-2")))
            kinds = ("plain", "plain", "step", "part", "back", *(("one", "new") if smaller else ()), *(() if numbers or gathered else ("rows",)))
            kind = self.r.choice(kinds)
            if kind == "new":
                words.append("None")
                continue
            gathered |= kind == "rows"
            size, index, word = getattr(self, kind)(place)
            shape.append(size)
            indices.append(index)
            words.append(word)
        if not shape:
            return self.draw(places, smaller)
        if words[0] == ":" and self.r.random() < 0.3:
            words[0] = "..."
        while len(words) > 1 and words[-1] == ":" and words[0] != "..." and self.r.random() < 0.5:
            words.pop()
        self.drawing.tags.add("views")
        return View(tuple(shape), tuple(indices), f"[{', '.join(words)}]")

    def plain(self, place: Place) -> tuple[Size, Expr, str]:
        return place.size, place.expr, ":"

    def step(self, place: Place) -> tuple[Size, Expr, str]:
        step = self.r.choice((2, 2, 3))
        return scaled(place.size, step), arithmetic(place.expr, "*", step), f"::{step}"

    def part(self, place: Place) -> tuple[Size, Expr, str]:
        low, high = self.r.choice(((1, 1), (2, 0), (0, 3), (1, 2)))
        return scaled(place.size, 1, low + high), arithmetic(place.expr, "+", low), f"{low or ''}:{-high or ''}"

    def back(self, place: Place) -> tuple[Size, Expr, str]:
        step = self.r.choice((1, 1, 2))
        size = scaled(place.size, step)
        return size, arithmetic(Extent("i64", scaled(size, 1, -1)), "-", arithmetic(place.expr, "*", step)), f"::{-step}"

    def one(self, place: Place) -> tuple[Size, Expr, str]:
        return Size("", 1, 1), Lit("i64", 0), ":"

    def rows(self, place: Place) -> tuple[Size, Expr, str]:
        below = Size("", 1, self.r.choice((1, 5, 40)))
        name = self.drawing.index_input((place.size,), below)
        kind = next(i.dtype for i in self.drawing.inputs if i.name == name)
        return below, Load(kind, name, (place.expr,)), name
