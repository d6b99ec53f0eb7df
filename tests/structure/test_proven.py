"""Which gallery kernels have changed since their PTX last ran on hardware. A list to read, not a failure."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from gallery_cases import GALLERY_CASES, code_hash, proven_sizes

PROVEN = Path(__file__).parents[1] / "gpu" / "proven.json"


def test_list_what_hardware_has_not_proven() -> None:
    known = json.loads(PROVEN.read_text()) if PROVEN.exists() else {}
    for target, entries in known.items():
        assert target.startswith("sm_")
        for name, entry in entries.items():
            assert all(len(h) == 64 for h in entry["sha256"]), f"{target} {name}"
    proven = known.get("sm_90a", {})
    unproven = [
        case.name
        for case in GALLERY_CASES
        if not {code_hash(case.ptx(elements=n)) for n in proven_sizes()} <= set(proven.get(case.name, {}).get("sha256", ()))
    ]
    if unproven:
        warnings.warn(f"not proven on hardware for sm_90a: {', '.join(unproven)}; run pytest tests/gpu --record on a GPU", stacklevel=1)
