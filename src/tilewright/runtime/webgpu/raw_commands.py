"""The commands of a bound call by wgpu-native's own C functions. In: pipelines, bind groups, copies of wgpu-py; out: work on its queue.

wgpu-py makes an object and two records of errors for each command. A call that was bound, and whose first launch wgpu-py checked, needs none: its handles are
taken once, and errors are asked for once a call. Where this version of wgpu-py has other names inside, `find` gives None, and calls go through its objects.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

NAMES = (
    "wgpuDeviceCreateCommandEncoder", "wgpuCommandEncoderBeginComputePass", "wgpuCommandEncoderCopyBufferToBuffer", "wgpuComputePassEncoderSetPipeline",
    "wgpuComputePassEncoderSetBindGroup", "wgpuComputePassEncoderDispatchWorkgroups", "wgpuComputePassEncoderEnd", "wgpuComputePassEncoderRelease",
    "wgpuCommandEncoderFinish", "wgpuCommandEncoderRelease", "wgpuQueueSubmit", "wgpuCommandBufferRelease",
)  # fmt: skip
_NAME = "tilewright"
"""Under which wgpu-py keeps errors of a call."""

Step = tuple[Any, Any, tuple[int, int, int]]


class RawCommands:
    """The C functions, for one device."""

    def __init__(self, gpu: Any, functions: Sequence[Any], ffi: Any, errors: Any) -> None:
        self._functions, self._errors = tuple(functions), errors
        self._device, self._queue, self._null = gpu._internal, gpu.queue._internal, ffi.NULL
        self._one = ffi.new("WGPUCommandBuffer[]", 1)

    @staticmethod
    def find(gpu: Any) -> RawCommands | None:
        """The functions of wgpu-py's library; None where it has them elsewhere."""
        try:
            native = importlib.import_module("wgpu.backends.wgpu_native")
            inner = importlib.import_module("wgpu.backends.wgpu_native._api")
            errors = inner.libf._error_handler
            assert callable(errors.capture) and callable(errors.release)
            return RawCommands(gpu, [getattr(native.lib, name) for name in NAMES], native.ffi, errors)
        except (ImportError, AttributeError, AssertionError):
            return None

    def bound(self, steps: Sequence[Step], copies: Sequence[tuple[Any, int, Any, int]]) -> Callable[[], str]:
        """What gives these commands to the queue, and returns what went wrong. All objects have to stay alive."""
        create, begin, copy, set_pipeline, set_group, dispatch, end, release_pass, finish, release_encoder, submit, release_buffer = self._functions
        device, queue, null, one, capture, release = self._device, self._queue, self._null, self._one, self._errors.capture, self._errors.release
        launches = tuple((pipeline._internal, group._internal, *grid) for pipeline, group, grid in steps)
        moved = tuple((source._internal, start, target._internal, nbytes) for source, start, target, nbytes in copies)

        def commands() -> Any:
            encoder = create(device, null)
            for source, start, target, nbytes in moved:
                copy(encoder, source, start, target, start, nbytes)
            if launches:
                work = begin(encoder, null)
                last = null
                for pipeline, group, x, y, z in launches:
                    if pipeline is not last:
                        set_pipeline(work, pipeline)
                        last = pipeline
                    set_group(work, 0, group, 0, null)
                    dispatch(work, x, y, z)
                end(work)
                release_pass(work)
            made = finish(encoder, null)
            release_encoder(encoder)
            return made

        def run() -> str:
            capture(_NAME)
            try:
                one[0] = commands()
            finally:
                failed = release(_NAME)
            if failed is None:  # what is not valid must not reach the queue
                capture(_NAME)
                try:
                    submit(queue, 1, one)
                    release_buffer(one[0])
                finally:
                    failed = release(_NAME)
            return "" if failed is None else str(failed[1])

        return run
