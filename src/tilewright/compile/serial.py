"""Artifacts as bytes and back. In: an `Artifact`; out: a JSON head with everything small, then the code. No code runs on reading.

Layout: the head's length (u32), the lengths of the code and of the host part (u64 each), the head, the code, the host part.
Sizes are written as text, dtypes by name. `deserialise(serialise(a)) == a` for every artifact; anything else is a ValueError.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tilewright.base.artifact import (
    ArrayParam,
    Artifact,
    CallCheck,
    IndexSite,
    Launch,
    MapParam,
    ScalarParam,
    SizeBinding,
    SmallSums,
)
from tilewright.base.dtypes import by_name
from tilewright.base.errors import Note
from tilewright.base.sizes import Size, parse_size

_LENGTHS = struct.Struct("<IQQ")

Json = str | int | bool | None | list["Json"] | dict[str, "Json"]


def serialise(artifact: Artifact) -> bytes:
    """The artifact as bytes."""
    head: dict[str, Json] = {
        "name": artifact.name,
        "target": artifact.target,
        "kind": artifact.kind,
        "inputs": [_param(p) for p in artifact.inputs],
        "outputs": [_param(p) for p in artifact.outputs],
        "scratch": [_param(p) for p in artifact.scratch],
        "launches": [_launch(launch) for launch in artifact.launches],
        "bindings": [[b.name, b.array, b.axis, b.stride] for b in artifact.bindings],
        "checks": [
            [str(c.left), c.relation, str(c.right), c.message, c.place, c.excerpt, c.code] for c in artifact.checks
        ],
        "facts": [[name, divisor] for name, divisor in artifact.facts],
        "computed": [[name, str(size)] for name, size in artifact.computed],
        "absent": list(artifact.absent),
        "level": artifact.level,
        "alias_safe": artifact.alias_safe,
        "key": artifact.key,
        "sites": [[s.kernel, s.opcode, s.array, s.axis, s.rank, s.place, s.excerpt] for s in artifact.sites],
        "schedule": artifact.schedule,
        "notes": [[n.code, n.message, n.help, n.path, n.line, n.column, n.end_column, n.text] for n in artifact.notes],
        "small": [[[list(axis) for axis in nest.sums], [list(axis) for axis in nest.around], nest.most] for nest in artifact.small],
        "is_sized": artifact.is_sized,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    lengths = _LENGTHS.pack(len(text), len(artifact.code), len(artifact.host))
    return b"".join((lengths, text, artifact.code, artifact.host))


def deserialise(data: bytes) -> Artifact:
    """The artifact those bytes mean. Raises ValueError when they mean none."""
    if len(data) < _LENGTHS.size:
        raise ValueError(f"an artifact of {len(data)} bytes is too short")
    head_bytes, code_bytes, host_bytes = _LENGTHS.unpack_from(data)
    code_at = _LENGTHS.size + head_bytes
    host_at = code_at + code_bytes
    if host_at + host_bytes != len(data):
        raise ValueError(f"an artifact of {len(data)} bytes does not have the {host_at + host_bytes} it names")
    try:
        # JSON has no types of ours; the constructors below get what `serialise` wrote, or fail.
        head = json.loads(data[_LENGTHS.size : code_at])
        return Artifact(
            name=head["name"],
            target=head["target"],
            kind=head["kind"],
            code=data[code_at:host_at],
            inputs=tuple(_read_param(*p) for p in head["inputs"]),
            outputs=tuple(_read_array(*p) for p in head["outputs"]),
            scratch=tuple(_read_array(*p) for p in head["scratch"]),
            launches=tuple(_read_launch(*launch) for launch in head["launches"]),
            bindings=tuple(SizeBinding(*binding) for binding in head["bindings"]),
            checks=tuple(
                CallCheck(_size(left), relation, _size(right), *rest) for left, relation, right, *rest in head["checks"]
            ),
            facts=tuple((name, divisor) for name, divisor in head["facts"]),
            computed=tuple((name, _size(size)) for name, size in head["computed"]),
            absent=tuple(head["absent"]),
            level=head["level"],
            alias_safe=head["alias_safe"],
            host=data[host_at:],
            key=head["key"],
            sites=tuple(IndexSite(*site) for site in head["sites"]),
            schedule=head["schedule"],
            notes=tuple(Note(*note) for note in head["notes"]),
            small=tuple(SmallSums(_axes(sums), _axes(around), most) for sums, around, most in head["small"]),
            is_sized=head["is_sized"],
        )
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"the head of an artifact is not understood: {error!r}") from error


def _axes(pairs: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, axis) for name, axis in pairs)


def _texts(sizes: tuple[Size, ...]) -> list[Json]:
    return [str(size) for size in sizes]


def _param(param: ArrayParam | ScalarParam) -> Json:
    if isinstance(param, ScalarParam):
        return [param.name, param.dtype.name, None, None, "typed"] if param.typed else [param.name, param.dtype.name]
    return [param.name, param.dtype.name, _texts(param.shape), _texts(param.strides), param.role, param.align]


def _launch(x: Launch) -> Json:
    return [
        x.entry, list(x.args), list(x.sizes), _texts(x.grid), x.threads, x.shared_bytes, str(x.work), [_map(m) for m in x.maps],
        x.cluster, x.dependent, x.place, x.watchdog, x.cooperative, x.persistent,
        [list(a) for a in x.asserts], _texts(x.values), _texts(x.narrow), str(x.turns), x.open_loops,
    ]  # fmt: skip


def _map(m: MapParam) -> Json:
    plain: list[Json] = [m.array, m.dtype.name, _texts(m.shape), _texts(m.strides), list(m.box), m.swizzle]
    return [*plain, m.pixels, _texts(m.lower), _texts(m.upper), list(m.steps), m.rounds] if m.pixels or m.rounds else plain


@lru_cache(maxsize=4096)
def _size(text: str) -> Size:
    return parse_size(text)


def _sizes(texts: Sequence[str]) -> tuple[Size, ...]:
    return tuple(_size(text) for text in texts)


def _read_param(
    name: str, dtype: str, shape: list[str] | None = None, strides: list[str] | None = None, role: str = "", align: int = 0
) -> ArrayParam | ScalarParam:
    if shape is None or strides is None:
        return ScalarParam(name, by_name(dtype), role == "typed")
    return ArrayParam(name, by_name(dtype), _sizes(shape), _sizes(strides), role, align)


def _read_array(
    name: str, dtype: str, shape: list[str], strides: list[str], role: str, align: int
) -> ArrayParam:
    return ArrayParam(name, by_name(dtype), _sizes(shape), _sizes(strides), role, align)


def _read_map(
    array: str, dtype: str, shape: list[str], strides: list[str], box: list[int], swizzle: int, pixels: int = 0,
    lower: Sequence[str] = (), upper: Sequence[str] = (), steps: Sequence[int] = (), rounds: bool = False,
) -> MapParam:  # fmt: skip
    corners = _sizes(lower), _sizes(upper)
    return MapParam(array, by_name(dtype), _sizes(shape), _sizes(strides), tuple(box), swizzle, pixels, *corners, tuple(steps), rounds)


def _read_launch(
    entry: str, args: list[str], sizes: list[str], grid: list[str], threads: int, shared: int, work: str,
    maps: list[list[Any]], cluster: int, dependent: bool, place: str, watchdog: int, cooperative: bool,
    persistent: bool, asserts: Sequence[Sequence[str]] = (), values: Sequence[str] = (), narrow: Sequence[str] = (),
    turns: str = "0", open_loops: bool = False,
) -> Launch:  # fmt: skip
    read = tuple(_read_map(*m) for m in maps)
    plain = entry, tuple(args), tuple(sizes), _sizes(grid), threads, shared, _size(work)
    texts = tuple((where, text) for where, text in asserts)
    return Launch(*plain, read, cluster, dependent, place, watchdog, cooperative, persistent, texts, _sizes(values), _sizes(narrow), _size(turns), open_loops)
