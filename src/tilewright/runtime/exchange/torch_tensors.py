"""How machine code reads PyTorch's tensors: through the C functions libtorch keeps stable.

In: the process, with PyTorch imported by somebody else; out: a `TensorAccess`, or None where anything is not as expected. The
place of the tensor in its object is found by looking for the address that PyTorch itself says (`_cdata`), on tensors of
several kinds, and what the functions say of them is compared with what Python says: an unknown build is served by the general
path, never by a wrong guess.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

from tilewright.base.record import record

QUESTIONS = ("data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")
_HEADER = object.__basicsize__
_WORDS = 8
"""Words at the start of a tensor's implementation that are looked at; it has many more."""
_KEY_WORDS = 22
"""Words that are looked at for the one that tells plain tensors; the smallest implementation has as many."""
_GETTER = _HEADER + 3 * 8
"""Where CPython's attribute descriptors keep the address of their definition: name, getter, setter, text, closure."""


@record
class TensorAccess:
    type: type
    offset: int
    """Of the `at::Tensor` in its Python object."""
    gradient: int
    """Of a word in what that points to, which is 0 for tensors that never had to do with gradients; 0 where none is found."""
    functions: dict[str, int]
    """Addresses of the C functions, and of the getter of `requires_grad` as `tilewright_requires_grad`."""
    stream: int
    """Address of the function that gives the current stream of a device; 0 where PyTorch is without CUDA."""
    keys: int = 0
    """Of a word in what that points to: which of PyTorch's layers the tensor passes through; 0 where none is found."""
    plain: int = 0
    """That word of tensors in host memory that are what their memory says: not conjugated, negated, sparse, or of another device."""
    inference: int = 0
    """The same of those made in inference mode."""
    gradients_on: int = 0
    """Address of the function that says whether gradients are on in this thread; 0 where there is none."""
    adopt: int = 0
    """Address of DLPack's function that makes a tensor; 0 where PyTorch has none."""


def tensor_access() -> TensorAccess | None:
    """How to read tensors; None where PyTorch is not imported or not known well enough."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor") or not hasattr(torch, "_C"):
        return None
    return _access()


@functools.cache
def _access() -> TensorAccess | None:
    torch: Any = sys.modules["torch"]
    try:
        folder = os.path.join(os.path.dirname(torch.__file__), "lib")
        library = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"))
        functions = {f"aoti_torch_get_{name}": _address(library, f"aoti_torch_get_{name}") for name in QUESTIONS}
        functions["tilewright_requires_grad"] = _getter(torch._C.TensorBase.__dict__["requires_grad"], b"requires_grad")
        examples = _examples(torch)
        offset = _offset(torch.Tensor, examples)
        if not all(_agrees(library, functions, offset, tensor) for tensor in examples):
            return None
        enabled = getattr(library, "aoti_torch_grad_mode_is_enabled", None)
        return TensorAccess(
            torch.Tensor, offset, _gradient(torch), functions, _stream_function(torch, folder), *_keys(torch),
            ctypes.cast(enabled, ctypes.c_void_p).value or 0 if enabled is not None else 0, _adopt(torch),
        )  # fmt: skip
    except (OSError, AttributeError, KeyError, ValueError, RuntimeError):
        return None


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _getter(descriptor: object, name: bytes) -> int:
    """The C function behind an attribute. Raises ValueError where it is not a plain one."""
    if type(descriptor).__name__ != "getset_descriptor":
        raise ValueError(f"{descriptor!r} is not an attribute in C")
    words = (ctypes.c_uint64 * 5).from_address(ctypes.c_uint64.from_address(id(descriptor) + _GETTER).value)
    if ctypes.string_at(words[0]) != name or words[4]:
        raise ValueError(f"{descriptor!r} is not laid out as expected")
    return int(words[1])


def _examples(torch: Any) -> list[Any]:
    whole = torch.zeros(4, 6)
    with torch.no_grad():
        return [whole, whole[1:, ::2], whole.t(), torch.empty(0, dtype=torch.int64), torch.ones((), dtype=torch.bfloat16),
                torch.zeros(2, 3, 5, requires_grad=True), torch.zeros(7, dtype=torch.bool)]  # fmt: skip


def _offset(kind: type, examples: list[Any]) -> int:
    """Where all of these have the address of what they hold."""
    places: set[int] | None = None
    for tensor in examples:
        words = (ctypes.c_uint64 * ((kind.__basicsize__ - _HEADER) // 8)).from_address(id(tensor) + _HEADER)
        found = {_HEADER + 8 * index for index, word in enumerate(words) if word == tensor._cdata}
        places = found if places is None else places & found
    if not places or len(places) != 1:
        raise ValueError("the tensor is not where it should be")
    return places.pop()


def _gradient(torch: Any) -> int:
    """The word that tells tensors with gradients: a pointer to what PyTorch keeps for them. It saves most questions."""
    plain = [torch.zeros(3), torch.empty(0), torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int32)]
    with_gradient = [torch.zeros(n, requires_grad=True) for n in (0, 3, 5)]
    with_gradient.append(with_gradient[1] * 2)

    def word(tensor: Any, index: int) -> int:
        return ctypes.c_uint64.from_address(tensor._cdata + 8 * index).value

    places = [
        index for index in range(2, _WORDS)
        if not any(word(t, index) for t in plain) and all(word(t, index) for t in with_gradient)
    ]  # fmt: skip
    return 8 * places[0] if len(places) == 1 else 0


def _keys(torch: Any) -> tuple[int, int, int]:
    """The word that tells plain tensors in host memory from all others, what it is for those, and for those made in inference mode. Zeros where not just one does."""
    whole = torch.zeros(4, 6)
    plain = [*_examples(torch), whole[1:, ::2], torch.nn.Parameter(torch.zeros(2)), torch.zeros(3, dtype=torch.complex64)]
    plain += [torch.zeros(2, dtype=getattr(torch, name)) for name in ("float64", "float16", "int8", "uint8", "int32") if hasattr(torch, name)]
    with torch.inference_mode():
        inside = [torch.zeros(3), torch.zeros(2, 5, dtype=torch.int64), torch.zeros((), dtype=torch.bfloat16)]
    complexes = torch.zeros(3, dtype=torch.complex64)
    others = [torch._neg_view(torch.zeros(3)), complexes.conj(), complexes.conj().imag, torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()]

    def word(tensor: Any, index: int) -> int:
        return ctypes.c_uint64.from_address(tensor._cdata + 8 * index).value

    found: list[tuple[int, int, int]] = []
    for index in range(2, _KEY_WORDS):
        usual, within = {word(t, index) for t in plain}, {word(t, index) for t in inside}
        if len(usual) == len(within) == 1 and not (usual | within) & {word(t, index) for t in others}:
            found.append((8 * index, usual.pop(), within.pop()))
    return found[0] if len(found) == 1 else (0, 0, 0)


def _adopt(torch: Any) -> int:
    """DLPack's function that makes a tensor of managed memory, where PyTorch offers its functions in C."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    try:
        table = pointer(capsule, b"dlpack_exchange_api")
    except (ValueError, ctypes.ArgumentError):
        return 0
    # A version of two numbers, an older table, then functions: an allocator, one from tensors, and the one to them.
    if not table or ctypes.c_uint32.from_address(table).value != 1:
        return 0
    return ctypes.c_uint64.from_address(table + 32).value


def _agrees(library: ctypes.CDLL, functions: dict[str, int], offset: int, tensor: Any) -> bool:
    """Whether the C functions say of a tensor what Python says."""
    handle, got = ctypes.c_void_p(id(tensor) + offset), ctypes.c_uint64()

    def ask(name: str) -> int:
        got.value = 0
        if getattr(library, f"aoti_torch_get_{name}")(handle, ctypes.byref(got)):
            raise ValueError(f"'{name}' of a tensor cannot be asked for")
        return got.value

    def numbers(name: str) -> tuple[int, ...]:
        start = ask(name)
        return tuple((ctypes.c_int64 * tensor.dim()).from_address(start)) if tensor.dim() else ()

    getter = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(functions["tilewright_requires_grad"])
    return (
        ask("data_ptr") == tensor.data_ptr()
        and ask("dim") == tensor.dim()
        and numbers("sizes") == tuple(tensor.shape)
        and numbers("strides") == tuple(tensor.stride())
        and ask("device_type") == 0
        and getter(tensor, None) is bool(tensor.requires_grad)
    )


def _stream_function(torch: Any, folder: str) -> int:
    if not torch.cuda.is_available():
        return 0
    library = ctypes.CDLL(os.path.join(folder, "libtorch_cuda.so"))
    return _address(library, "aoti_torch_get_current_cuda_stream")
