"""The example layers, in Python and ZynML, on the CPU and in the emulator, against float64; and the transformer block made of such kernels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import tilewright as tw

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


LAYERS = load("layers").LAYERS


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_layers_against_float64(layer: object, device: str) -> None:
    for number in (1, 600, 3000) if device == "cpu" else (600,):
        inputs = layer.make(np.random.default_rng(number), number)  # type: ignore[attr-defined]
        program = layer.program  # type: ignore[attr-defined]
        found = tw.load(program).run(**inputs, device=device)[layer.result] if isinstance(program, Path) else program(  # type: ignore[attr-defined]
            *inputs.values(), device=device
        )
        wide = [x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in inputs.values()]
        expected = layer.reference(*wide)  # type: ignore[attr-defined]
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        assert np.abs(np.asarray(found, np.float64) - expected).max(initial=0) <= layer.tolerance * scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_transformer_block(device: str) -> None:
    module = load("transformer")
    rng = np.random.default_rng(3)
    weights = module.make_weights(rng, 32, 64)
    x = rng.standard_normal((2 * 9, 32)).astype(np.float32)
    found = module.block(x, weights, batch=2, heads=4, device=device)
    assert np.abs(found - module.reference(x, weights, 2, 4)).max() < 1e-5


def test_layers_are_fused() -> None:
    for name in ("residual_norm_gate", "swiglu"):
        (layer,) = (one for one in LAYERS if one.name == name)
        inputs = layer.make(np.random.default_rng(0), 1 << 17)
        for target in ("sm_90a", "sm_80", "x86-64-avx512"):
            report = layer.program.stages(*inputs.values(), target=target).fusion
            assert (report.before, report.after) == (3, 1), f"{name} for {target}"
