"""What a model file says about its network, by the names of GGUF.

In: the metadata of a GGUF file, or the `config.json` of a folder. Out: `ModelFields`: numbers and texts by name, with errors that name the field. The names
in `config.json` are other ones; `FOLDER_FIELDS` says which field each of them is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.base.errors import UserError

REQUIRED: Any = object()

FOLDER_FIELDS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon", "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.local.freq_base", "sliding_window": "attention.sliding_window", "max_position_embeddings": "context_length", "vocab_size": "vocab_size",
    "query_pre_attn_scalar": "attention.query_scalar", "sliding_window_pattern": "attention.sliding_window_pattern",
}  # fmt: skip
"""Names in `config.json`, and the fields they are."""
FOLDER_TYPES = {"gemma3_text": "gemma3"}
"""`model_type` of architectures whose name is another one."""


class ModelFields:
    """Fields of one model file. `name` is the architecture."""

    def __init__(self, metadata: Mapping[str, Any], kind: str, where: str) -> None:
        self.kind, self.where = kind, where
        self.metadata = metadata
        if kind == "gguf":
            self.name = self._text(metadata, "general.architecture")
        else:
            found = self._text(metadata, "model_type")
            self.name = FOLDER_TYPES.get(found, found)
        self._names = {field: name for name, field in FOLDER_FIELDS.items()}

    def _text(self, metadata: Mapping[str, Any], name: str) -> str:
        found = metadata.get(name)
        if not isinstance(found, str) or not found:
            raise UserError.at("TW008", f"{self.where}: the field '{name}', the architecture of the model, is {'missing' if found is None else repr(found)}")
        return found

    def shown(self, field: str) -> str:
        """The name of a field in the file."""
        return f"{self.name}.{field}" if self.kind == "gguf" else self._names.get(field, field)

    def get(self, field: str, default: Any = None) -> Any:
        found = self.metadata.get(self.shown(field))
        return default if found is None else found

    def whole(self, field: str, default: Any = REQUIRED, least: int = 1, most: int = 1 << 31) -> int:
        """A whole number within limits."""
        found = self.get(field)
        if isinstance(found, list) and found and all(f == found[0] for f in found):
            found = found[0]  # one number for each layer
        if found is None and default is not REQUIRED:
            return default  # type: ignore[no-any-return]
        if isinstance(found, bool) or not hasattr(found, "__index__"):
            raise UserError.at("TW008", f"{self.where}: the field '{self.shown(field)}' is {'missing' if found is None else repr(found)[:40]}", help="it has to be a whole number")
        value = int(found)
        if not least <= value <= most:
            raise UserError.at("TW013", f"{self.where}: the field '{self.shown(field)}' is {value}", help=f"it has to lie between {least} and {most}")
        return value

    def real(self, field: str, default: Any = REQUIRED) -> float:
        """A number above 0."""
        found = self.get(field)
        if found is None and default is not REQUIRED:
            return default  # type: ignore[no-any-return]
        try:
            value = float(found)
        except (TypeError, ValueError):
            value = -1.0
        if not 0 < value < float("inf"):
            raise UserError.at("TW008", f"{self.where}: the field '{self.shown(field)}' is {'missing' if found is None else repr(found)[:40]}", help="it has to be a number above 0")
        return value

    def text(self, field: str, default: str = "") -> str:
        found = self.get(field)
        return found if isinstance(found, str) else default
