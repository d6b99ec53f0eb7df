"""`tw.models`: load a model from a file, and what architectures there are.

    model = tw.models.load("model.gguf", device="auto")
    for piece in model.generate("Once upon a time", tokens=200): print(piece, end="")

`register` adds an architecture: a function of a `Network` that gives its last hidden rows (docs/add-a-model.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute.devices import default_device, find_device
from tilewright.models.architectures.gemma3 import gemma3
from tilewright.models.architectures.llama import llama
from tilewright.models.architectures.qwen import qwen2, qwen3
from tilewright.models.encoder import SentenceEncoder
from tilewright.models.fields import ModelFields
from tilewright.models.folders import folder_names
from tilewright.models.formats.gguf import open_gguf
from tilewright.models.formats.model_file import ModelFile
from tilewright.models.formats.safetensors import open_folder
from tilewright.models.language_model import LanguageModel
from tilewright.models.weights import ModelWeights, Progress

_DECODERS: dict[str, Callable[..., Any]] = {"gemma3": gemma3, "llama": llama, "mistral": llama, "qwen2": qwen2, "qwen3": qwen3}
_ENCODERS = ("bert",)


def architectures() -> tuple[str, ...]:
    """The architectures that can be loaded."""
    return tuple(sorted((*_DECODERS, *_ENCODERS)))


def register(name: str, describe: Callable[..., Any]) -> None:
    """Another decoder: `describe(net, ids, position)` gives the last hidden rows, and files say `name` for their architecture."""
    if name in architectures():
        raise UserError.at("TW016", f"there is an architecture '{name}' already")
    _DECODERS[name] = describe


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """A GGUF file, or a folder with safetensors."""
    return open_folder(path) if Path(path).is_dir() else open_gguf(path)


def load(path: str | os.PathLike[str], device: str | None = None, *, context: int | None = None, cache: Any = None, activations: str | None = None, progress: Progress | None = None) -> Any:
    """The model of a GGUF file or of a folder with `config.json` and safetensors, on a device.

    `context` is how many tokens a text may have. `cache` is the dtype of keys and values (f16 on GPUs, f32 elsewhere). `activations="q8"` rounds what packed weights are multiplied
    with to eight bits, `"exact"` does not; CPUs round unless told otherwise, other devices do not. `progress(done, total)` is told the bytes of weights on the device.
    """
    file = open_model(path)
    fields = ModelFields(file.metadata, file.kind, Path(file.path).name)
    known = architectures()
    if fields.name not in known:
        raise UserError.at("TW005", f"{fields.where}: the architecture is '{fields.name}'", help=f"these are known: {', '.join(known)}")
    place = find_device(default_device() if device in (None, "auto") else str(device))
    weights = ModelWeights(file, place, folder_names(fields.name, file.tensors) if file.kind == "safetensors" else None)
    weights.load(progress)
    if fields.name in _ENCODERS:
        asked = [name for name, value in (("context", context), ("activations", activations)) if value is not None]
        if asked:
            raise UserError.at("TW016", f"{asked[0]}= does nothing for the architecture '{fields.name}': it keeps no caches", help="leave it out")
        return SentenceEncoder(file, fields, weights, place, cache)
    return LanguageModel(file, fields, weights, _DECODERS[fields.name], place, context, cache, activations)
