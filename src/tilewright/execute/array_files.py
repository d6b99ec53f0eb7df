"""Files of arrays as values: `.npy` is an array, `.npz` and `.safetensors` are records of arrays.

In: a path. Out: a NumPy array, or a record. Names with dots make records in records (`layers.0.attn.weight` is `r.layers[0].attn.weight`;
numbers from 0 on make lists). Safetensors are mapped, not read: what is not used is never loaded. Files that are missing, damaged or of
another kind are a `UserError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import HELP, read_npy, read_npz, shown_name
from tilewright.execute.safetensors_files import read_safetensors

MOST_DOTS = 64
"""How deep records in records may be."""


def read_values(path: str | os.PathLike[str]) -> Any:
    """The array or record in a `.npy`, `.npz` or `.safetensors` file."""
    if not isinstance(path, str | os.PathLike):
        raise UserError.at("TW009", f"a {type(path).__name__} is no path of a file", help=HELP)
    place = Path(path)
    suffix = place.suffix.lower()
    if suffix == ".npy":
        return read_npy(place)
    if suffix == ".npz":
        return nested(read_npz(place), str(path))
    if suffix == ".safetensors":
        return nested(read_safetensors(place), str(path))
    raise UserError.at("TW007", f"{shown_name(str(path))} is no file of arrays", help=HELP)


def nested(arrays: Mapping[str, np.ndarray], path: str = "") -> dict[str, Any]:
    """Arrays with dotted names as records in records."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        if len(folders) > MOST_DOTS:
            raise UserError.at("TW007", f"{shown_name(name)} of '{path}' has {len(folders)} dots, more than {MOST_DOTS}", help="give it a shorter name")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                raise UserError.at("TW007", f"{shown_name(name)} of '{path}' is inside an array", help="rename one of them")
        if last in place:
            raise UserError.at("TW007", f"{shown_name(name)} of '{path}' is an array and has others inside", help="rename one of them")
        place[last] = array
    return {key: _with_lists(value) for key, value in tree.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    numbers = [str(n) for n in range(len(parts))]
    return [parts[n] for n in numbers] if parts and set(parts) == set(numbers) else parts
