"""The part of the CUDA launcher that is the same for all kernels, as LLVM text: finding a form, and checks of a call.

What comes in and goes out is in `base.launch_abi`. `ENGINE` is all of it, with the launches of `launcher_steps`.
"""

from __future__ import annotations

from tilewright.base import launch_abi as abi
from tilewright.codegen.host.launcher_steps import RUN, WAIT

OUTSIDE = """
@_Py_NoneStruct = external global i8
@_Py_TrueStruct = external global i8
@_Py_FalseStruct = external global i8
@tilewright_zero = external global i8
@tilewright_streams_open = external global i64
@tilewright_streams_special = external global i64
@tilewright_current_stream = external global i8
@tilewright_note_use = external global i8

declare double @PyFloat_AsDouble(ptr) nonlazybind
declare i64 @PyLong_AsLongLong(ptr) nonlazybind
declare i64 @PyLong_AsUnsignedLongLong(ptr) nonlazybind
declare i64 @PyLong_AsUnsignedLongLongMask(ptr) nonlazybind
declare ptr @PyLong_FromUnsignedLongLong(i64) nonlazybind
declare ptr @PyErr_Occurred() nonlazybind
declare void @PyErr_Clear() nonlazybind
declare ptr @PyEval_SaveThread() nonlazybind
declare void @PyEval_RestoreThread(ptr) nonlazybind
declare ptr @PyTuple_New(i64) nonlazybind
declare ptr @PyTuple_GetItem(ptr, i64) nonlazybind
declare i32 @PyTuple_SetItem(ptr, i64, ptr) nonlazybind
declare ptr @PyBytes_FromStringAndSize(ptr, i64) nonlazybind
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr) nonlazybind
declare void @Py_IncRef(ptr) nonlazybind
declare void @Py_DecRef(ptr) nonlazybind
"""

_LOOK_UP = f"""
define internal i1 @same(ptr %a, ptr %b, i64 %count) {{
entry:
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %yes, label %next
next:
  %i = phi i64 [ 0, %entry ], [ %more, %equal ]
  %a.at = getelementptr i64, ptr %a, i64 %i
  %b.at = getelementptr i64, ptr %b, i64 %i
  %x = load i64, ptr %a.at
  %y = load i64, ptr %b.at
  %fits = icmp eq i64 %x, %y
  br i1 %fits, label %equal, label %no
equal:
  %more = add i64 %i, 1
  %done = icmp eq i64 %more, %count
  br i1 %done, label %yes, label %next
yes:
  ret i1 true
no:
  ret i1 false
}}

define internal i64 @hash(ptr %words, i64 %count) {{
entry:
  br label %test
test:
  %i = phi i64 [ 0, %entry ], [ %more, %next ]
  %h = phi i64 [ 7046029254386353131, %entry ], [ %mixed, %next ]
  %done = icmp eq i64 %i, %count
  br i1 %done, label %end, label %next
next:
  %at = getelementptr i64, ptr %words, i64 %i
  %word = load i64, ptr %at
  %both = xor i64 %h, %word
  %wide = mul i64 %both, -7046029254386353131
  %high = lshr i64 %wide, 29
  %mixed = xor i64 %wide, %high
  %more = add i64 %i, 1
  br label %test
end:
  ret i64 %h
}}

define internal ptr @bucket(ptr %state, ptr %keys, i64 %count) {{
  %hash = call i64 @hash(ptr %keys, i64 %count)
  %index = and i64 %hash, {abi.BUCKETS - 1}
  %buckets = getelementptr i8, ptr %state, i64 {abi.STATE_BUCKETS}
  %at = getelementptr ptr, ptr %buckets, i64 %index
  ret ptr %at
}}

define ptr @{abi.FIND}(ptr %state, ptr %keys) {{
entry:
  %count.at = getelementptr i8, ptr %state, i64 {abi.STATE_WORDS}
  %count = load i64, ptr %count.at
  %last = load ptr, ptr %state
  %fresh = icmp eq ptr %last, null
  br i1 %fresh, label %search, label %try
try:
  %last.keys.at = getelementptr i8, ptr %last, i64 {abi.FORM_KEYS}
  %last.keys = load ptr, ptr %last.keys.at
  %again = call i1 @same(ptr %last.keys, ptr %keys, i64 %count)
  br i1 %again, label %unchanged, label %search
unchanged:
  ret ptr %last
search:
  %bucket = call ptr @bucket(ptr %state, ptr %keys, i64 %count)
  br label %next
next:
  %link = phi ptr [ %bucket, %search ], [ %form, %other ]
  %form = load ptr, ptr %link
  %none = icmp eq ptr %form, null
  br i1 %none, label %missing, label %compare
compare:
  %keys.at = getelementptr i8, ptr %form, i64 {abi.FORM_KEYS}
  %its.keys = load ptr, ptr %keys.at
  %fits = call i1 @same(ptr %its.keys, ptr %keys, i64 %count)
  br i1 %fits, label %found, label %other
other:
  br label %next
found:
  store ptr %form, ptr %state
  ret ptr %form
missing:
  ret ptr null
}}

define void @{abi.INSERT}(ptr %state, ptr %form) {{
  %count.at = getelementptr i8, ptr %state, i64 {abi.STATE_WORDS}
  %count = load i64, ptr %count.at
  %keys.at = getelementptr i8, ptr %form, i64 {abi.FORM_KEYS}
  %keys = load ptr, ptr %keys.at
  %bucket = call ptr @bucket(ptr %state, ptr %keys, i64 %count)
  %first = load ptr, ptr %bucket
  store ptr %first, ptr %form
  store ptr %form, ptr %bucket
  store ptr %form, ptr %state
  ret void
}}
"""

# Whether no pair of arrays that must be apart overlaps.
_APART = f"""
define i1 @{abi.APART}(ptr %form, ptr %values) {{
entry:
  %pairs.at = getelementptr i8, ptr %form, i64 {abi.FORM_APART}
  %pairs = load ptr, ptr %pairs.at
  %count.at = getelementptr i8, ptr %form, i64 {abi.FORM_APART_COUNT}
  %count = load i64, ptr %count.at
  br label %test
test:
  %i = phi i64 [ 0, %entry ], [ %more, %next ]
  %done = icmp eq i64 %i, %count
  br i1 %done, label %yes, label %next
next:
  %offset = mul i64 %i, {abi.APART_BYTES}
  %pair = getelementptr i8, ptr %pairs, i64 %offset
  %a = load i64, ptr %pair
  %a.low.at = getelementptr i8, ptr %pair, i64 {abi.APART_FIRST_LOW}
  %a.low = load i64, ptr %a.low.at
  %a.high.at = getelementptr i8, ptr %pair, i64 {abi.APART_FIRST_HIGH}
  %a.high = load i64, ptr %a.high.at
  %b.at = getelementptr i8, ptr %pair, i64 {abi.APART_SECOND}
  %b = load i64, ptr %b.at
  %b.low.at = getelementptr i8, ptr %pair, i64 {abi.APART_SECOND_LOW}
  %b.low = load i64, ptr %b.low.at
  %b.high.at = getelementptr i8, ptr %pair, i64 {abi.APART_SECOND_HIGH}
  %b.high = load i64, ptr %b.high.at
  %a.value.at = getelementptr i64, ptr %values, i64 %a
  %a.value = load i64, ptr %a.value.at
  %b.value.at = getelementptr i64, ptr %values, i64 %b
  %b.value = load i64, ptr %b.value.at
  %a.first = add i64 %a.value, %a.low
  %a.end = add i64 %a.value, %a.high
  %b.first = add i64 %b.value, %b.low
  %b.end = add i64 %b.value, %b.high
  %before = icmp ule i64 %a.end, %b.first
  %after = icmp ule i64 %b.end, %a.first
  %apart = or i1 %before, %after
  %more = add i64 %i, 1
  br i1 %apart, label %test, label %no
yes:
  ret i1 true
no:
  ret i1 false
}}
"""

# The value in a slot becomes what the kernel takes: 1 when it did, 0 to refuse the call, 2 when there is an exception.
_SCALAR = f"""
define i32 @{abi.SCALAR}(ptr %form, i64 %index, ptr %slot, ptr %object) {{
entry:
  %arguments = alloca [2 x ptr], align 8
  %rules.at = getelementptr i8, ptr %form, i64 {abi.FORM_SCALARS}
  %rules = load ptr, ptr %rules.at
  %offset = mul i64 %index, {abi.SCALAR_BYTES}
  %rule.at = getelementptr i8, ptr %rules, i64 %offset
  %rule = load i64, ptr %rule.at
  %low.at = getelementptr i8, ptr %rule.at, i64 {abi.SCALAR_LOW}
  %high.at = getelementptr i8, ptr %rule.at, i64 {abi.SCALAR_HIGH}
  %value = load i64, ptr %slot
  %low = load i64, ptr %low.at
  %high = load i64, ptr %high.at
  switch i64 %rule, label %ask [ i64 {abi.AS_INTEGER}, label %integer i64 {abi.AS_F64}, label %yes
    i64 {abi.AS_F32}, label %narrow i64 {abi.INTEGER_AS_F64}, label %widen i64 {abi.INTEGER_AS_F32}, label %widen.narrow ]
integer:
  %not.below = icmp sge i64 %value, %low
  %not.above = icmp sle i64 %value, %high
  %fits = and i1 %not.below, %not.above
  %said = zext i1 %fits to i32
  ret i32 %said
narrow:
  %float = bitcast i64 %value to double
  br label %store.f32
widen.narrow:
  %whole = sitofp i64 %value to double
  br label %store.f32
store.f32:
  %wide = phi double [ %float, %narrow ], [ %whole, %widen.narrow ]
  %rounded = fptrunc double %wide to float
  %bits32 = bitcast float %rounded to i32
  %padded = zext i32 %bits32 to i64
  store i64 %padded, ptr %slot
  br label %yes
widen:
  %as.double = sitofp i64 %value to double
  store double %as.double, ptr %slot
  br label %yes
ask:
  %known = icmp eq i64 %value, %low
  br i1 %known, label %again, label %call
again:
  store i64 %high, ptr %slot
  br label %yes
call:
  %number = call ptr @PyLong_FromUnsignedLongLong(i64 %index)
  store ptr %number, ptr %arguments
  %second = getelementptr ptr, ptr %arguments, i64 1
  store ptr %object, ptr %second
  %function.at = getelementptr i8, ptr %form, i64 {abi.FORM_ASK}
  %function = load ptr, ptr %function.at
  %answer = call ptr @PyObject_Vectorcall(ptr %function, ptr %arguments, i64 2, ptr null)
  call void @Py_DecRef(ptr %number)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %error, label %answered
answered:
  %bits = call i64 @PyLong_AsUnsignedLongLong(ptr %answer)
  call void @Py_DecRef(ptr %answer)
  store i64 %value, ptr %low.at
  store i64 %bits, ptr %high.at
  store i64 %bits, ptr %slot
  br label %yes
yes:
  ret i32 1
error:
  ret i32 2
}}
"""

# The stream a thread named, by asking Python: 1 and the stream, 0 where it named none, 2 with an exception.
_STREAMS = f"""
define i32 @{abi.NAMED}(ptr %form, ptr %result) {{
  %arguments = alloca ptr, align 8
  %ordinal.at = getelementptr i8, ptr %form, i64 {abi.FORM_ORDINAL}
  %ordinal = load ptr, ptr %ordinal.at
  store ptr %ordinal, ptr %arguments
  %answer = call ptr @PyObject_Vectorcall(ptr @tilewright_current_stream, ptr %arguments, i64 1, ptr null)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %error, label %answered
answered:
  %none = icmp eq ptr %answer, @_Py_NoneStruct
  br i1 %none, label %unnamed, label %named
unnamed:
  call void @Py_DecRef(ptr %answer)
  ret i32 0
named:
  %handle = call i64 @PyLong_AsUnsignedLongLong(ptr %answer)
  call void @Py_DecRef(ptr %answer)
  store i64 %handle, ptr %result
  %error.set = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %error.set, null
  br i1 %fine, label %yes, label %error
yes:
  ret i32 1
error:
  ret i32 2
}}

define internal i1 @is_number(ptr %object, i64 %number) {{
  %zero = icmp eq ptr %object, @tilewright_zero
  br i1 %zero, label %plain, label %read
plain:
  %both = icmp eq i64 %number, 0
  ret i1 %both
read:
  ; Whatever number a home has that is no stream, this is no error.
  %value = call i64 @PyLong_AsUnsignedLongLongMask(ptr %object)
  %same = icmp eq i64 %value, %number
  ret i1 %same
}}

define i1 @{abi.NOTE}(ptr %block, i64 %home, i64 %recent, i64 %stream) {{
  %arguments = alloca [2 x ptr], align 8
  %home.at = getelementptr i8, ptr %block, i64 %home
  %home.stream = load ptr, ptr %home.at
  %at.home = call i1 @is_number(ptr %home.stream, i64 %stream)
  br i1 %at.home, label %known, label %look
look:
  %recent.at = getelementptr i8, ptr %block, i64 %recent
  %recent.stream = load ptr, ptr %recent.at
  %before = call i1 @is_number(ptr %recent.stream, i64 %stream)
  br i1 %before, label %known, label %note
note:
  store ptr %block, ptr %arguments
  %handle = call ptr @PyLong_FromUnsignedLongLong(i64 %stream)
  %second = getelementptr ptr, ptr %arguments, i64 1
  store ptr %handle, ptr %second
  %answer = call ptr @PyObject_Vectorcall(ptr @tilewright_note_use, ptr %arguments, i64 2, ptr null)
  call void @Py_DecRef(ptr %handle)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %error, label %noted
noted:
  call void @Py_DecRef(ptr %answer)
  br label %known
known:
  ret i1 true
error:
  ret i1 false
}}
"""

ENGINE = "\n".join((OUTSIDE, _LOOK_UP, _APART, _SCALAR, _STREAMS, RUN, WAIT))
