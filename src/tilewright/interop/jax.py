"""Kernels as functions of JAX: `f = tw.jax_function(kernel)`.

In: a kernel, and optionally how its gradients are computed. Out: a function of JAX arrays and numbers. Called with concrete arrays
it shares their memory through DLPack and runs on their device. Inside `jax.jit` and other transformations it is a callback to the
host: the shapes of its results are computed without running it, and the kernel runs on the CPU. JAX is loaded when the first
function is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, UserError
from tilewright.execute.calls import shape_rules
from tilewright.execute.calls.in_place import refuse_function
from tilewright.execute.calls.shape_rules import OutputForm
from tilewright.execute.kernel import Kernel
from tilewright.runtime.exchange import imports
from tilewright.runtime.memory.device_array import DeviceArray


def jax_function(kernel: Kernel[..., Any], backward: Any = None) -> Callable[..., Any]:
    """The kernel as a function of JAX arrays, for use by itself and inside `jax.jit`.

    Parameters annotated `float`, `int` or `bool` are plain numbers, known when a function is traced; all others are arrays. `backward`
    makes it differentiable with respect to the arrays: a function, or a kernel, that takes the arguments and then one gradient per
    result, and returns one gradient per array argument.
    """
    if not isinstance(kernel, Kernel):
        raise UserError.at("TW009", f"a {type(kernel).__name__} is no kernel", help="decorate the function with @tw.kernel")
    if backward is not None and not callable(backward):
        raise UserError.at("TW009", f"backward= is a {type(backward).__name__}, not a function or a kernel")
    refuse_function(kernel.function, "and arrays of JAX never change", "return the new array, and donate the old one to jax.jit")
    made = _Function(_jax(), kernel)
    if backward is None:
        return functools.wraps(kernel.python)(lambda *arguments: made.call(*arguments))
    gradients = jax_function(backward) if isinstance(backward, Kernel) else backward
    return functools.wraps(kernel.python)(made.differentiable(gradients))


def _jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise DeviceError.at("TW030", f"JAX cannot be imported: {error}", help="pip install jax") from error
    return jax


class _Function:
    """One kernel on its way to become a function of JAX."""

    def __init__(self, jax: Any, kernel: Kernel[..., Any]) -> None:
        self.jax, self.kernel = jax, kernel
        self.function = kernel.function
        self.kinds = [shape_rules.number_type(param) for param in self.function.params]
        self.count = shape_rules.result_count(self.function)

    def call(self, *arguments: Any) -> Any:
        if len(arguments) != len(self.kinds):
            names = ", ".join(param.name for param in self.function.params)
            raise UserError.at(
                "TW016", f"{self.function.name} takes {len(self.kinds)} argument(s) ({names}), got {len(arguments)}", self.function.span
            )
        for kind, value, param in zip(self.kinds, arguments, self.function.params, strict=True):
            if kind is not None and isinstance(value, self.jax.core.Tracer):
                raise UserError.at(
                    "TW009", f"'{param.name}' of {self.function.name} is a number, and its value is not known while JAX traces",
                    self.function.span, "give a Python number, or make it a static argument of jax.jit",
                )  # fmt: skip
        arrays = [value for kind, value in zip(self.kinds, arguments, strict=True) if kind is None]
        if any(isinstance(value, self.jax.core.Tracer) for value in arrays):
            return self.traced(arguments, arrays)
        return self.concrete(arguments)

    def concrete(self, arguments: tuple[Any, ...]) -> Any:
        """With the arrays' own memory, on their device."""
        shared = [imports.from_dlpack(value) if kind is None else value for kind, value in zip(self.kinds, arguments, strict=True)]
        found: Any = self.kernel(*shared)
        several = found if isinstance(found, tuple) else (found,)
        made = tuple(self.as_jax(item) for item in several)
        return made[0] if self.count == 1 else made

    def as_jax(self, item: Any) -> Any:
        if isinstance(item, DeviceArray):
            return self.jax.dlpack.from_dlpack(item)
        return self.jax.numpy.asarray(item)

    def traced(self, arguments: tuple[Any, ...], arrays: list[Any]) -> Any:
        """As a callback to the host, with results of known shapes."""
        forms = [
            OutputForm(_dtype(value), tuple(value.shape)) if kind is None else value
            for kind, value in zip(self.kinds, arguments, strict=True)
        ]
        made = shape_rules.results(self.function, forms)
        shapes = [self.jax.ShapeDtypeStruct(form.shape, form.dtype.numpy) for form in made]
        fixed = [None if kind is None else value for kind, value in zip(self.kinds, arguments, strict=True)]

        def run(*values: Any) -> Any:
            given = iter(values)
            call = [np.asarray(next(given)) if kind is None else value for kind, value in zip(self.kinds, fixed, strict=True)]
            found: Any = self.kernel(*call, device="cpu")
            several = found if isinstance(found, tuple) else (found,)
            ready = tuple(np.asarray(item) for item in several)
            return ready[0] if self.count == 1 else ready

        return self.jax.pure_callback(run, shapes[0] if self.count == 1 else tuple(shapes), *arrays, vmap_method="sequential")

    def differentiable(self, gradients: Callable[..., Any]) -> Callable[..., Any]:
        places = [place for place, kind in enumerate(self.kinds) if kind is None]
        numbers = tuple(place for place, kind in enumerate(self.kinds) if kind is not None)
        wrapped = self.jax.custom_vjp(self.call, nondiff_argnums=numbers)

        def forward(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
            return self.call(*arguments), tuple(arguments[place] for place in places)

        def backward(*given: Any) -> tuple[Any, ...]:
            fixed, (saved, cotangents) = given[: len(numbers)], given[len(numbers) :]
            values, constants = iter(saved), iter(fixed)
            inputs = [next(values) if kind is None else next(constants) for kind in self.kinds]
            several = cotangents if isinstance(cotangents, tuple) else (cotangents,)
            found = gradients(*inputs, *several)
            result = found if isinstance(found, tuple) else (found,)
            if len(result) != len(places):
                raise UserError.at(
                    "TW016",
                    f"the backward of {self.function.name} returns {len(result)} array(s), but {len(places)} of its arguments are arrays",
                )
            return tuple(result)

        wrapped.defvjp(forward, backward)
        return lambda *arguments: wrapped(*arguments)


def _dtype(value: Any) -> dtypes.DType:
    found = dtypes.from_numpy(np.dtype(value.dtype))
    if found is None:
        raise UserError.at("TW009", f"arrays of {value.dtype} are not supported")
    return found
