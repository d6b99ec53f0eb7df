"""WGSL through Tint, the compiler of Dawn and Chromium: an opinion besides naga's. It checks that barriers are in uniform control flow, which naga does not."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def _device() -> tuple[Any, Any, str]:
    try:
        utils = importlib.import_module("pydawn.utils")
        webgpu = importlib.import_module("pydawn.webgpu")
        adapter = utils.request_adapter_sync(webgpu.WGPUPowerPreference_HighPerformance)
        optional = [webgpu.WGPUFeatureName_ShaderF16] if has_f16(webgpu, adapter) else []
        return utils, utils.request_device_sync(adapter, optional), ""
    except Exception as error:
        return None, None, f"Tint is not here (pip install dawn-python, and a Vulkan driver): {error}"


def has_f16(webgpu: Any, adapter: Any) -> bool:
    return bool(webgpu.wgpuAdapterHasFeature(adapter, webgpu.WGPUFeatureName_ShaderF16))


def absence() -> str:
    """Why there is no Tint; empty where there is one."""
    return _device()[2]


def problem(code: str) -> str:
    """What Tint says is wrong with a text; empty where nothing is."""
    utils, device, _ = _device()
    try:
        utils.create_shader_module(device, code)
    except RuntimeError as error:
        return str(error)
    return ""
