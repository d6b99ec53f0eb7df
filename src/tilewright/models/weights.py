"""The weights of a model, by the names of GGUF, where they are needed.

In: a `ModelFile` and a device. Out: arrays: views of the mapped file on the host, arrays on a GPU, to which each weight is copied once. Packed blocks stay
packed. The names in folders of safetensors are other ones; `names` says which tensor is meant, and what is done to it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, f16, f32
from tilewright.base.errors import DeviceError, UserError
from tilewright.execute.arrays import as_dtype
from tilewright.execute.devices import Device, array_device, place_of
from tilewright.models.formats.model_file import ModelFile
from tilewright.runtime.memory.packed_array import PackedArray

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are on the device."""


def checked_cache(cache: Any, place: Device) -> DType:
    """What keys and values are kept as: f16 on a GPU, whose matrix units take it, f32 elsewhere, or what was asked for."""
    found: DType = as_dtype(cache) if cache is not None else f32 if array_device(place) is None else f16
    if not found.is_float or found.itemsize not in (2, 4):
        raise UserError.at("TW009", f"cache is {found}", help="give f32, f16 or bf16")
    return found


class ModelWeights:
    """Arrays of one file on one device."""

    def __init__(self, file: ModelFile, place: Device, names: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray] | None]] | None = None) -> None:
        self.file, self.place, self.names = file, place, names
        self._arrays: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        """The array of that name; None where the file has none."""
        if name not in self._arrays:
            own, change = self.names.get(name, ("", None)) if self.names is not None else (name, None)
            if own not in self.file.tensors:
                return None
            array: Any = self.file.array(own)
            self._arrays[name] = self._moved(name, array if change is None else change(np.asarray(array)))
        return self._arrays[name]

    def _moved(self, name: str, array: Any) -> Any:
        gpu = array_device(self.place)
        if gpu is None:
            return array
        try:
            if isinstance(array, PackedArray):
                return PackedArray(place_of([array.blocks], self.place).read(name, array.blocks), array.dtype)
            return place_of([array], self.place).read(name, array)
        except DeviceError as error:
            if error.code != "TW031":
                raise
            raise DeviceError.at("TW031", f"no memory on '{self.place.id}' for the weight '{name}': all weights of {self.file.path.name} take {self.nbytes:,} bytes: {error.diagnostics[0].message}", help="use another device, device=\"cpu\" for instance, or a file with fewer bits for each weight") from None

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def load(self, progress: Progress | None) -> None:
        """Copy all weights that the file has under names of ours, and say how far that is."""
        names = list(self.names) if self.names is not None else list(self.file.tensors)
        done, total = 0, self.file.nbytes
        for name in names:
            array = self(name)
            done += 0 if array is None else int(array.nbytes)
            if progress is not None:
                progress(min(done, total), total)
