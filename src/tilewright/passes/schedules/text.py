"""The text form of schedules: `family=wgmma m=128 n=256 k=64 stages=4 math_warpgroups=2`.

In: text, as `describe` prints it, or in words of earlier versions (`OLD_NAMES`, `OLD_COPIES`), which tuning tables and users' `schedule=`
strings may have. Out: a record. Words may stand in any order; a word the family does not have is refused.
"""

from __future__ import annotations

from dataclasses import fields

from tilewright.base.errors import UserError
from tilewright.passes.schedules.attention import CpuAttention, MmaAttention, WgmmaAttention
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import Amx, CpuPanels, Fma, MatrixSchedule, Mfma, Mma, Wgmma, Wmma3, Wmma4

FAMILIES: dict[str, type[MatrixSchedule]] = {
    kind.family: kind for kind in (Wgmma, Mma, Fma, Mfma, Wmma3, Wmma4, Gemv, Amx, CpuPanels, WgmmaAttention, MmaAttention, CpuAttention)
}
OLD_NAMES = {
    "groups": "math_warpgroups", "turns": "pingpong", "wait": "mma_in_flight", "buffers": "epilogue_stages", "swap": "swap_ab",
    "parts": "split_k", "sum_cluster": "cluster_k", "stream": "stream_k", "products": "tf32_terms", "turn": "to_channels_last",
    "beside": "horizontal", "early": "pdl", "wide": "head_dim_v",
}  # fmt: skip
OLD_COPIES = {"image": "im2col", "registers": "rs", "async": "cp_async"}
"""Old values of `a_copy` and `b_copy`."""


def parse_schedule(text: str) -> MatrixSchedule:
    """The schedule `describe` printed, in this version or an earlier one."""
    words = [word.partition("=") for word in text.split()]
    given = {OLD_NAMES.get(name, name): value for name, _, value in words}
    missing = [name for name in ("family", "m", "n", "k") if name not in given]
    if missing:
        raise UserError.at("TW005", f"a schedule needs {', '.join(missing)}")
    kind = FAMILIES.get(given["family"])
    if kind is None:
        raise UserError.at("TW005", f"there is no family '{given['family']}' of schedules", help=f"families are {', '.join(FAMILIES)}")
    types = {field.name: field.type for field in fields(kind)}
    values: dict[str, int | str] = {}
    for word, equals, value in words:
        name = OLD_NAMES.get(word, word)
        if name == "family":
            continue
        if name not in types or not equals:
            said = f"'{word}{equals}{value}' is not part of a schedule of family {kind.family}"
            raise UserError.at("TW005", said, help=f"names are {', '.join(types)}")
        if types[name] == "str":
            values[name] = OLD_COPIES.get(value, value) if name.endswith("_copy") else value
        elif not value.lstrip("-").isdigit():
            raise UserError.at("TW005", f"'{word}={value}': {word} is an integer")
        else:
            values[name] = bool(int(value)) if types[name] == "bool" else int(value)
    schedule = kind(**values)  # type: ignore[arg-type]
    schedule.validate()
    return schedule


def in_new_words(text: str) -> str:
    """The text of a schedule as this version prints it; what is no schedule stays as it is."""
    try:
        return parse_schedule(text).describe()
    except UserError:
        return text
