"""Machine code that hands out device memory and wraps foreign tensors, as LLVM text.

In: a CPU target. Out: an object with CPython functions (METH_FASTCALL) on the structs of `base.memory_abi`:

    tilewright_memory_take(nbytes, stream)        a Block
    tilewright_memory_make(shape, dtype, stream)  a DeviceArray in a new block
    tilewright_memory_wrap(tensor)                a DeviceArray on the memory of a tensor whose library has DLPack's exchange functions

and `tilewright_memory_give`, the destructor of the capsule that every block holds: it puts the record back, whoever dropped the
block and when. Each function does all of its work or returns `None` having done nothing: an empty free list, an unknown stream, an
argument of another type and everything else that is rare is left to Python. All of it runs with the GIL held, which is its lock.
Between two calls of Python's API the structs are whole, since such a call may collect garbage and so come back here.
"""

from __future__ import annotations

from tilewright.base import memory_abi as m
from tilewright.base.memory_abi import ARRAY_SLOTS, BLOCK_SLOTS
from tilewright.base.target import Target
from tilewright.codegen.host import interpreter as at
from tilewright.codegen.llvm.native import compile_object

_HEADER = """
@_Py_NoneStruct = external global i8
@_Py_FalseStruct = external global i8
@PyLong_Type = external global i8
@PyTuple_Type = external global i8
@tilewright_block_type = external global i8
@tilewright_array_type = external global i8
@tilewright_zero = external global i8
@tilewright_no_items = external global i8
@tilewright_unit_strides = external global i8
@tilewright_imports = external global i8
@tilewright_streams_open = external global i8
@capsule.name = private unnamed_addr constant [{name_length} x i8] c"{name}\\00"

declare ptr @PyType_GenericAlloc(ptr, i64) nonlazybind
declare ptr @PyCapsule_New(ptr, ptr, ptr) nonlazybind
declare i32 @PyCapsule_SetContext(ptr, ptr) nonlazybind
declare ptr @PyCapsule_GetContext(ptr) nonlazybind
declare ptr @PyCapsule_GetPointer(ptr, ptr) nonlazybind
declare i64 @PyLong_AsLongLong(ptr) nonlazybind
declare ptr @PyLong_FromLongLong(i64) nonlazybind
declare ptr @PyLong_FromUnsignedLongLong(i64) nonlazybind
declare ptr @PyTuple_New(i64) nonlazybind
declare ptr @PyErr_Occurred() nonlazybind
declare void @PyErr_Clear() nonlazybind
declare void @Py_IncRef(ptr) nonlazybind
declare void @Py_DecRef(ptr) nonlazybind
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.ctlz.i64(i64, i1)
declare {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64, i64)

define internal ptr @word(ptr %base, i64 %offset) alwaysinline {{
  %place = getelementptr i8, ptr %base, i64 %offset
  %value = load ptr, ptr %place
  ret ptr %value
}}

define internal i64 @number(ptr %base, i64 %offset) alwaysinline {{
  %place = getelementptr i8, ptr %base, i64 %offset
  %value = load i64, ptr %place
  ret i64 %value
}}

define internal void @add(ptr %base, i64 %offset, i64 %change) alwaysinline {{
  %place = getelementptr i8, ptr %base, i64 %offset
  %before = load i64, ptr %place
  %after = add i64 %before, %change
  store i64 %after, ptr %place
  ret void
}}

; Bytes of a range of pieces, as a job of the thread pool: target, source, count and bytes of a piece.
define void @tilewright_memory_move(ptr %slots, i64 %begin, i64 %end) {{
  %target = load ptr, ptr %slots
  %source = call ptr @word(ptr %slots, i64 8)
  %count = call i64 @number(ptr %slots, i64 16)
  %piece = call i64 @number(ptr %slots, i64 24)
  %first = mul i64 %begin, %piece
  %last = mul i64 %end, %piece
  %over = icmp ugt i64 %last, %count
  %stop = select i1 %over, i64 %count, i64 %last
  %length = sub i64 %stop, %first
  %to = getelementptr i8, ptr %target, i64 %first
  %from = getelementptr i8, ptr %source, i64 %first
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %length, i1 false)
  ret void
}}

; A slot of a new object gets a reference of its own.
define internal void @set(ptr %object, i64 %offset, ptr %value) alwaysinline {{
  call void @Py_IncRef(ptr %value)
  %place = getelementptr i8, ptr %object, i64 %offset
  store ptr %value, ptr %place
  ret void
}}

define internal ptr @none() alwaysinline {{
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
}}

; The value of an exact integer from 0 on; -1 for anything else.
define internal i64 @natural(ptr %object) {{
  %type = call ptr @word(ptr %object, i64 {type_at})
  %exact = icmp eq ptr %type, @PyLong_Type
  br i1 %exact, label %convert, label %no
convert:
  %value = call i64 @PyLong_AsLongLong(ptr %object)
  %negative = icmp slt i64 %value, 0
  br i1 %negative, label %look, label %yes
look:
  %error = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %no, label %clear
clear:
  call void @PyErr_Clear()
  br label %no
yes:
  ret i64 %value
no:
  ret i64 -1
}}
"""

_POOL = """
define void @tilewright_memory_give(ptr %capsule) {{
  %record = call ptr @PyCapsule_GetPointer(ptr %capsule, ptr @capsule.name)
  %owner = call ptr @PyCapsule_GetContext(ptr %capsule)
  call void @give(ptr %record)
  call void @Py_DecRef(ptr %owner)
  ret void
}}

define internal void @give(ptr %record) {{
  %arena = call ptr @word(ptr %record, i64 {ARENA})
  %size = call i64 @number(ptr %record, i64 {SIZE})
  %less = sub i64 0, %size
  call void @add(ptr %arena, i64 {IN_USE}, i64 %less)
  call void @add(ptr %arena, i64 {CACHED}, i64 %size)
  call void @add(ptr %arena, i64 {RETURNED}, i64 1)
  %home = call ptr @word(ptr %record, i64 {HEAD})
  %foreign = call i64 @number(ptr %record, i64 {FOREIGN})
  %alone = icmp eq i64 %foreign, 0
  %deferred = getelementptr i8, ptr %arena, i64 {DEFERRED}
  %list = select i1 %alone, ptr %home, ptr %deferred
  %first = load ptr, ptr %list
  store ptr %first, ptr %record
  store ptr %record, ptr %list
  ret void
}}

; The free list for so many bytes on a stream, and the first record in it; null where Python has to help.
define internal ptr @pop(ptr %arena, i64 %nbytes, i64 %stream) {{
entry:
  %bypass = call i64 @number(ptr %arena, i64 {BYPASS})
  %deferred = call i64 @number(ptr %arena, i64 {DEFERRED})
  %blocked = or i64 %bypass, %deferred
  %open = icmp eq i64 %blocked, 0
  %some = icmp sgt i64 %nbytes, 0
  %limited = icmp sle i64 %nbytes, {LARGEST}
  %c1 = and i1 %open, %some
  %c2 = and i1 %c1, %limited
  br i1 %c2, label %classify, label %no
classify:
  %last = sub i64 %nbytes, 1
  %fine = icmp sle i64 %nbytes, {FINE}
  %small = udiv i64 %last, {SMALLEST}
  %zeros = call i64 @llvm.ctlz.i64(i64 %last, i1 false)
  %bits = sub i64 64, %zeros
  %shift = sub i64 60, %zeros
  %shift.safe = select i1 %fine, i64 0, i64 %shift
  %part = lshr i64 %last, %shift.safe
  %octave = sub i64 %bits, 14
  %eighths = mul i64 %octave, 8
  %offset = add i64 %part, {BIG_FIRST}
  %large = add i64 %eighths, %offset
  %index = select i1 %fine, i64 %small, i64 %large
  %pairs = getelementptr i8, ptr %arena, i64 {STREAMS}
  br label %search
search:
  %pair = phi ptr [ %pairs, %classify ], [ %following, %next ]
  %table = call ptr @word(ptr %pair, i64 8)
  %end = icmp eq ptr %table, null
  br i1 %end, label %no, label %compare
compare:
  %key = load i64, ptr %pair
  %found = icmp eq i64 %key, %stream
  br i1 %found, label %look, label %next
next:
  %following = getelementptr i8, ptr %pair, i64 16
  br label %search
look:
  %list = getelementptr ptr, ptr %table, i64 %index
  %record = load ptr, ptr %list
  %empty = icmp eq ptr %record, null
  br i1 %empty, label %no, label %take
take:
  %second = load ptr, ptr %record
  store ptr %second, ptr %list
  %size = call i64 @number(ptr %record, i64 {SIZE})
  %less = sub i64 0, %size
  call void @add(ptr %arena, i64 {CACHED}, i64 %less)
  call void @hold(ptr %arena, ptr %record)
  ret ptr %record
no:
  ret ptr null
}}

; Steps for Python, each whole while the GIL is held: take a list off, put a record on its list, add to an account.
define ptr @tilewright_memory_swap(ptr %list) {{
  %first = load ptr, ptr %list
  store ptr null, ptr %list
  ret ptr %first
}}

define void @tilewright_memory_push(ptr %record) {{
  %list = call ptr @word(ptr %record, i64 {HEAD})
  %first = load ptr, ptr %list
  store ptr %first, ptr %record
  store ptr %record, ptr %list
  ret void
}}

define void @tilewright_memory_add(ptr %account, i64 %change) {{
  call void @add(ptr %account, i64 0, i64 %change)
  ret void
}}

; A block for a record that is on no list.
define ptr @tilewright_memory_hold(ptr %record) {{
  %arena = call ptr @word(ptr %record, i64 {ARENA})
  call void @hold(ptr %arena, ptr %record)
  %made = call ptr @block(ptr %arena, ptr %record)
  ret ptr %made
}}

define ptr @tilewright_memory_find(ptr %arena, i64 %nbytes, i64 %stream) {{
  %record = call ptr @pop(ptr %arena, i64 %nbytes, i64 %stream)
  %missing = icmp eq ptr %record, null
  br i1 %missing, label %no, label %make
make:
  %made = call ptr @block(ptr %arena, ptr %record)
  ret ptr %made
no:
  %answer = call ptr @none()
  ret ptr %answer
}}

define internal void @hold(ptr %arena, ptr %record) {{
  %size = call i64 @number(ptr %record, i64 {SIZE})
  call void @add(ptr %arena, i64 {IN_USE}, i64 %size)
  call void @add(ptr %arena, i64 {TAKEN}, i64 1)
  %used = call i64 @number(ptr %arena, i64 {IN_USE})
  %peak = call i64 @number(ptr %arena, i64 {PEAK})
  %higher = icmp sgt i64 %used, %peak
  %most = select i1 %higher, i64 %used, i64 %peak
  %peak.at = getelementptr i8, ptr %arena, i64 {PEAK}
  store i64 %most, ptr %peak.at
  ret void
}}

; A block that holds a record just taken; null with an exception where Python has no memory, and then the record is back.
define internal ptr @block(ptr %arena, ptr %record) {{
  %token = call ptr @PyCapsule_New(ptr %record, ptr @capsule.name, ptr @tilewright_memory_give)
  %none = icmp eq ptr %token, null
  br i1 %none, label %return.record, label %fill
return.record:
  call void @give(ptr %record)
  ret ptr null
fill:
  %owner = call ptr @word(ptr %arena, i64 {ARENA_OBJECT})
  call void @Py_IncRef(ptr %owner)
  %ignored = call i32 @PyCapsule_SetContext(ptr %token, ptr %owner)
  %pointer = call ptr @word(ptr %record, i64 {POINTER_OBJECT})
  %size = call ptr @word(ptr %record, i64 {SIZE_OBJECT})
  %stream = call ptr @word(ptr %record, i64 {STREAM_OBJECT})
  %made = call ptr @new_block(ptr %token, ptr %owner, ptr %pointer, ptr %size, ptr %stream)
  call void @Py_DecRef(ptr %token)
  ret ptr %made
}}

define internal ptr @new_block(ptr %token, ptr %arena, ptr %pointer, ptr %size, ptr %stream) {{
  %made = call ptr @PyType_GenericAlloc(ptr @tilewright_block_type, i64 0)
  %failed = icmp eq ptr %made, null
  br i1 %failed, label %no, label %fill
fill:
  call void @set(ptr %made, i64 {block_exports}, ptr @tilewright_zero)
  call void @set(ptr %made, i64 {block_token}, ptr %token)
  call void @set(ptr %made, i64 {block_arena}, ptr %arena)
  call void @set(ptr %made, i64 {block_freed}, ptr @_Py_FalseStruct)
  call void @set(ptr %made, i64 {block_host}, ptr @tilewright_zero)
  call void @set(ptr %made, i64 {block_nbytes}, ptr %size)
  call void @set(ptr %made, i64 {block_pointer}, ptr %pointer)
  call void @set(ptr %made, i64 {block_recent}, ptr %stream)
  call void @set(ptr %made, i64 {block_stream}, ptr %stream)
  call void @set(ptr %made, i64 {block_trace}, ptr @_Py_NoneStruct)
  call void @set(ptr %made, i64 {block_users}, ptr @tilewright_no_items)
  ret ptr %made
no:
  ret ptr null
}}

; An array on a block. Takes over the references to block, shape and strides, also when it fails.
define internal ptr @new_array(ptr %device, ptr %dtype, ptr %block, ptr %shape, ptr %strides, ptr %base) {{
  %made = call ptr @PyType_GenericAlloc(ptr @tilewright_array_type, i64 0)
  %failed = icmp eq ptr %made, null
  br i1 %failed, label %drop, label %fill
fill:
  %pointer = call ptr @word(ptr %block, i64 {block_pointer})
  call void @set(ptr %made, i64 {array__pointer}, ptr %pointer)
  call void @set(ptr %made, i64 {array_base}, ptr %base)
  call void @set(ptr %made, i64 {array_device}, ptr %device)
  call void @set(ptr %made, i64 {array_dtype}, ptr %dtype)
  call void @set(ptr %made, i64 {array_form}, ptr @_Py_NoneStruct)
  call void @set(ptr %made, i64 {array_owner}, ptr %block)
  call void @set(ptr %made, i64 {array_readonly}, ptr @_Py_FalseStruct)
  call void @set(ptr %made, i64 {array_shape}, ptr %shape)
  call void @set(ptr %made, i64 {array_strides}, ptr %strides)
  br label %drop
drop:
  call void @Py_DecRef(ptr %block)
  call void @Py_DecRef(ptr %shape)
  call void @Py_DecRef(ptr %strides)
  ret ptr %made
}}

; Both functions are bound to a pair: the arena's address as an integer, and the arena object that keeps it.
define internal ptr @arena(ptr %self) alwaysinline {{
  %object = call ptr @word(ptr %self, i64 {items})
  %address = call i64 @PyLong_AsLongLong(ptr %object)
  %arena = inttoptr i64 %address to ptr
  ret ptr %arena
}}

define ptr @tilewright_memory_take(ptr %self, ptr %args, i64 %count) {{
  %two = icmp eq i64 %count, 2
  br i1 %two, label %read, label %no
read:
  %arena = call ptr @arena(ptr %self)
  %size.object = load ptr, ptr %args
  %nbytes = call i64 @natural(ptr %size.object)
  %stream.object = call ptr @word(ptr %args, i64 8)
  %stream = call i64 @natural(ptr %stream.object)
  %record = call ptr @pop(ptr %arena, i64 %nbytes, i64 %stream)
  %missing = icmp eq ptr %record, null
  br i1 %missing, label %no, label %make
make:
  %made = call ptr @block(ptr %arena, ptr %record)
  ret ptr %made
no:
  %answer = call ptr @none()
  ret ptr %answer
}}
"""

_MAKE = """
define ptr @tilewright_memory_make(ptr %self, ptr %args, i64 %count) {{
  %three = icmp eq i64 %count, 3
  br i1 %three, label %read, label %no
read:
  %arena = call ptr @arena(ptr %self)
  %shape = load ptr, ptr %args
  %shape.type = call ptr @word(ptr %shape, i64 {type_at})
  %is.tuple = icmp eq ptr %shape.type, @PyTuple_Type
  br i1 %is.tuple, label %find.dtype, label %no
find.dtype:
  %dtype = call ptr @word(ptr %args, i64 8)
  %known = call ptr @word(ptr %arena, i64 {DTYPES})
  br label %compare
compare:
  %pair = phi ptr [ %known, %find.dtype ], [ %following, %next ]
  %candidate = load ptr, ptr %pair
  %same = icmp eq ptr %candidate, %dtype
  br i1 %same, label %measure, label %other
other:
  %end = icmp eq ptr %candidate, null
  br i1 %end, label %no, label %next
next:
  %following = getelementptr i8, ptr %pair, i64 16
  br label %compare
measure:
  %itemsize = call i64 @number(ptr %pair, i64 8)
  %rank = call i64 @number(ptr %shape, i64 {tuple_size})
  %extents = getelementptr i8, ptr %shape, i64 {items}
  br label %more
more:
  %axis = phi i64 [ 0, %measure ], [ %axis.next, %multiplied ]
  %nbytes = phi i64 [ %itemsize, %measure ], [ %product, %multiplied ]
  %all = icmp eq i64 %axis, %rank
  br i1 %all, label %measured, label %extent
extent:
  %extent.at = getelementptr ptr, ptr %extents, i64 %axis
  %extent.object = load ptr, ptr %extent.at
  %value = call i64 @natural(ptr %extent.object)
  %usable = icmp sgt i64 %value, 0
  br i1 %usable, label %multiply, label %no
multiply:
  %result = call {{ i64, i1 }} @llvm.smul.with.overflow.i64(i64 %nbytes, i64 %value)
  %product = extractvalue {{ i64, i1 }} %result, 0
  %over = extractvalue {{ i64, i1 }} %result, 1
  br i1 %over, label %no, label %multiplied
multiplied:
  %axis.next = add i64 %axis, 1
  br label %more
measured:
  %stream.object = call ptr @word(ptr %args, i64 16)
  %stream = call i64 @natural(ptr %stream.object)
  %record = call ptr @pop(ptr %arena, i64 %nbytes, i64 %stream)
  %missing = icmp eq ptr %record, null
  br i1 %missing, label %no, label %make
make:
  %block = call ptr @block(ptr %arena, ptr %record)
  %block.failed = icmp eq ptr %block, null
  br i1 %block.failed, label %fail, label %make.strides
make.strides:
  %strides = call ptr @row_major(ptr %shape)
  %strides.failed = icmp eq ptr %strides, null
  br i1 %strides.failed, label %drop.block, label %make.array
drop.block:
  call void @Py_DecRef(ptr %block)
  br label %fail
make.array:
  call void @Py_IncRef(ptr %shape)
  %device = call ptr @word(ptr %arena, i64 {DEVICE_OBJECT})
  %array = call ptr @new_array(ptr %device, ptr %dtype, ptr %block, ptr %shape, ptr %strides, ptr @_Py_NoneStruct)
  ret ptr %array
fail:
  ret ptr null
no:
  %answer = call ptr @none()
  ret ptr %answer
}}

; Contiguous strides in elements of a shape of exact integers, none of them 0.
define internal ptr @row_major(ptr %shape) {{
entry:
  %rank = call i64 @number(ptr %shape, i64 {tuple_size})
  %line = icmp eq i64 %rank, 1
  br i1 %line, label %unit, label %many
unit:
  call void @Py_IncRef(ptr @tilewright_unit_strides)
  ret ptr @tilewright_unit_strides
many:
  %made = call ptr @PyTuple_New(i64 %rank)
  %failed = icmp eq ptr %made, null
  br i1 %failed, label %no, label %start
start:
  %extents = getelementptr i8, ptr %shape, i64 {items}
  %places = getelementptr i8, ptr %made, i64 {items}
  br label %loop
loop:
  %left = phi i64 [ %rank, %start ], [ %axis, %stored ]
  %step = phi i64 [ 1, %start ], [ %wider, %stored ]
  %done = icmp eq i64 %left, 0
  br i1 %done, label %yes, label %fill
fill:
  %axis = sub i64 %left, 1
  %stride = call ptr @PyLong_FromLongLong(i64 %step)
  %no.stride = icmp eq ptr %stride, null
  br i1 %no.stride, label %drop, label %stored
stored:
  %place = getelementptr ptr, ptr %places, i64 %axis
  store ptr %stride, ptr %place
  %extent.at = getelementptr ptr, ptr %extents, i64 %axis
  %extent.object = load ptr, ptr %extent.at
  %extent = call i64 @PyLong_AsLongLong(ptr %extent.object)
  %wider = mul i64 %step, %extent
  br label %loop
yes:
  ret ptr %made
drop:
  call void @Py_DecRef(ptr %made)
  ret ptr null
no:
  ret ptr null
}}
"""

# The tensor's struct: data 0, device type 8, device number 12, rank 16, type 20, shape 24, strides 32, byte offset 40.
_WRAP = """
define internal ptr @integers(i64 %count, ptr %values) {{
entry:
  %made = call ptr @PyTuple_New(i64 %count)
  %failed = icmp eq ptr %made, null
  br i1 %failed, label %no, label %start
start:
  %places = getelementptr i8, ptr %made, i64 {items}
  br label %loop
loop:
  %axis = phi i64 [ 0, %start ], [ %next, %stored ]
  %done = icmp eq i64 %axis, %count
  br i1 %done, label %yes, label %fill
fill:
  %value.at = getelementptr i64, ptr %values, i64 %axis
  %value = load i64, ptr %value.at
  %object = call ptr @PyLong_FromLongLong(i64 %value)
  %no.object = icmp eq ptr %object, null
  br i1 %no.object, label %drop, label %stored
stored:
  %place = getelementptr ptr, ptr %places, i64 %axis
  store ptr %object, ptr %place
  %next = add i64 %axis, 1
  br label %loop
yes:
  ret ptr %made
drop:
  call void @Py_DecRef(ptr %made)
  ret ptr null
no:
  ret ptr null
}}

define ptr @tilewright_memory_wrap(ptr %self, ptr %item) {{
entry:
  %tensor = alloca [48 x i8], align 8
  %work = alloca i64, align 8
  %type = call ptr @word(ptr %item, i64 {type_at})
  %entries = getelementptr i8, ptr @tilewright_imports, i64 {IMPORT_TYPES}
  br label %search
search:
  %known = phi ptr [ %entries, %entry ], [ %following, %next ]
  %candidate = load ptr, ptr %known
  %same = icmp eq ptr %candidate, %type
  br i1 %same, label %found, label %other
other:
  %end = icmp eq ptr %candidate, null
  br i1 %end, label %no, label %next
next:
  %following = getelementptr i8, ptr %known, i64 32
  br label %search
found:
  %named = load i64, ptr @tilewright_streams_open
  %no.names = icmp eq i64 %named, 0
  br i1 %no.names, label %ask.grad, label %no
ask.grad:
  %getter = call ptr @word(ptr %known, i64 24)
  %careless = icmp eq ptr %getter, null
  br i1 %careless, label %describe, label %grad
grad:
  %flag = call ptr %getter(ptr %item, ptr null)
  %no.flag = icmp eq ptr %flag, null
  br i1 %no.flag, label %clear, label %check.grad
check.grad:
  call void @Py_DecRef(ptr %flag)
  %plain = icmp eq ptr %flag, @_Py_FalseStruct
  br i1 %plain, label %describe, label %no
describe:
  %reader = call ptr @word(ptr %known, i64 8)
  %status = call i32 %reader(ptr %item, ptr %tensor)
  %fine = icmp eq i32 %status, 0
  br i1 %fine, label %place, label %clear
place:
  %kind.at = getelementptr i8, ptr %tensor, i64 8
  %kind = load i32, ptr %kind.at
  %is.cuda = icmp eq i32 %kind, 2
  %ordinal.at = getelementptr i8, ptr %tensor, i64 12
  %ordinal = load i32, ptr %ordinal.at
  %index = zext i32 %ordinal to i64
  %devices = call i64 @number(ptr @tilewright_imports, i64 {IMPORT_DEVICE_COUNT})
  %inside = icmp ult i64 %index, %devices
  %rank.at = getelementptr i8, ptr %tensor, i64 16
  %rank = load i32, ptr %rank.at
  %strides.from = call ptr @word(ptr %tensor, i64 32)
  %strided = icmp ne ptr %strides.from, null
  %c1 = and i1 %is.cuda, %inside
  %c2 = and i1 %c1, %strided
  br i1 %c2, label %ask.stream, label %no
ask.stream:
  %streams = call ptr @word(ptr %known, i64 16)
  %stream.status = call i32 %streams(i32 2, i32 %ordinal, ptr %work)
  %stream.fine = icmp eq i32 %stream.status, 0
  br i1 %stream.fine, label %check.stream, label %clear
check.stream:
  %stream = load i64, ptr %work
  %default = icmp ule i64 %stream, 1
  br i1 %default, label %find.dtype, label %no
find.dtype:
  %code.at = getelementptr i8, ptr %tensor, i64 20
  %code = load i32, ptr %code.at
  %wanted = zext i32 %code to i64
  %dtypes = call ptr @word(ptr @tilewright_imports, i64 {IMPORT_DTYPES})
  br label %dtype.search
dtype.search:
  %pair = phi ptr [ %dtypes, %find.dtype ], [ %pair.next, %dtype.next ]
  %dtype = call ptr @word(ptr %pair, i64 8)
  %dtype.end = icmp eq ptr %dtype, null
  br i1 %dtype.end, label %no, label %dtype.compare
dtype.compare:
  %key = load i64, ptr %pair
  %dtype.same = icmp eq i64 %key, %wanted
  br i1 %dtype.same, label %make, label %dtype.next
dtype.next:
  %pair.next = getelementptr i8, ptr %pair, i64 16
  br label %dtype.search
make:
  %start = load i64, ptr %tensor
  %skip = call i64 @number(ptr %tensor, i64 40)
  %address = add i64 %start, %skip
  %pointer = call ptr @PyLong_FromUnsignedLongLong(i64 %address)
  %no.pointer = icmp eq ptr %pointer, null
  br i1 %no.pointer, label %fail, label %make.block
make.block:
  %zero = getelementptr i8, ptr @tilewright_zero, i64 0
  %block = call ptr @new_block(ptr @_Py_NoneStruct, ptr @_Py_NoneStruct, ptr %pointer, ptr %zero, ptr %zero)
  call void @Py_DecRef(ptr %pointer)
  %no.block = icmp eq ptr %block, null
  br i1 %no.block, label %fail, label %make.shape
make.shape:
  %rank.wide = sext i32 %rank to i64
  %shape.from = call ptr @word(ptr %tensor, i64 24)
  %shape = call ptr @integers(i64 %rank.wide, ptr %shape.from)
  %no.shape = icmp eq ptr %shape, null
  br i1 %no.shape, label %drop.block, label %make.strides
make.strides:
  %strides = call ptr @integers(i64 %rank.wide, ptr %strides.from)
  %no.strides = icmp eq ptr %strides, null
  br i1 %no.strides, label %drop.shape, label %make.array
make.array:
  %table = call ptr @word(ptr @tilewright_imports, i64 {IMPORT_DEVICES})
  %device.at = getelementptr ptr, ptr %table, i64 %index
  %device = load ptr, ptr %device.at
  %array = call ptr @new_array(ptr %device, ptr %dtype, ptr %block, ptr %shape, ptr %strides, ptr %item)
  ret ptr %array
drop.shape:
  call void @Py_DecRef(ptr %shape)
  br label %drop.block
drop.block:
  call void @Py_DecRef(ptr %block)
  br label %fail
fail:
  ret ptr null
clear:
  call void @PyErr_Clear()
  br label %no
no:
  %answer = call ptr @none()
  ret ptr %answer
}}
"""


def memory_ir() -> str:
    """The LLVM text, for the running interpreter."""
    name = m.CAPSULE.decode()
    values: dict[str, object] = {k: v for k, v in vars(m).items() if k.isupper()}
    values.update(name=name, name_length=len(name) + 1, type_at=at.TYPE, items=at.TUPLE_ITEMS, tuple_size=at.TUPLE_SIZE)
    values.update(BIG_FIRST=m.FINE // m.SMALLEST - 8)
    for slot in BLOCK_SLOTS:
        values[f"block_{slot.lstrip('_')}"] = m.slot(BLOCK_SLOTS, slot, at.HEADER)
    for slot in ARRAY_SLOTS:
        values[f"array_{slot}"] = m.slot(ARRAY_SLOTS, slot, at.HEADER)
    return "".join(part.format_map(values) for part in (_HEADER, _POOL, _MAKE, _WRAP))


def memory_object(target: Target) -> bytes:
    """The object code for a CPU."""
    return compile_object(memory_ir(), target)
