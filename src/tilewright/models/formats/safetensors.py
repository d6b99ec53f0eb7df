"""Folders of safetensors, as Hugging Face has them: `config.json`, one or several `*.safetensors`, and an index where there are several.

In: a folder; out: a `ModelFile` whose metadata are the record in `config.json`. Which files count: those the index names; without one
`model.safetensors`; without that all. An index may name files of its folder only. What is wrong is a `UserError` that names the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import no_such, opened, shown_name
from tilewright.execute.safetensors_files import read_entries
from tilewright.models.formats.json_files import read_json
from tilewright.models.formats.model_file import FileBytes, ModelFile, TensorEntry, bytes_of

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_MOST_AXES = 32


def open_folder(folder: str | os.PathLike[str]) -> ModelFile:
    """The model in a folder. Raises `UserError`."""
    if not isinstance(folder, str | os.PathLike):
        raise UserError.at("TW009", f"a {type(folder).__name__} is no path of a folder")
    place = Path(folder)
    try:
        names = sorted(entry.name for entry in os.scandir(place))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError.at("TW007", f"folder {shown_name(str(place))} cannot be read: {reason}", help=f"give a folder with {CONFIG} and safetensors files") from None
    if CONFIG not in names:
        raise UserError.at("TW007", f"folder '{place}' has no {CONFIG}", help="give a folder as it is on Hugging Face")
    config = read_json(place / CONFIG)
    homes = _index(place) if INDEX in names else {}
    shards = sorted(set(homes.values())) if INDEX in names else [WHOLE] if WHOLE in names else [name for name in names if name.endswith(".safetensors")]
    if not shards:
        raise UserError.at("TW007", f"folder '{place}' has no safetensors files")
    tensors: dict[str, TensorEntry] = {}
    files: dict[Path, FileBytes] = {}
    for shard in shards:
        path = place / shard
        for entry in _open_shard(path, files):
            if (other := tensors.get(entry.name)) is not None:
                raise UserError.at("TW007", f"'{other.file}' and '{path}' both hold {shown_name(entry.name)}")
            tensors[entry.name] = entry
    for name, shard in homes.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise UserError.at("TW007", f"'{place / INDEX}' says that {shown_name(name)} is in {shown_name(shard)}, and it is not")
    return ModelFile(place, "safetensors", MappingProxyType(config), tensors, files)


def _index(place: Path) -> dict[str, str]:
    """Which file holds each tensor."""
    found = read_json(place / INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise UserError.at("TW007", f"'{place / INDEX}' has no record weight_map")
    for name, shard in found.items():
        if not isinstance(shard, str) or shard != Path(shard).name or "\\" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise UserError.at("TW007", f"'{place / INDEX}' says that {shown_name(name)} is in {shown_name(str(shard))}, which is no safetensors file of the folder")
    return found


def _open_shard(path: Path, files: dict[Path, FileBytes]) -> list[TensorEntry]:
    def wrong(reason: str) -> UserError:
        return no_such(path, "safetensors", reason)

    file, size = opened(path)
    with file:
        _, entries = read_entries(file, size, path)
        for name, entry in entries.items():
            if len(entry.shape) > _MOST_AXES or bytes_of(entry.dtype, entry.shape) is None:
                raise wrong(f"{shown_name(name)}: an array cannot have {len(entry.shape)} axes of {list(entry.shape[:8])}{'…' if len(entry.shape) > 8 else ''}")
        files[path] = FileBytes(file, size, wrong)
    return [TensorEntry(name, entry.dtype, entry.shape, entry.begin, entry.end - entry.begin, path) for name, entry in entries.items()]
