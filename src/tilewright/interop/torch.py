"""Kernels as operators of PyTorch: `op = tw.torch_op(kernel)`.

In: a kernel, and optionally how its gradients are computed. Out: an operator registered with `torch.library`, for CPU and CUDA
tensors: it works eagerly, under `torch.compile(fullgraph=True)` (the shapes of its results are known without running it, symbolic
ones too), inside CUDA graphs, and with autograd where it has a backward; where it has none, a backward through it raises. Tensors are shared, not copied; results are allocated by
PyTorch. PyTorch is loaded when the first operator is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.forks import fork_safe_rlock
from tilewright.execute.calls import shape_rules
from tilewright.execute.calls.in_place import refuse_function
from tilewright.execute.calls.shape_rules import OutputForm
from tilewright.execute.devices import default_device
from tilewright.execute.kernel import Kernel
from tilewright.runtime.exchange import imports
from tilewright.runtime.exchange.foreign_arrays import torch_dtype

_SCHEMA: dict[type | None, str] = {None: "Tensor", float: "float", int: "SymInt", bool: "bool"}
_DTYPES = {
    "bool": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}  # fmt: skip

_MOST_FORMS = 256

_lock = fork_safe_rlock()
_libraries: dict[str, Any] = {}
_made: dict[str, tuple[object, object, Any]] = {}


def torch_op(kernel: Kernel[..., Any], name: str | None = None, backward: Any = None, setup_context: Any = None) -> Any:
    """The kernel as an operator of PyTorch, `torch.ops.<library>.<name>`.

    `name` is "library::operator", by default "tilewright::" and the kernel's name. Parameters annotated `float`, `int` or `bool` are
    numbers, all others tensors. `backward` makes it differentiable: a function `backward(context, *gradients)` as
    `torch.library.register_autograd` takes it (with `setup_context`, or the inputs are saved as `context.saved_tensors` and
    `context.numbers`), or a kernel that takes the operator's arguments and then one gradient per result, and returns one gradient per
    tensor argument.
    """
    if not isinstance(kernel, Kernel):
        raise UserError.at("TW009", f"a {type(kernel).__name__} is no kernel", help="decorate the function with @tw.kernel")
    refuse_function(kernel.function, "and operators of PyTorch made here only return tensors", "call the kernel itself with tensors")
    torch = _torch()
    full = name or f"tilewright::{kernel.__name__}"
    if not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", full):
        raise UserError.at("TW016", f"name={full!r} is no name of an operator", help="use 'library::operator'")
    with _lock:
        known = _made.get(full)
        if known is not None:
            if known[0] is kernel and known[1] is backward:
                return known[2]
            raise UserError.at("TW016", f"there is an operator '{full}' already", help="choose another name=")
        made = _Operator(torch, kernel, full).register(backward, setup_context)
        _made[full] = (kernel, backward, made)
        return made


def _torch() -> Any:
    try:
        import torch
        import torch.library
    except ImportError as error:
        raise DeviceError.at("TW030", f"PyTorch cannot be imported: {error}", help="pip install torch") from error
    return torch


class _Operator:
    """One kernel on its way to become an operator."""

    def __init__(self, torch: Any, kernel: Kernel[..., Any], name: str) -> None:
        self.torch, self.kernel, self.name = torch, kernel, name
        self.function = kernel.function
        self.kinds = [shape_rules.number_type(param) for param in self.function.params]
        self.count = shape_rules.result_count(self.function)
        self.known: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Any]]] = {}
        self.narrow = {getattr(torch, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)}
        """Dtypes NumPy does not have."""

    def schema(self) -> str:
        given = ", ".join(f"{_SCHEMA[kind]} {param.name}" for kind, param in zip(self.kinds, self.function.params, strict=True))
        return f"({given}) -> {'Tensor' if self.count == 1 else '(' + ', '.join(['Tensor'] * self.count) + ')'}"

    def register(self, backward: Any, setup_context: Any) -> Any:
        torch = self.torch
        namespace, operator = self.name.split("::")
        if hasattr(getattr(torch.ops, namespace), operator):
            raise UserError.at("TW016", f"there is an operator '{self.name}' already", help="choose another name=")
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library.define(operator + self.schema(), tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(operator, self.on_cpu, "CPU")
        library.impl(operator, self.on_cuda, "CUDA")
        torch.library.register_fake(self.name, self.fake, lib=library)
        chosen, setup = self.gradients(backward, setup_context) if backward is not None else (self.no_gradients, None)
        torch.library.register_autograd(self.name, chosen, setup_context=setup, lib=library)
        return getattr(getattr(torch.ops, namespace), operator)

    # -- results ------------------------------------------------------------------------------------------------

    def forms(self, arguments: Sequence[Any]) -> list[tuple[tuple[Any, ...], Any]]:
        """Shape and dtype of each result."""
        given = [
            OutputForm(torch_dtype(value), tuple(value.shape)) if kind is None else value
            for kind, value in zip(self.kinds, arguments, strict=True)
        ]
        return [(form.shape, self.torch_dtype(form.dtype)) for form in shape_rules.results(self.function, given)]

    def place(self, arguments: Sequence[Any]) -> Any:
        """The device of all tensors."""
        found: Any = None
        for kind, value in zip(self.kinds, arguments, strict=True):
            if kind is None and value.device != (found := found or value.device):
                raise UserError.at(
                    "TW009", f"{self.name} was given tensors on {found} and {value.device}", self.function.span, "move them to one device"
                )
        if found is None:
            raise UserError.at("TW008", f"{self.name} has no tensor argument, so nothing says where it runs", self.function.span)
        return found

    def outputs(self, arguments: Sequence[Any]) -> list[Any]:
        """New tensors for the results of a call, on the device of its arguments. Forms seen before are not worked out again."""
        place = self.place(arguments)
        key = tuple(
            (value.dtype, value.shape) if kind is None else (kind if kind is float else value)
            for kind, value in zip(self.kinds, arguments, strict=True)
        )
        forms = self.known.get(key)
        if forms is None:
            if len(self.known) >= _MOST_FORMS:
                self.known.clear()
            forms = self.known[key] = self.forms(arguments)
        return [self.torch.empty(shape, dtype=dtype, device=place) for shape, dtype in forms]

    def torch_dtype(self, dtype: DType) -> Any:
        found = getattr(self.torch, _DTYPES.get(dtype.name, ""), None)
        if found is None:
            raise UserError.at("TW009", f"{self.name} returns an array of {dtype}, which PyTorch does not have", self.function.span)
        return found

    def fake(self, *arguments: Any) -> Any:
        """The results as PyTorch's tensors without memory: what it plans with. Sizes may be symbols."""
        place = self.place(arguments)
        return self.returned([self.torch.empty(shape, dtype=dtype, device=place) for shape, dtype in self.forms(arguments)])

    def returned(self, tensors: list[Any]) -> Any:
        return tensors[0] if self.count == 1 else tuple(tensors)

    # -- running ------------------------------------------------------------------------------------------------

    def on_cpu(self, *arguments: Any) -> Any:
        made = self.outputs(arguments)
        shared = [self.on_host(_plain(value)) if kind is None else value for kind, value in zip(self.kinds, arguments, strict=True)]
        targets = [self.on_host(tensor) for tensor in made]
        out = targets[0] if self.count == 1 else tuple(targets)
        if self.kernel.device is None and default_device() == "cpu":
            self.kernel(*shared, out=out)
        else:
            self.kernel(*shared, out=out, device="cpu")
        return self.returned(made)

    def on_host(self, tensor: Any) -> Any:
        """A tensor's memory as a NumPy array."""
        return imports.from_dlpack(tensor) if tensor.dtype in self.narrow else tensor.numpy()

    def on_cuda(self, *arguments: Any) -> Any:
        made = self.outputs(arguments)
        values = [_plain(value) if kind is None else value for kind, value in zip(self.kinds, arguments, strict=True)]
        self.kernel(*values, out=made[0] if self.count == 1 else tuple(made))
        return self.returned(made)

    # -- gradients ----------------------------------------------------------------------------------------------

    def no_gradients(self, ctx: Any, *gradients: Any) -> Any:
        """The backward of an operator that was given none. PyTorch's own would leave gradients out and say nothing."""
        raise UserError.at(
            "TW016", f"{self.name} has no backward, and a gradient is asked for that goes through it", self.function.span,
            "give tw.torch_op(..., backward=...), or call it under torch.no_grad() or with tensor.detach()",
        )  # fmt: skip

    def gradients(self, backward: Any, setup_context: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if isinstance(backward, Kernel):
            if setup_context is not None:
                raise UserError.at("TW016", "setup_context= goes with a backward function; a kernel gets the operator's own arguments")
            return self.kernel_gradients(torch_op(backward, f"{self.name}_backward")), self.save_inputs
        if not callable(backward):
            raise UserError.at("TW009", f"backward= is a {type(backward).__name__}, not a function or a kernel")
        return backward, setup_context or self.save_inputs

    def save_inputs(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(value for kind, value in zip(self.kinds, inputs, strict=True) if kind is None))
        ctx.numbers = [value for kind, value in zip(self.kinds, inputs, strict=True) if kind is not None]

    def kernel_gradients(self, operator: Any) -> Callable[..., Any]:
        tensors = [place for place, kind in enumerate(self.kinds) if kind is None]

        def backward(ctx: Any, *gradients: Any) -> Any:
            saved, numbers = iter(ctx.saved_tensors), iter(ctx.numbers)
            inputs = [next(saved) if kind is None else next(numbers) for kind in self.kinds]
            found = operator(*inputs, *(gradient.contiguous() for gradient in gradients))
            several = found if isinstance(found, tuple | list) else (found,)
            if len(several) != len(tensors):
                raise UserError.at(
                    "TW016", f"the backward of {self.name} returns {len(several)} array(s), but {len(tensors)} of its arguments are tensors"
                )
            result: list[Any] = [None] * len(self.kinds)
            for place, gradient in zip(tensors, several, strict=True):
                result[place] = gradient
            return tuple(result)

        return backward


def _plain(tensor: Any) -> Any:
    """The tensor without its history, which is PyTorch's affair; views that negate when read are made real."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_neg() if tensor.is_neg() else tensor
