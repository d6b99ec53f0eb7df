"""What generated code and the runtimes agree on: argument blocks and struct layouts.

**Argument block.** A kernel takes its parameters in the order `params..., sizes...`: one slot per kernel parameter (a data
pointer for a tensor, the value for a scalar), then one 64-bit integer per name in `Kernel.size_names`.

- CPU: `void entry(ptr slots, i64 begin, i64 end)`. `slots` is an array of 8-byte slots in that order (scalars in the low
  bytes). The call executes blocks `begin <= b < end` of the flattened grid (x fastest).
- GPU: the same list as ordinary kernel parameters; a tensor is a pointer, a scalar has its own type (bool as i8, f8 as i8).

**Pool.** The CPU thread pool's control block is a zeroed, 128-byte aligned struct of `POOL_BYTES`; the offsets are below.
Support code defines `tilewright_launch(pool, entry, slots, blocks, work)`, which runs a launch in the caller or through
`tilewright_pool_run(pool, entry, slots, blocks, grain)`, and `tilewright_pool_{worker,init,stop}(pool)`.

**Entry stubs** name these symbols, bound when they are loaded: `tilewright_launch`, `tilewright_pool` (the control block),
`tilewright_pool_start` (a function that starts the workers; called with the GIL held), `tilewright_numpy_api` (NumPy's function
table), `tilewright_ndarray` (its array type), `tilewright_name_out` (the string "out"), `tilewright_descr_<dtype>` (NumPy's dtype
object), `tilewright_number_<dtype>` (its type of numbers), `tilewright_interrupt_begin` and `_end` (around calls that may last, in
which Ctrl-C is heard),
`tilewright_keyboard_interrupt` (the exception), and Python's C API by its own names.
"""

STOP = "tilewright_stop"
"""The symbol of an i32 that CPU kernels look at between blocks and in loops: where it is not 0 they leave at once."""
STOP_DECLARATION = f"@{STOP} = external global i32"
NEVER_STOPS = f"@{STOP} = internal constant i32 0"
"""For code outside a Python process: nobody asks it to stop, and LLVM drops the questions."""
LAUNCH_DECLARATIONS = ("@tilewright_pool = external global i8", "declare void @tilewright_launch(ptr, ptr, ptr, i64, i64) nonlazybind")
"""For CPU kernels that hand out the blocks of others."""
LAUNCHES_ALONE = (
    "@tilewright_pool = internal global i8 0",
    """define internal void @tilewright_launch(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %work) {
  call void %entry(ptr %slots, i64 0, i64 %blocks)
  ret void
}""",
)
"""The same for code outside a Python process: blocks run where they are."""
SIGINT = 2
SLOT_BYTES = 8
RELEASE_WORK = 1 << 15
"""Elements from which on other Python threads may run meanwhile; below, letting go of the GIL costs more than it gives."""
SCRATCH_ALIGN = 64
"""Bytes every scratch array of a CPU program is aligned to."""
TAKE, GIVE = "tilewright_take", "tilewright_give"
"""The symbols of what CPU programs get scratch and local arrays from, `ptr (i64)`, and give them back to, `void (ptr)`: malloc and free outside of Python."""
STUB_ENTRY = "tilewright_call"
"""The symbol of a CPU host part's entry stub."""
FRONT = "tilewright_front"
ARRANGE = "tilewright_arrange"
"""The symbol, in every object with a stub, of a function whose `self` is a list: it calls what is first in it."""

WATCHDOG_SYMBOL = "tilewright_watchdog"
"""The variable of a GPU module that points to the word its watchdogs report to."""
WATCHDOG_MARK = 1 << 62
"""In that word: a watchdog stopped a kernel, whose number is in the upper half and whose line in the lower."""
ASSERT_MARK = 1 << 63
"""In that word: an assertion failed. From the lowest bit on: the block's linear number, the thread's, which assertion of the kernel, which
kernel of the module, each with so many bits:"""
ASSERT_BITS = (34, 10, 12, 6)
LOCAL_MEMORY = "no memory for arrays of its own, in bytes: "
"""What the text of a CPU kernel's last failure begins with where it is not an assertion: local and shared arrays found no memory. Their
bytes follow."""

FUNCTIONS_OF_POOL = "tilewright_pool_functions"
"""The symbol, in the object that starts the pool, of what it calls once the pool is loaded: `tilewright_pool_run`, `tilewright_interrupt_begin` and `_end`."""

LANES_OF_POOL = 8
"""Lanes at most that threads claim blocks from: as many lines of the cache are written for each job."""

# Offsets in the pool's control block. Each hot field has a cache line (128 bytes: two lines on x86, one on some AArch64).
POOL_GENERATION = 0
"""i32: odd while a job is open, even between jobs; workers sleep on it."""
POOL_PENDING = 128
"""i32: workers still inside the current job."""
POOL_SLEEPERS = 256
"""i32: workers asleep."""
POOL_ENTRY = 512
"""ptr: the job's function."""
POOL_SLOTS = 520
"""ptr: its argument block."""
POOL_BLOCKS = 528
"""i64: number of blocks."""
POOL_GRAIN = 536
"""i64: blocks claimed at a time."""
POOL_LANES = 544
"""i64: lanes that blocks are claimed from."""
POOL_SPIN = 640
"""i32: looks at the generation before sleeping."""
POOL_STOP = 644
"""i32: nonzero asks workers to leave."""
POOL_READY = 648
"""i32: workers started."""
POOL_LOCK = 652
"""i32: a job is running; nested or concurrent calls run inline."""
POOL_WORKERS = 656
"""i32: worker threads (the caller is one more)."""
POOL_STARTED = 660
"""i32: nonzero once the runtime has started the workers (or found that there are none to start)."""
POOL_MUTEX = 768
"""Where the system has no futex: the mutex workers sleep under (up to 64 bytes)…"""
POOL_CONDITION = 832
"""…and its condition variable (up to 64 bytes)."""
POOL_CORES = 896
"""A bit for each core that a thread of the job runs on, `POOL_CORE_BYTES` of them."""
POOL_CORE_BYTES = 128
POOL_STEERED = 7
"""Workers that are kept off the core of their caller: where there are more, one that waits for it is missed little."""
POOL_AVOIDED = 664
"""i32: the core they are kept off now, plus 1; 0: none."""
POOL_STEERING = 668
"""i32: somebody changes where workers may run; nobody waits for it."""
POOL_THREADS = 1024
"""i32 for each of them: the system's number of the thread, 0 before it has begun."""
POOL_HOMES = 1152
"""For each of them, `POOL_CORE_BYTES`: the cores that it may run on…"""
POOL_GIVENS = POOL_HOMES + POOL_STEERED * POOL_CORE_BYTES
"""…and those without the one it is kept off."""
POOL_NEXT = POOL_GIVENS + POOL_STEERED * POOL_CORE_BYTES
"""For each lane, `POOL_LANE_BYTES`: an i64, how many of its blocks are claimed."""
POOL_LANE_BYTES = 128
POOL_BYTES = POOL_NEXT + LANES_OF_POOL * POOL_LANE_BYTES

# Tensors of PyTorch in host memory (`codegen/host/tensor_entry.py`). The symbol of the table of what is known of PyTorch, and of the functions:
TENSORS = "tilewright_tensor_table"
TENSORS_CALL, TENSORS_ADOPT, TENSORS_RELEASE = "tilewright_tensors", "tilewright_adopt", "tilewright_release"
TENSOR_MOST_RANK = 8
TENSOR_MOST_DTYPES = 64
TENSOR_RESULT_BYTES = 24
"""Of a row of the table of results: NumPy's dtype, its type of numbers, DLPack's dtype. A row of zeros ends it."""
# Offsets in that table, one word each.
TENSOR_TYPE = 0
TENSOR_PARAMETER = 8
TENSOR_OFFSET = 16
"""Of the tensor in its Python object."""
TENSOR_KEYS = 24
"""Of the word, in what that points to, that says which of PyTorch's layers a tensor passes through."""
TENSOR_PLAIN = 32
"""That word of tensors in host memory that are what their memory says…"""
TENSOR_INFERENCE = 40
"""…and of those that were made in inference mode."""
TENSOR_GRADIENT = 48
"""Of a word that is 0 for tensors that never had to do with gradients; 0 where none is known."""
TENSOR_DTYPES = 56
"""Where, for each of PyTorch's dtypes by number, NumPy's dtype and the bytes of an element are; zeros for those NumPy has not."""
TENSOR_RESULTS = 64
TENSOR_ADOPT = 72
"""DLPack's function that makes a tensor; 0 where PyTorch has none."""
TENSOR_PYTHON = 80
"""The Python function that makes one."""
TENSOR_DATA, TENSOR_DIM, TENSOR_SIZES, TENSOR_STRIDES, TENSOR_DTYPE = 88, 96, 104, 112, 120
TENSOR_GRADIENTS_ON = 128
TENSOR_REQUIRES = 136
TENSOR_BYTES = 144
