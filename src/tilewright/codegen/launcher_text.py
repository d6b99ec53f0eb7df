"""The part of the CUDA launcher that is the same for all kernels, as LLVM text: finding a form and running it.

What comes in and goes out is in `base.launch_abi`. Everything happens on the stack of the call, so threads do not meet; the lock of
the interpreter is held but for the driver's launches themselves, which wait when the device's queue is full.
"""

from __future__ import annotations

from tilewright.base import launch_abi as abi

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
  %value = call i64 @PyLong_AsUnsignedLongLong(ptr %object)
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

# Runs the steps of a form; false when there is an exception. Results were made before, so all that can go wrong is memory for
# scratch, the encoding of maps and the launches.
_RUN = f"""
define internal ptr @set_of(ptr %form, ptr %addresses, ptr %number) {{
  %count.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_COUNT}
  %count = load i64, ptr %count.at
  %hash = call i64 @hash(ptr %addresses, i64 %count)
  %set = and i64 %hash, {abi.MAP_SETS - 1}
  store i64 %set, ptr %number
  %entry.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_ENTRY}
  %entry.bytes = load i64, ptr %entry.at
  %index = mul i64 %set, {abi.MAP_WAYS}
  %offset = mul i64 %index, %entry.bytes
  %table.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_TABLE}
  %table = load ptr, ptr %table.at
  %first = getelementptr i8, ptr %table, i64 %offset
  ret ptr %first
}}

define internal ptr @find_maps(ptr %form, ptr %addresses, ptr %number) {{
entry:
  %first = call ptr @set_of(ptr %form, ptr %addresses, ptr %number)
  %count.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_COUNT}
  %count = load i64, ptr %count.at
  %bytes.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_ENTRY}
  %bytes = load i64, ptr %bytes.at
  %start.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_START}
  %start = load i64, ptr %start.at
  br label %next
next:
  %way = phi i64 [ 0, %entry ], [ %more, %other ]
  %offset = mul i64 %way, %bytes
  %candidate = getelementptr i8, ptr %first, i64 %offset
  %fits = call i1 @same(ptr %candidate, ptr %addresses, i64 %count)
  br i1 %fits, label %found, label %other
other:
  %more = add i64 %way, 1
  %done = icmp eq i64 %more, {abi.MAP_WAYS}
  br i1 %done, label %missing, label %next
found:
  %maps = getelementptr i8, ptr %candidate, i64 %start
  ret ptr %maps
missing:
  ret ptr null
}}

define internal i1 @encode(ptr %form, ptr %addresses, i64 %set) {{
entry:
  %arguments = alloca [2 x ptr], align 8
  %count.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_COUNT}
  %count = load i64, ptr %count.at
  %tuple = call ptr @PyTuple_New(i64 %count)
  %exhausted = icmp eq ptr %tuple, null
  br i1 %exhausted, label %no, label %fill
fill:
  %i = phi i64 [ 0, %entry ], [ %more, %next ]
  %done = icmp eq i64 %i, %count
  br i1 %done, label %filled, label %next
next:
  %at = getelementptr i64, ptr %addresses, i64 %i
  %address = load i64, ptr %at
  %number = call ptr @PyLong_FromUnsignedLongLong(i64 %address)
  %ignored = call i32 @PyTuple_SetItem(ptr %tuple, i64 %i, ptr %number)
  %more = add i64 %i, 1
  br label %fill
filled:
  %first = call ptr @PyLong_FromUnsignedLongLong(i64 %set)
  store ptr %first, ptr %arguments
  %second = getelementptr ptr, ptr %arguments, i64 1
  store ptr %tuple, ptr %second
  %function.at = getelementptr i8, ptr %form, i64 {abi.FORM_ENCODE}
  %function = load ptr, ptr %function.at
  %answer = call ptr @PyObject_Vectorcall(ptr %function, ptr %arguments, i64 2, ptr null)
  call void @Py_DecRef(ptr %first)
  call void @Py_DecRef(ptr %tuple)
  %failed = icmp eq ptr %answer, null
  br i1 %failed, label %no, label %yes
yes:
  call void @Py_DecRef(ptr %answer)
  ret i1 true
no:
  ret i1 false
}}

define internal void @fail(ptr %form, i64 %step, i64 %status, i64 %stream) {{
  %arguments = alloca [3 x ptr], align 8
  %a = call ptr @PyLong_FromUnsignedLongLong(i64 %step)
  %b = call ptr @PyLong_FromUnsignedLongLong(i64 %status)
  %c = call ptr @PyLong_FromUnsignedLongLong(i64 %stream)
  store ptr %a, ptr %arguments
  %second = getelementptr ptr, ptr %arguments, i64 1
  store ptr %b, ptr %second
  %third = getelementptr ptr, ptr %arguments, i64 2
  store ptr %c, ptr %third
  %function.at = getelementptr i8, ptr %form, i64 {abi.FORM_FAIL}
  %function = load ptr, ptr %function.at
  %answer = call ptr @PyObject_Vectorcall(ptr %function, ptr %arguments, i64 3, ptr null)
  call void @Py_DecRef(ptr %a)
  call void @Py_DecRef(ptr %b)
  call void @Py_DecRef(ptr %c)
  ret void
}}

define internal i32 @step(ptr %state, ptr %step, ptr %bases, ptr %pointers, i64 %stream) {{
entry:
  %config = alloca [{abi.CONFIG_BYTES} x i8], align 8
  %list.at = getelementptr i8, ptr %step, i64 {abi.STEP_PARAMETERS}
  %list = load ptr, ptr %list.at
  %count.at = getelementptr i8, ptr %step, i64 {abi.STEP_PARAMETER_COUNT}
  %count = load i64, ptr %count.at
  br label %test
test:
  %i = phi i64 [ 0, %entry ], [ %more, %next ]
  %done = icmp eq i64 %i, %count
  br i1 %done, label %launch, label %next
next:
  %place = getelementptr [2 x i64], ptr %list, i64 %i
  %base = load i64, ptr %place
  %offset.at = getelementptr i64, ptr %place, i64 1
  %offset = load i64, ptr %offset.at
  %start.at = getelementptr i64, ptr %bases, i64 %base
  %start = load i64, ptr %start.at
  %address = add i64 %start, %offset
  %pointer.at = getelementptr i64, ptr %pointers, i64 %i
  store i64 %address, ptr %pointer.at
  %more = add i64 %i, 1
  br label %test
launch:
  %function.at = getelementptr i8, ptr %step, i64 {abi.STEP_FUNCTION}
  %function = load ptr, ptr %function.at
  %attributes.at = getelementptr i8, ptr %step, i64 {abi.CONFIG_COUNT}
  %attributes = load i32, ptr %attributes.at
  %plain = icmp eq i32 %attributes, 0
  br i1 %plain, label %simple, label %extended
simple:
  %x = load i32, ptr %step
  %y.at = getelementptr i8, ptr %step, i64 4
  %y = load i32, ptr %y.at
  %z.at = getelementptr i8, ptr %step, i64 8
  %z = load i32, ptr %z.at
  %threads.at = getelementptr i8, ptr %step, i64 12
  %threads = load i32, ptr %threads.at
  %shared.at = getelementptr i8, ptr %step, i64 24
  %shared = load i32, ptr %shared.at
  %simple.at = getelementptr i8, ptr %state, i64 {abi.STATE_LAUNCH}
  %simple.launch = load ptr, ptr %simple.at
  %handle = inttoptr i64 %stream to ptr
  %status = call i32 %simple.launch(ptr %function, i32 %x, i32 %y, i32 %z, i32 %threads, i32 1, i32 1, i32 %shared, ptr %handle,
    ptr %pointers, ptr null)
  ret i32 %status
extended:
  call void @llvm.memcpy.p0.p0.i64(ptr %config, ptr %step, i64 {abi.CONFIG_BYTES}, i1 false)
  %stream.at = getelementptr i8, ptr %config, i64 {abi.CONFIG_STREAM}
  store i64 %stream, ptr %stream.at
  %extended.at = getelementptr i8, ptr %state, i64 {abi.STATE_LAUNCH_EX}
  %extended.launch = load ptr, ptr %extended.at
  %extended.status = call i32 %extended.launch(ptr %config, ptr %function, ptr %pointers, ptr null)
  ret i32 %extended.status
}}

define internal void @mark(ptr %state, ptr %form, i64 %stream) {{
  %epoch.at = getelementptr i8, ptr %state, i64 {abi.STATE_EPOCH}
  %epoch.word = load ptr, ptr %epoch.at
  %epoch = load i64, ptr %epoch.word
  %mark.at = getelementptr i8, ptr %form, i64 {abi.FORM_MARK}
  %mark = load i64, ptr %mark.at
  store i64 %epoch, ptr %mark.at
  %stream.at = getelementptr i8, ptr %form, i64 {abi.FORM_STREAM}
  %before = load i64, ptr %stream.at
  store i64 %stream, ptr %stream.at
  %same = icmp eq i64 %before, %stream
  br i1 %same, label %end, label %other
other:
  %others.at = getelementptr i8, ptr %form, i64 {abi.FORM_OTHERS}
  store i64 %mark, ptr %others.at
  br label %end
end:
  ret void
}}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define i1 @{abi.RUN}(ptr %state, ptr %form, ptr %values, i64 %stream) {{
entry:
  %bases = alloca [4 x i64], align 8
  %set = alloca i64, align 8
  %argument = alloca ptr, align 8
  %pointer.count.at = getelementptr i8, ptr %form, i64 {abi.FORM_POINTERS}
  %pointer.count = load i64, ptr %pointer.count.at
  %pointers = alloca i64, i64 %pointer.count, align 8
  %scratch.count.at = getelementptr i8, ptr %form, i64 {abi.FORM_SCRATCH_COUNT}
  %scratch.count = load i64, ptr %scratch.count.at
  %scratch = alloca i64, i64 %scratch.count, align 8
  %map.count.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_COUNT}
  %map.count = load i64, ptr %map.count.at
  %addresses = alloca i64, i64 %map.count, align 8
  %map.bytes.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_BYTES}
  %map.bytes = load i64, ptr %map.bytes.at
  %maps = alloca i8, i64 %map.bytes, align 64
  %values.number = ptrtoint ptr %values to i64
  store i64 %values.number, ptr %bases
  %nowhere = getelementptr i64, ptr %bases, i64 {abi.BASE_NOWHERE}
  store i64 0, ptr %nowhere
  %scratch.base = getelementptr i64, ptr %bases, i64 {abi.BASE_SCRATCH}
  %scratch.number = ptrtoint ptr %scratch to i64
  store i64 %scratch.number, ptr %scratch.base
  %maps.base = getelementptr i64, ptr %bases, i64 {abi.BASE_MAPS}
  %maps.number = ptrtoint ptr %maps to i64
  store i64 %maps.number, ptr %maps.base
  %take.at = getelementptr i8, ptr %form, i64 {abi.FORM_TAKE}
  %take = load ptr, ptr %take.at
  %no.memory = icmp eq ptr %take, null
  br i1 %no.memory, label %place, label %take.memory
take.memory:
  %handle = call ptr @PyLong_FromUnsignedLongLong(i64 %stream)
  store ptr %handle, ptr %argument
  %taken = call ptr @PyObject_Vectorcall(ptr %take, ptr %argument, i64 1, ptr null)
  call void @Py_DecRef(ptr %handle)
  %refused = icmp eq ptr %taken, null
  br i1 %refused, label %error, label %have.memory
have.memory:
  %address.object = call ptr @PyTuple_GetItem(ptr %taken, i64 0)
  %address = call i64 @PyLong_AsUnsignedLongLong(ptr %address.object)
  br label %place
place:
  %owner = phi ptr [ null, %entry ], [ %taken, %have.memory ]
  %memory = phi i64 [ 0, %entry ], [ %address, %have.memory ]
  %offsets.at = getelementptr i8, ptr %form, i64 {abi.FORM_SCRATCH}
  %offsets = load ptr, ptr %offsets.at
  br label %place.test
place.test:
  %p = phi i64 [ 0, %place ], [ %p.more, %place.next ]
  %placed = icmp eq i64 %p, %scratch.count
  br i1 %placed, label %map.test, label %place.next
place.next:
  %offset.at = getelementptr i64, ptr %offsets, i64 %p
  %offset = load i64, ptr %offset.at
  %piece = add i64 %memory, %offset
  %piece.at = getelementptr i64, ptr %scratch, i64 %p
  store i64 %piece, ptr %piece.at
  %p.more = add i64 %p, 1
  br label %place.test
map.test:
  %without = icmp eq i64 %map.count, 0
  br i1 %without, label %ready, label %gather
gather:
  %places.at = getelementptr i8, ptr %form, i64 {abi.FORM_MAP_PLACES}
  %places = load ptr, ptr %places.at
  br label %gather.next
gather.next:
  %g = phi i64 [ 0, %gather ], [ %g.more, %gather.next ]
  %g.place = getelementptr [2 x i64], ptr %places, i64 %g
  %g.base = load i64, ptr %g.place
  %g.offset.at = getelementptr i64, ptr %g.place, i64 1
  %g.offset = load i64, ptr %g.offset.at
  %g.start.at = getelementptr i64, ptr %bases, i64 %g.base
  %g.start = load i64, ptr %g.start.at
  %g.address = add i64 %g.start, %g.offset
  %g.pointer = inttoptr i64 %g.address to ptr
  %g.value = load i64, ptr %g.pointer
  %g.at = getelementptr i64, ptr %addresses, i64 %g
  store i64 %g.value, ptr %g.at
  %g.more = add i64 %g, 1
  %g.done = icmp eq i64 %g.more, %map.count
  br i1 %g.done, label %map.find, label %gather.next
map.find:
  %known = call ptr @find_maps(ptr %form, ptr %addresses, ptr %set)
  %unknown = icmp eq ptr %known, null
  br i1 %unknown, label %map.encode, label %map.copy
map.encode:
  %set.number = load i64, ptr %set
  %encoded = call i1 @encode(ptr %form, ptr %addresses, i64 %set.number)
  br i1 %encoded, label %map.find, label %drop
map.copy:
  ; Another thread may put other maps there during the launch.
  call void @llvm.memcpy.p0.p0.i64(ptr %maps, ptr %known, i64 %map.bytes, i1 false)
  br label %ready
ready:
  %steps.at = getelementptr i8, ptr %form, i64 {abi.FORM_STEPS}
  %steps = load ptr, ptr %steps.at
  %step.count.at = getelementptr i8, ptr %form, i64 {abi.FORM_STEP_COUNT}
  %step.count = load i64, ptr %step.count.at
  call void @mark(ptr %state, ptr %form, i64 %stream)
  %thread = call ptr @PyEval_SaveThread()
  br label %step.test
step.test:
  %s = phi i64 [ 0, %ready ], [ %s.more, %step.done ]
  %ended = icmp eq i64 %s, %step.count
  br i1 %ended, label %finish, label %step.next
step.next:
  %step.offset = mul i64 %s, {abi.STEP_BYTES}
  %step = getelementptr i8, ptr %steps, i64 %step.offset
  %status = call i32 @step(ptr %state, ptr %step, ptr %bases, ptr %pointers, i64 %stream)
  %good = icmp eq i32 %status, 0
  br i1 %good, label %step.done, label %finish
step.done:
  %s.more = add i64 %s, 1
  br label %step.test
finish:
  %result = phi i32 [ 0, %step.test ], [ %status, %step.next ]
  call void @PyEval_RestoreThread(ptr %thread)
  %fine = icmp eq i32 %result, 0
  br i1 %fine, label %end, label %failed
failed:
  %code = zext i32 %result to i64
  call void @fail(ptr %form, i64 %s, i64 %code, i64 %stream)
  br label %drop
end:
  %recent.at = getelementptr i8, ptr %state, i64 {abi.STATE_RECENT}
  %recent = load ptr, ptr %recent.at
  store ptr %form, ptr %recent
  %nothing = icmp eq ptr %owner, null
  br i1 %nothing, label %done, label %release
release:
  call void @Py_DecRef(ptr %owner)
  br label %done
done:
  ret i1 true
drop:
  %held = icmp eq ptr %owner, null
  br i1 %held, label %error, label %drop.owner
drop.owner:
  call void @Py_DecRef(ptr %owner)
  br label %error
error:
  ret i1 false
}}
"""

# The other half of a round trip.
_WAIT = f"""
define ptr @{abi.WAIT}(ptr %self, ptr %unused) {{
entry:
  %context.at = alloca i64, align 8
  %number = call i64 @PyLong_AsUnsignedLongLong(ptr %self)
  %record = inttoptr i64 %number to ptr
  %special = load atomic i64, ptr @tilewright_streams_special monotonic, align 8
  %usual = icmp eq i64 %special, 0
  br i1 %usual, label %look, label %nothing
look:
  %current = load ptr, ptr %record
  %asked = call i32 %current(ptr %context.at)
  %context = load i64, ptr %context.at
  %wanted.at = getelementptr i8, ptr %record, i64 {abi.WAIT_CONTEXT}
  %wanted = load i64, ptr %wanted.at
  %right = icmp eq i64 %context, %wanted
  %known = icmp eq i32 %asked, 0
  %ready = and i1 %right, %known
  br i1 %ready, label %wait, label %nothing
wait:
  %log.at = getelementptr i8, ptr %record, i64 {abi.WAIT_LOG}
  %log = load ptr, ptr %log.at
  %epoch = load i64, ptr %log
  %next = add i64 %epoch, 1
  store i64 %next, ptr %log
  %function.at = getelementptr i8, ptr %record, i64 {abi.WAIT_SYNCHRONIZE}
  %function = load ptr, ptr %function.at
  %thread = call ptr @PyEval_SaveThread()
  %status = call i32 %function()
  call void @PyEval_RestoreThread(ptr %thread)
  %fine = icmp eq i32 %status, 0
  br i1 %fine, label %done, label %failed
done:
  %waited.at = getelementptr i8, ptr %log, i64 8
  %before = load i64, ptr %waited.at
  %later = icmp ugt i64 %epoch, %before
  %waited = select i1 %later, i64 %epoch, i64 %before
  store i64 %waited, ptr %waited.at
  call void @Py_IncRef(ptr @_Py_TrueStruct)
  ret ptr @_Py_TrueStruct
failed:
  %code = zext i32 %status to i64
  %answer = call ptr @PyLong_FromUnsignedLongLong(i64 %code)
  ret ptr %answer
nothing:
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
}}
"""

ENGINE = "\n".join((OUTSIDE, _LOOK_UP, _APART, _SCALAR, _STREAMS, _RUN, _WAIT))
