"""The libraries we are held against: which a run needs, and what to do when one is missing.

A benchmark without its peers says nothing, so a missing one ends the run with the command that brings it. Two may be left out:
torch.compile on the CPU, which needs a C++ compiler, and llama.cpp, which is built from source. The run says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil

NEEDED = {
    "opencl": {"pyopencl": "tilewright[opencl]"},
    "cpu": {"torch": "torch", "numba": "numba"},
    "gpu": {"torch": "torch", "triton": "triton", "cupy": "cupy-cuda13x"},
    "runtime": {"torch": "torch", "triton": "triton", "cupy": "cupy-cuda13x"},
    "zyn": {"torch": "torch"},
    "zyn-cpu": {"torch": "torch"},
    "primitives": {"torch": "torch", "triton": "triton", "cupy": "cupy-cuda13x"},
    "primitives-cpu": {"torch": "torch", "numba": "numba"},
    "scatter": {"torch": "torch", "cupy": "cupy-cuda13x"},
    "scatter-cpu": {},
    "decode-attention": {"torch": "torch"},
    "decode-attention-cpu": {"torch": "torch"},
    "decode-step": {"torch": "torch"},
    "mega": {"torch": "torch"},
    "scans": {"torch": "torch", "cupy": "cupy-cuda13x"},
    "scans-cpu": {},
    "checks-cpu": {},
    "quantised-cpu": {},
    "onnx-cpu": {"onnxruntime": "onnxruntime"},
    "random": {"torch": "torch", "cupy": "cupy-cuda13x"},
    "random-cpu": {},
    "ordered": {"torch": "torch", "triton": "triton"},
    "ordered-cpu": {},
    "models": {"torch": "torch"},
    "models-cpu": {"onnxruntime": "onnxruntime"},
    "families": {"torch": "torch"},
    "families-cpu": {"torch": "torch", "numba": "numba"},
    "host": {},
    "compile": {},
    "portable": {"wgpu": "wgpu"},
    "gemv": {"torch": "torch", "cupy": "cupy-cuda13x"},
    "simt": {"torch": "torch", "triton": "triton", "cupy": "cupy-cuda13x"},
}
"""Module and the package that has it, by kind of run."""


class PeerMissing(Exception):
    """A peer is not installed; the text says how to get it."""


def require(kind: str) -> None:
    """Raise PeerMissing when a peer of this kind of run cannot be imported."""
    missing = [package for module, package in NEEDED[kind].items() if importlib.util.find_spec(module) is None]
    if missing:
        install = f"`pip install {' '.join(missing)}`"
        # CuPy's package depends on the CUDA version, so no one command can bring it.
        how = f"`make bench`, which installs the peers, or {install}" if kind.endswith("cpu") else f"{install}, for your CUDA version"
        raise PeerMissing(
            f"the {kind} benchmarks compare with {', '.join(NEEDED[kind])}, and this Python has no {', '.join(missing)}\n"
            f"help: run {how}"
        )
    if "torch" in NEEDED[kind] and not kind.endswith("cpu"):
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise PeerMissing(
                f"the {kind} benchmarks need an NVIDIA GPU that PyTorch sees; torch {torch.__version__} sees none\n"
                "help: run them on a machine with a GPU and a CUDA build of PyTorch, or run the cpu benchmarks"
            )


def cpp_compiler() -> str | None:
    """The C++ compiler torch.compile would use, or None."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None
