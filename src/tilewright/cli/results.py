"""Results of a run as text and as files.

In: values of a ZynML program or kernel. Out: lines for the terminal; `.npy` files of arrays and numbers, `.npz` files of
records, lists and tuples, which `--in` and `read` take back: records in records have names with dots, and so have lists, with
numbers.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tilewright.base.errors import UserError
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.zyn.host.functions import settled, shown


def on_host(value: object) -> object:
    """A result without futures and arrays on devices."""
    value = settled(value)
    if isinstance(value, DeviceArray):
        return value.numpy()
    if isinstance(value, Mapping):
        return {name: on_host(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(part) for part in value)
    return value


def save(name: str, value: object, path: str) -> None:
    """Write a result to a file."""
    arrays = dict(_arrays(name, value, ""))
    suffix = Path(path).suffix.lower()
    if suffix != ".npz" and list(arrays) != [""]:
        raise UserError.at(
            "TW009", f"--out {name}: a {_kind(value)} cannot be saved as .npy", help=f"write --out {name}={Path(path).stem}.npz"
        )
    for part, array in arrays.items():
        if array.dtype.kind == "V":
            which = f"'{part}' of {name}" if part else name
            raise UserError.at(
                "TW009",
                f"--out {name}: {suffix} files have no type for {which}, {array.dtype}",
                help="cast it to f32 in the program",
            )
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".npz":
            # As numpy.savez does it, which takes no array called "file".
            with zipfile.ZipFile(path, "w") as archive:
                for part, array in arrays.items():
                    with archive.open(f"{part or name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, array, allow_pickle=False)
        else:
            with open(path, "wb") as plain:
                np.save(plain, arrays[""])
    except OSError as error:
        raise UserError.at("TW007", f"--out {name}: '{path}' cannot be written: {error.strerror or error}") from None


def _arrays(name: str, value: object, place: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays and numbers in a value, by their dotted names."""
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        yield place, np.asarray(value)
        return
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(number), part) for number, part in enumerate(value)]
    else:
        where = f"'{place}', a {_kind(value)}," if place else f"a {_kind(value)}"
        raise UserError.at(
            "TW009", f"--out {name}: {where} cannot be saved", help="arrays, numbers, and records and lists of them can"
        )
    for key, part in parts:
        yield from _arrays(name, part, f"{place}.{key}" if place else key)


def describe(value: object) -> str:
    """`float32[3, 4]` of an array; else the type."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return str(value.dtype) if isinstance(value, np.generic) else _kind(value)


def _kind(value: object) -> str:
    return "record" if isinstance(value, Mapping) else "string" if isinstance(value, str) else type(value).__name__


def text(value: object) -> str:
    """The value itself, shortened where it is long."""
    return (
        f"  {np.array2string(value, threshold=20, edgeitems=3, prefix='  ')}"
        if isinstance(value, np.ndarray)
        else f"  {shown(value)}"
    )
