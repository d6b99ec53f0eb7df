"""Machine code that lends PyTorch's tensors in host memory to entry stubs, as LLVM text.

In: a CPU target. Out: an object with three functions.

    tilewright_tensors(self, args, count, names)   a METH_FASTCALL | METH_KEYWORDS function; `self` is (stub, rest)
    tilewright_adopt(array)                        a tensor in the memory of a new array, which it keeps
    tilewright_release(managed)                    what PyTorch calls when that tensor is gone

A stub of `codegen.host.entries` reads a few fields of each array, and holds none of them after it returns. So a tensor needs no array: the fields are
written to the stack, and the stub is given their address. It must be a stub without a fallback: nobody else may see such an array. What the stub refuses,
and whatever is not recognised here (another type, a tensor that needs a gradient, one that PyTorch would compute when it is read, a dtype that NumPy has not,
an empty one), goes to `rest` with the arguments as they came, before anything was written. Results without `out=` are arrays that the stub made;
PyTorch takes over their memory through DLPack.

What is known of PyTorch lies in a table (`abi.TENSORS`) that the loader fills, so the code is the same for all its versions.
"""

from __future__ import annotations

from tilewright.base import abi
from tilewright.base.target import Target
from tilewright.codegen.host import interpreter as at
from tilewright.codegen.llvm.native import compile_object

MOST_ITEMS = 24
"""Arguments and given results up to which a call is taken."""
_FIELDS = (at.ARRAY_FLAGS + 8 + 15) // 16 * 16
"""Bytes of an array's fields, of which the flags are the last that a stub reads."""
_ITEM = _FIELDS + 16 * abi.TENSOR_MOST_RANK
"""Bytes of one tensor as an array: its fields, extents and strides."""
_MANAGED = 80
"""Bytes of DLPack's `DLManagedTensorVersioned`; extents and strides follow."""

_TEXT = f"""
@{abi.TENSORS} = external global i8
@tilewright_ndarray = external global i8
@_Py_NotImplementedStruct = external global i8
@PyTuple_Type = external global i8

declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr) nonlazybind
declare ptr @PyTuple_New(i64) nonlazybind
declare i32 @PyTuple_SetItem(ptr, i64, ptr) nonlazybind
declare ptr @PyErr_NoMemory() nonlazybind
declare void @Py_IncRef(ptr) nonlazybind
declare void @Py_DecRef(ptr) nonlazybind
declare i32 @Py_IsInitialized() nonlazybind
declare i32 @PyGILState_Ensure() nonlazybind
declare void @PyGILState_Release(i32) nonlazybind
declare ptr @malloc(i64) nonlazybind
declare void @free(ptr) nonlazybind

define internal ptr @known(i64 %offset) alwaysinline {{
  %place = getelementptr i8, ptr @{abi.TENSORS}, i64 %offset
  %value = load ptr, ptr %place
  ret ptr %value
}}

define internal i64 @known.number(i64 %offset) alwaysinline {{
  %place = getelementptr i8, ptr @{abi.TENSORS}, i64 %offset
  %value = load i64, ptr %place
  ret i64 %value
}}

define internal ptr @kind(ptr %object) alwaysinline {{
  %place = getelementptr i8, ptr %object, i64 {at.TYPE}
  %value = load ptr, ptr %place
  ret ptr %value
}}

define internal i1 @is.tensor(ptr %object) alwaysinline {{
  %type = call ptr @kind(ptr %object)
  %tensor = call ptr @known(i64 {abi.TENSOR_TYPE})
  %parameter = call ptr @known(i64 {abi.TENSOR_PARAMETER})
  %a = icmp eq ptr %type, %tensor
  %b = icmp eq ptr %type, %parameter
  %either = or i1 %a, %b
  ret i1 %either
}}

; One of PyTorch's C functions, which write their answer and return 0.
define internal i1 @ask(i64 %question, ptr %handle, ptr %got) alwaysinline {{
  %function = call ptr @known(i64 %question)
  %status = call i32 %function(ptr %handle, ptr %got)
  %fine = icmp eq i32 %status, 0
  ret i1 %fine
}}

; Whether no gradient is needed: where gradients are off, or the tensor wants none.
define internal i1 @without.gradient(ptr %tensor, ptr %inner) {{
entry:
  %offset = call i64 @known.number(i64 {abi.TENSOR_GRADIENT})
  %findable = icmp ne i64 %offset, 0
  br i1 %findable, label %look, label %mode
look:
  %place = getelementptr i8, ptr %inner, i64 %offset
  %word = load i64, ptr %place
  %plain = icmp eq i64 %word, 0
  br i1 %plain, label %yes, label %mode
mode:
  %enabled.function = call ptr @known(i64 {abi.TENSOR_GRADIENTS_ON})
  %enabled = call zeroext i1 %enabled.function()
  br i1 %enabled, label %ask, label %yes
ask:
  %getter = call ptr @known(i64 {abi.TENSOR_REQUIRES})
  %answer = call ptr %getter(ptr %tensor, ptr null)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %no, label %answered
answered:
  %false = icmp eq ptr %answer, @_Py_FalseStruct
  call void @Py_DecRef(ptr %answer)
  ret i1 %false
yes:
  ret i1 true
no:
  call void @PyErr_Clear()
  ret i1 false
}}

; The fields of an array in the memory of a tensor.
define internal i1 @lend(ptr %tensor, ptr %array) {{
entry:
  %got = alloca i64, align 8
  %offset = call i64 @known.number(i64 {abi.TENSOR_OFFSET})
  %handle = getelementptr i8, ptr %tensor, i64 %offset
  %inner = load ptr, ptr %handle
  %gone = icmp eq ptr %inner, null
  br i1 %gone, label %no, label %look
look:
  %keys.offset = call i64 @known.number(i64 {abi.TENSOR_KEYS})
  %keys.at = getelementptr i8, ptr %inner, i64 %keys.offset
  %keys = load i64, ptr %keys.at
  %plain = call i64 @known.number(i64 {abi.TENSOR_PLAIN})
  %inference = call i64 @known.number(i64 {abi.TENSOR_INFERENCE})
  %is.plain = icmp eq i64 %keys, %plain
  %is.inference = icmp eq i64 %keys, %inference
  %dense = or i1 %is.plain, %is.inference
  br i1 %dense, label %gradient, label %no
gradient:
  %free = call i1 @without.gradient(ptr %tensor, ptr %inner)
  br i1 %free, label %rank.ask, label %no
rank.ask:
  %rank.fine = call i1 @ask(i64 {abi.TENSOR_DIM}, ptr %handle, ptr %got)
  %rank = load i64, ptr %got
  %short = icmp ule i64 %rank, {abi.TENSOR_MOST_RANK}
  %rank.good = and i1 %rank.fine, %short
  br i1 %rank.good, label %dtype.ask, label %no
dtype.ask:
  %dtype.fine = call i1 @ask(i64 {abi.TENSOR_DTYPE}, ptr %handle, ptr %got)
  %dtype32 = load i32, ptr %got
  %dtype = zext i32 %dtype32 to i64
  %small = icmp ult i64 %dtype, {abi.TENSOR_MOST_DTYPES}
  %dtype.good = and i1 %dtype.fine, %small
  br i1 %dtype.good, label %dtype.look, label %no
dtype.look:
  %dtypes = call ptr @known(i64 {abi.TENSOR_DTYPES})
  %row = getelementptr {{ ptr, i64 }}, ptr %dtypes, i64 %dtype
  %descr = load ptr, ptr %row
  %size.at = getelementptr i8, ptr %row, i64 8
  %itemsize = load i64, ptr %size.at
  %unknown = icmp eq ptr %descr, null
  br i1 %unknown, label %no, label %data.ask
data.ask:
  %data.fine = call i1 @ask(i64 {abi.TENSOR_DATA}, ptr %handle, ptr %got)
  %data = load i64, ptr %got
  %somewhere = icmp ne i64 %data, 0
  %data.good = and i1 %data.fine, %somewhere
  br i1 %data.good, label %sizes.ask, label %no
sizes.ask:
  %sizes.fine = call i1 @ask(i64 {abi.TENSOR_SIZES}, ptr %handle, ptr %got)
  %sizes = load ptr, ptr %got
  br i1 %sizes.fine, label %strides.ask, label %no
strides.ask:
  %strides.fine = call i1 @ask(i64 {abi.TENSOR_STRIDES}, ptr %handle, ptr %got)
  %steps = load ptr, ptr %got
  br i1 %strides.fine, label %write, label %no
write:
  %extents = getelementptr i8, ptr %array, i64 {_FIELDS}
  %strides = getelementptr i8, ptr %array, i64 {_FIELDS + 8 * abi.TENSOR_MOST_RANK}
  br label %axis
axis:
  %left = phi i64 [ %rank, %write ], [ %at, %next ]
  %expected = phi i64 [ %itemsize, %write ], [ %further, %next ]
  %row.major = phi i1 [ true, %write ], [ %still, %next ]
  %done = icmp eq i64 %left, 0
  br i1 %done, label %finish, label %one
one:
  %at = sub i64 %left, 1
  %size.from = getelementptr i64, ptr %sizes, i64 %at
  %size = load i64, ptr %size.from
  %step.from = getelementptr i64, ptr %steps, i64 %at
  %step = load i64, ptr %step.from
  %stride = mul i64 %step, %itemsize
  %size.to = getelementptr i64, ptr %extents, i64 %at
  store i64 %size, ptr %size.to
  %stride.to = getelementptr i64, ptr %strides, i64 %at
  store i64 %stride, ptr %stride.to
  %empty = icmp eq i64 %size, 0
  br i1 %empty, label %no, label %next
next:
  ; An axis with one element may have any stride.
  %single = icmp eq i64 %size, 1
  %fits = icmp eq i64 %stride, %expected
  %good = or i1 %single, %fits
  %still = and i1 %row.major, %good
  %further = mul i64 %expected, %size
  br label %axis
finish:
  %mask = sub i64 %itemsize, 1
  %low = and i64 %data, %mask
  %aligned = icmp eq i64 %low, 0
  %aligned.flag = select i1 %aligned, i32 {at.ALIGNED}, i32 0
  %row.flag = select i1 %row.major, i32 {at.C_CONTIGUOUS}, i32 0
  %some = or i32 %aligned.flag, %row.flag
  %flags = or i32 %some, {at.WRITEABLE}
  store i64 {1 << 24}, ptr %array
  %type.at = getelementptr i8, ptr %array, i64 {at.TYPE}
  store ptr @tilewright_ndarray, ptr %type.at
  %data.at = getelementptr i8, ptr %array, i64 {at.ARRAY_DATA}
  store i64 %data, ptr %data.at
  %rank.at = getelementptr i8, ptr %array, i64 {at.ARRAY_RANK}
  %rank32 = trunc i64 %rank to i32
  store i32 %rank32, ptr %rank.at
  %shape.at = getelementptr i8, ptr %array, i64 {at.ARRAY_SHAPE}
  store ptr %extents, ptr %shape.at
  %strides.at = getelementptr i8, ptr %array, i64 {at.ARRAY_STRIDES}
  store ptr %strides, ptr %strides.at
  %descr.at = getelementptr i8, ptr %array, i64 {at.ARRAY_DESCR}
  store ptr %descr, ptr %descr.at
  %flags.at = getelementptr i8, ptr %array, i64 {at.ARRAY_FLAGS}
  store i32 %flags, ptr %flags.at
  ret i1 true
no:
  ret i1 false
}}

declare void @PyErr_Clear() nonlazybind
@_Py_FalseStruct = external global i8

define ptr @{abi.TENSORS_CALL}(ptr %self, ptr %args, i64 %count, ptr %names) {{
entry:
  %arrays = alloca [{MOST_ITEMS * _ITEM} x i8], align 16
  %items = alloca [{MOST_ITEMS} x ptr], align 16
  %results = alloca [{at.TUPLE_ITEMS + 8 * MOST_ITEMS} x i8], align 16
  %used = alloca i64, align 8
  store i64 0, ptr %used
  %named = icmp ne ptr %names, null
  br i1 %named, label %keywords, label %counted
keywords:
  %keywords.at = getelementptr i8, ptr %names, i64 {at.TUPLE_SIZE}
  %keywords.count = load i64, ptr %keywords.at
  %alone = icmp eq i64 %keywords.count, 1
  br i1 %alone, label %counted, label %rest
counted:
  %extra = phi i64 [ 0, %entry ], [ 1, %keywords ]
  %total = add i64 %count, %extra
  %few = icmp ule i64 %total, {MOST_ITEMS}
  br i1 %few, label %walk, label %rest
walk:
  %index = phi i64 [ 0, %counted ], [ %more, %placed ]
  %all = icmp uge i64 %index, %total
  br i1 %all, label %decide, label %take
take:
  %from = getelementptr ptr, ptr %args, i64 %index
  %item = load ptr, ptr %from
  %tensor = call i1 @is.tensor(ptr %item)
  br i1 %tensor, label %lend.one, label %other
lend.one:
  %lent = call ptr @next(ptr %item, ptr %arrays, ptr %used)
  %refused = icmp eq ptr %lent, null
  br i1 %refused, label %rest, label %placed
other:
  ; Several results are given as a tuple.
  %last = icmp eq i64 %index, %count
  %type = call ptr @kind(ptr %item)
  %is.tuple = icmp eq ptr %type, @PyTuple_Type
  %given.several = and i1 %last, %is.tuple
  br i1 %given.several, label %several, label %placed
several:
  %several.from = getelementptr i8, ptr %item, i64 {at.TUPLE_SIZE}
  %several.count = load i64, ptr %several.from
  %several.few = icmp ule i64 %several.count, {MOST_ITEMS}
  br i1 %several.few, label %several.copy, label %rest
several.copy:
  store i64 {1 << 24}, ptr %results
  %results.type = getelementptr i8, ptr %results, i64 {at.TYPE}
  store ptr @PyTuple_Type, ptr %results.type
  %results.size = getelementptr i8, ptr %results, i64 {at.TUPLE_SIZE}
  store i64 %several.count, ptr %results.size
  %source = getelementptr i8, ptr %item, i64 {at.TUPLE_ITEMS}
  %target = getelementptr i8, ptr %results, i64 {at.TUPLE_ITEMS}
  br label %part
part:
  %k = phi i64 [ 0, %several.copy ], [ %k.more, %part.placed ]
  %k.all = icmp uge i64 %k, %several.count
  br i1 %k.all, label %placed, label %part.take
part.take:
  %part.from = getelementptr ptr, ptr %source, i64 %k
  %part.item = load ptr, ptr %part.from
  %part.tensor = call i1 @is.tensor(ptr %part.item)
  br i1 %part.tensor, label %part.lend, label %part.placed
part.lend:
  %part.lent = call ptr @next(ptr %part.item, ptr %arrays, ptr %used)
  %part.refused = icmp eq ptr %part.lent, null
  br i1 %part.refused, label %rest, label %part.placed
part.placed:
  %part.shown = phi ptr [ %part.item, %part.take ], [ %part.lent, %part.lend ]
  %part.to = getelementptr ptr, ptr %target, i64 %k
  store ptr %part.shown, ptr %part.to
  %k.more = add i64 %k, 1
  br label %part
placed:
  %shown = phi ptr [ %item, %other ], [ %lent, %lend.one ], [ %results, %part ]
  %to = getelementptr ptr, ptr %items, i64 %index
  store ptr %shown, ptr %to
  %more = add i64 %index, 1
  br label %walk
decide:
  %lent.count = load i64, ptr %used
  %none = icmp eq i64 %lent.count, 0
  br i1 %none, label %rest, label %call
call:
  %stub.at = getelementptr i8, ptr %self, i64 {at.TUPLE_ITEMS}
  %stub = load ptr, ptr %stub.at
  call void @Py_IncRef(ptr %stub)
  %answer = call ptr @PyObject_Vectorcall(ptr %stub, ptr %items, i64 %count, ptr %names)
  call void @Py_DecRef(ptr %stub)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %error, label %answered
error:
  ret ptr null
answered:
  %not = icmp eq ptr %answer, @_Py_NotImplementedStruct
  br i1 %not, label %refuse, label %ran
refuse:
  call void @Py_DecRef(ptr %answer)
  br label %rest
ran:
  br i1 %named, label %given, label %new
given:
  %out.from = getelementptr ptr, ptr %args, i64 %count
  %out = load ptr, ptr %out.from
  %itself = icmp eq ptr %answer, %out
  br i1 %itself, label %given.done, label %given.hold
given.hold:
  call void @Py_IncRef(ptr %out)
  br label %given.done
given.done:
  ret ptr %out
new:
  %made = call ptr @tensors.of(ptr %answer)
  ret ptr %made
rest:
  %rest.at = getelementptr i8, ptr %self, i64 {at.TUPLE_ITEMS + 8}
  %path = load ptr, ptr %rest.at
  call void @Py_IncRef(ptr %path)
  %result = call ptr @PyObject_Vectorcall(ptr %path, ptr %args, i64 %count, ptr %names)
  call void @Py_DecRef(ptr %path)
  ret ptr %result
}}

; The next array on the stack in the memory of a tensor; null where there is no room, or the tensor cannot be lent.
define internal ptr @next(ptr %tensor, ptr %arrays, ptr %used) {{
entry:
  %number = load i64, ptr %used
  %room = icmp ult i64 %number, {MOST_ITEMS}
  br i1 %room, label %write, label %no
write:
  %offset = mul i64 %number, {_ITEM}
  %array = getelementptr i8, ptr %arrays, i64 %offset
  %fine = call i1 @lend(ptr %tensor, ptr %array)
  br i1 %fine, label %yes, label %no
yes:
  %more = add i64 %number, 1
  store i64 %more, ptr %used
  ret ptr %array
no:
  ret ptr null
}}

; The result of a call with tensors, from what the stub gave, which is taken over.
define internal ptr @tensors.of(ptr %value) {{
entry:
  %type = call ptr @kind(ptr %value)
  %is.tuple = icmp eq ptr %type, @PyTuple_Type
  br i1 %is.tuple, label %several, label %single
single:
  %one = call ptr @{abi.TENSORS_ADOPT}(ptr %value)
  call void @Py_DecRef(ptr %value)
  ret ptr %one
several:
  %size.at = getelementptr i8, ptr %value, i64 {at.TUPLE_SIZE}
  %size = load i64, ptr %size.at
  %result = call ptr @PyTuple_New(i64 %size)
  %no.memory = icmp eq ptr %result, null
  br i1 %no.memory, label %failed, label %walk.begin
walk.begin:
  %source = getelementptr i8, ptr %value, i64 {at.TUPLE_ITEMS}
  br label %walk
walk:
  %index = phi i64 [ 0, %walk.begin ], [ %more, %put ]
  %all = icmp uge i64 %index, %size
  br i1 %all, label %done, label %take
take:
  %from = getelementptr ptr, ptr %source, i64 %index
  %item = load ptr, ptr %from
  %made = call ptr @{abi.TENSORS_ADOPT}(ptr %item)
  %none = icmp eq ptr %made, null
  br i1 %none, label %drop, label %put
put:
  call i32 @PyTuple_SetItem(ptr %result, i64 %index, ptr %made)
  %more = add i64 %index, 1
  br label %walk
done:
  call void @Py_DecRef(ptr %value)
  ret ptr %result
drop:
  call void @Py_DecRef(ptr %result)
  br label %failed
failed:
  call void @Py_DecRef(ptr %value)
  ret ptr null
}}

define ptr @{abi.TENSORS_ADOPT}(ptr %value) {{
entry:
  %argument = alloca ptr, align 8
  %got = alloca ptr, align 8
  %type = call ptr @kind(ptr %value)
  %is.array = icmp eq ptr %type, @tilewright_ndarray
  %adopt = call ptr @known(i64 {abi.TENSOR_ADOPT})
  %possible = icmp ne ptr %adopt, null
  %table = call ptr @known(i64 {abi.TENSOR_RESULTS})
  br i1 %possible, label %which, label %ask.python
which:
  %descr.at = getelementptr i8, ptr %value, i64 {at.ARRAY_DESCR}
  %field = select i1 %is.array, ptr %descr.at, ptr %argument
  store ptr %type, ptr %argument
  %wanted = load ptr, ptr %field
  %column = select i1 %is.array, i64 0, i64 8
  br label %search
search:
  %row = phi ptr [ %table, %which ], [ %row.next, %further ]
  %row.descr = load ptr, ptr %row
  %end = icmp eq ptr %row.descr, null
  br i1 %end, label %ask.python, label %compare
compare:
  %cell = getelementptr i8, ptr %row, i64 %column
  %known = load ptr, ptr %cell
  %same = icmp eq ptr %known, %wanted
  br i1 %same, label %found, label %further
further:
  %row.next = getelementptr i8, ptr %row, i64 {abi.TENSOR_RESULT_BYTES}
  br label %search
found:
  %code.at = getelementptr i8, ptr %row, i64 16
  %code = load i32, ptr %code.at
  %rank.at = getelementptr i8, ptr %value, i64 {at.ARRAY_RANK}
  %rank.array = load i32, ptr %rank.at
  %rank32 = select i1 %is.array, i32 %rank.array, i32 0
  %rank = zext i32 %rank32 to i64
  %numbers = mul i64 %rank, 16
  %bytes = add i64 %numbers, {_MANAGED}
  %managed = call ptr @malloc(i64 %bytes)
  %exhausted = icmp eq ptr %managed, null
  br i1 %exhausted, label %no.memory, label %fill
fill:
  %data.at = getelementptr i8, ptr %value, i64 {at.ARRAY_DATA}
  %data.array = load ptr, ptr %data.at
  %data.number = getelementptr i8, ptr %value, i64 {at.FLOAT_VALUE}
  %data = select i1 %is.array, ptr %data.array, ptr %data.number
  %shape.at = getelementptr i8, ptr %value, i64 {at.ARRAY_SHAPE}
  %shape.array = load ptr, ptr %shape.at
  %sizes = getelementptr i8, ptr %managed, i64 {_MANAGED}
  %steps = getelementptr i64, ptr %sizes, i64 %rank
  br label %axis
axis:
  %left = phi i64 [ %rank, %fill ], [ %at, %one ]
  %step = phi i64 [ 1, %fill ], [ %reach, %one ]
  %done = icmp eq i64 %left, 0
  br i1 %done, label %hand.over, label %one
one:
  %at = sub i64 %left, 1
  %size.from = getelementptr i64, ptr %shape.array, i64 %at
  %size = load i64, ptr %size.from
  %size.to = getelementptr i64, ptr %sizes, i64 %at
  store i64 %size, ptr %size.to
  %step.to = getelementptr i64, ptr %steps, i64 %at
  store i64 %step, ptr %step.to
  %reach.any = mul i64 %step, %size
  %reach.none = icmp eq i64 %reach.any, 0
  %reach = select i1 %reach.none, i64 %step, i64 %reach.any
  br label %axis
hand.over:
  store i32 1, ptr %managed
  %minor.at = getelementptr i8, ptr %managed, i64 4
  store i32 0, ptr %minor.at
  %context.at = getelementptr i8, ptr %managed, i64 8
  store ptr %value, ptr %context.at
  %deleter.at = getelementptr i8, ptr %managed, i64 16
  store ptr @{abi.TENSORS_RELEASE}, ptr %deleter.at
  %flags.at = getelementptr i8, ptr %managed, i64 24
  store i64 0, ptr %flags.at
  %pointer.at = getelementptr i8, ptr %managed, i64 32
  store ptr %data, ptr %pointer.at
  %device.at = getelementptr i8, ptr %managed, i64 40
  store i64 1, ptr %device.at
  %ndim.at = getelementptr i8, ptr %managed, i64 48
  store i32 %rank32, ptr %ndim.at
  %dtype.at = getelementptr i8, ptr %managed, i64 52
  store i32 %code, ptr %dtype.at
  %sizes.at = getelementptr i8, ptr %managed, i64 56
  store ptr %sizes, ptr %sizes.at
  %steps.at = getelementptr i8, ptr %managed, i64 64
  store ptr %steps, ptr %steps.at
  %offset.at = getelementptr i8, ptr %managed, i64 72
  store i64 0, ptr %offset.at
  store ptr null, ptr %got
  call void @Py_IncRef(ptr %value)
  %status = call i32 %adopt(ptr %managed, ptr %got)
  %fine = icmp eq i32 %status, 0
  br i1 %fine, label %given, label %failed
given:
  %tensor = load ptr, ptr %got
  ret ptr %tensor
failed:
  ; Who owns the memory now, nobody says: it stays.
  ret ptr null
no.memory:
  %raised = call ptr @PyErr_NoMemory()
  ret ptr null
ask.python:
  store ptr %value, ptr %argument
  %python = call ptr @known(i64 {abi.TENSOR_PYTHON})
  %answer = call ptr @PyObject_Vectorcall(ptr %python, ptr %argument, i64 1, ptr null)
  ret ptr %answer
}}

define void @{abi.TENSORS_RELEASE}(ptr %managed) {{
entry:
  %alive = call i32 @Py_IsInitialized()
  %ended = icmp eq i32 %alive, 0
  br i1 %ended, label %leave, label %release
release:
  %state = call i32 @PyGILState_Ensure()
  %context.at = getelementptr i8, ptr %managed, i64 8
  %value = load ptr, ptr %context.at
  call void @Py_DecRef(ptr %value)
  call void @PyGILState_Release(i32 %state)
  call void @free(ptr %managed)
  br label %leave
leave:
  ret void
}}
"""


def tensor_ir() -> str:
    """The LLVM text."""
    return _TEXT


def tensor_object(target: Target) -> bytes:
    """The object code for a CPU."""
    return compile_object(tensor_ir(), target)
