"""Records in JSON files, of which nothing is believed: no names twice, no numbers JSON has not, no depth without end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import opened, shown_name

MOST_BYTES = 1 << 28
"""Bytes of a file of JSON: far more than vocabularies have."""


def read_json(path: Path) -> dict[str, Any]:
    """The record in a JSON file. Raises `UserError`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"it has {shown_name(name)} twice")
        return made

    file, size = opened(path)
    with file:
        if size > MOST_BYTES:
            raise UserError.at("TW007", f"file '{path}' has {size} bytes, more than {MOST_BYTES}")
        try:
            value = json.loads(file.read().decode("utf-8"), object_pairs_hook=once)
        except UnicodeDecodeError:
            raise UserError.at("TW007", f"file '{path}' is not UTF-8") from None
        except ValueError as error:
            raise UserError.at("TW007", f"file '{path}' is no JSON: {error}") from None
        except RecursionError:
            raise UserError.at("TW007", f"file '{path}' is no JSON: it is nested too deep") from None
    if not isinstance(value, dict):
        raise UserError.at("TW007", f"file '{path}' holds no record")
    return value
