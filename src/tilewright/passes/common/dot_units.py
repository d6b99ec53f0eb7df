"""Which instruction of a CPU adds up products of bytes. In: a target; out: its name, for `dot_lanes`, or nothing.

| name | CPUs | bytes of the first factor |
|---|---|---|
| `sdot` | Arm with dot products | signed |
| `vnni` | x86 with VNNI: `vpdpbusd` | unsigned: of signed ones the sign goes to the other factor |
| `maddubs` | x86 with SSSE3 and no VNNI: `pmaddubsw`, `pmaddwd` | unsigned, and products of two must fit 16 bits, as those of 128 and 127 do |
"""

from __future__ import annotations

from tilewright.base.target import Target

UNITS = ("sdot", "vnni", "maddubs")
_VNNI = ("avx512vnni", "avxvnni")
_VNNI_CPUS = ("cascadelake", "cooperlake", "icelake", "rocketlake", "tigerlake", "sapphirerapids", "emeraldrapids", "graniterapids", "alderlake", "znver4", "znver5")

_SDOT_CPUS = ("neoverse-n1", "neoverse-v1")


def dot_unit(target: Target) -> str:
    """The best one the CPU has."""
    if target.simt:
        return ""
    features = target.cpu_features.split(",")
    if target.triple.startswith("aarch64"):
        return "sdot" if "+dotprod" in features or target.cpu in _SDOT_CPUS else ""
    if not target.triple.startswith("x86_64") or target.name == "x86-64" or target.vector_bytes < 16:
        return ""
    # What a host says of itself counts; targets that are only named have the features of their CPU.
    named = target.cpu.startswith(_VNNI_CPUS) and not any(f"-{feature}" in features for feature in _VNNI)
    return "vnni" if named or any(f"+{feature}" in features for feature in _VNNI) else "maddubs"
