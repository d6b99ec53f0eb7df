"""Running a form, as LLVM text: scratch memory, tensor maps, launches; and waiting for a device. Part of `launcher_text`.

Everything happens on the stack of the call, so threads do not meet. The lock of the interpreter is held but for the driver's
own launches and waits: these take long when the device's queue is full, and what has to happen meanwhile may need Python.
"""

from __future__ import annotations

from tilewright.base import launch_abi as abi

# Runs the steps of a form; false when there is an exception. Results were made before, so all that can go wrong is memory for
# scratch, the encoding of maps and the launches.
RUN = f"""
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
WAIT = f"""
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
  %status = call i32 %function(i64 %wanted)
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
