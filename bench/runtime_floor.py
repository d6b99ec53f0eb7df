"""The least a launch can cost: a loop in machine code that calls cuLaunchKernel with ready arguments, and nothing else.

In: a loaded program and what a call gave it; out: a function that launches its kernel so many times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from tilewright.base.target import host_cpu
from tilewright.codegen.llvm.native import compile_object
from tilewright.runtime.core.objects import ObjectCode
from tilewright.runtime.cuda.program import CudaProgram

_LOOP = """
define i32 @launch_loop(ptr %launch, ptr %function, i32 %blocks, i32 %threads, ptr %pointers, i64 %count) {
entry:
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %more, %next ]
  %status = call i32 %launch(ptr %function, i32 %blocks, i32 1, i32 1, i32 %threads, i32 1, i32 1, i32 0, ptr null,
    ptr %pointers, ptr null)
  %more = add i64 %i, 1
  %again = icmp ult i64 %more, %count
  br i1 %again, label %next, label %end
end:
  ret i32 %status
}

define i32 @no_launch(ptr %function, i32 %x, i32 %y, i32 %z, i32 %a, i32 %b, i32 %c, i32 %shared, ptr %stream,
    ptr %pointers, ptr %extra) {
  ret i32 0
}
"""


class Floor:
    """Launches the first kernel of a program with the given words as parameters."""

    def __init__(self, program: CudaProgram, words: Sequence[int], blocks: int) -> None:
        self._code = ObjectCode(compile_object(_LOOP, host_cpu(), opt=1))
        self.no_launch = self._code.address("no_launch")
        launch = program.artifact.launches[0]
        self._values = (ctypes.c_uint64 * len(words))(*words)
        start = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(words))(*[start + 8 * i for i in range(len(words))])
        word, pointer = ctypes.c_uint32, ctypes.c_void_p
        loop = ctypes.PYFUNCTYPE(word, pointer, pointer, word, word, pointer, ctypes.c_int64)(self._code.address("launch_loop"))
        address = program.device.driver.address("cuLaunchKernel")
        function = program.function_address(launch.entry)

        def run(count: int) -> None:
            status = loop(address, function, blocks, launch.threads, ctypes.addressof(self._pointers), count)
            assert status == 0, f"cuLaunchKernel gave {status}"

        self.run: Callable[[int], None] = run
