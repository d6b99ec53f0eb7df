"""The parts of an entry stub that do not depend on the signature: outside symbols, scalar conversions, the refusal.

Plain LLVM text, put together by `codegen.host.entries`. Functions from outside are called through the loader's table (`nonlazybind`): one
indirect call, and no distance limit between objects.
"""

from __future__ import annotations

from tilewright.base import abi
from tilewright.codegen.host import interpreter as at

HEADER = """
@tilewright_ndarray = external global i8
@tilewright_numpy_api = external global i8
@tilewright_name_out = external global i8
@tilewright_pool = external global i8
@_Py_NotImplementedStruct = external global i8
@_Py_NoneStruct = external global i8
@_Py_TrueStruct = external global i8
@_Py_FalseStruct = external global i8
@PyFloat_Type = external global i8
@PyLong_Type = external global i8
@PyTuple_Type = external global i8
@outside.name = private unnamed_addr constant [8 x i8] c"outside\\00"
@outside.form = private unnamed_addr constant [4 x i8] c"LLL\\00"
@out.text = private unnamed_addr constant [4 x i8] c"out\\00"

declare i64 @PyLong_AsLongLong(ptr) nonlazybind
@tilewright_keyboard_interrupt = external global i8
declare i32 @PyErr_CheckSignals() nonlazybind
declare void @PyErr_SetNone(ptr) nonlazybind
declare i32 @tilewright_interrupt_begin() nonlazybind
declare i32 @tilewright_interrupt_end(i32) nonlazybind
declare ptr @PyErr_Occurred() nonlazybind
declare void @PyErr_Clear() nonlazybind
declare i32 @PyUnicode_CompareWithASCIIString(ptr, ptr) nonlazybind
declare ptr @PyEval_SaveThread() nonlazybind
declare void @PyEval_RestoreThread(ptr) nonlazybind
declare ptr @PyObject_CallMethod(ptr, ptr, ptr, ...) nonlazybind
declare ptr @PyTuple_New(i64) nonlazybind
declare ptr @PyTuple_GetItem(ptr, i64) nonlazybind
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr) nonlazybind
declare i32 @PyTuple_SetItem(ptr, i64, ptr) nonlazybind
declare void @Py_IncRef(ptr) nonlazybind
declare void @Py_DecRef(ptr) nonlazybind
declare ptr @malloc(i64) nonlazybind
declare void @free(ptr) nonlazybind
declare void @tilewright_launch(ptr, ptr, ptr, i64, i64) nonlazybind
declare void @tilewright_pool_start() nonlazybind
"""

# Python's own float and int, and nothing that converts to one: a number of NumPy has a type of its own, and an int is no float. The
# slow path knows what code they need.
CONVERSIONS = f"""
define internal i1 @float_argument(ptr %object, ptr %result) {{
  %type.at = getelementptr i8, ptr %object, i64 {at.TYPE}
  %type = load ptr, ptr %type.at
  %exact = icmp eq ptr %type, @PyFloat_Type
  br i1 %exact, label %fast, label %no
fast:
  %value.at = getelementptr i8, ptr %object, i64 {at.FLOAT_VALUE}
  %value = load double, ptr %value.at
  store double %value, ptr %result
  ret i1 true
no:
  ret i1 false
}}

define internal i1 @int_argument(ptr %object, ptr %result) {{
  %type.at = getelementptr i8, ptr %object, i64 {at.TYPE}
  %type = load ptr, ptr %type.at
  %exact = icmp eq ptr %type, @PyLong_Type
  br i1 %exact, label %convert, label %no
convert:
  %converted = call i64 @PyLong_AsLongLong(ptr %object)
  store i64 %converted, ptr %result
  %suspect = icmp eq i64 %converted, -1
  br i1 %suspect, label %ask, label %yes
ask:
  %error = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %yes, label %clear
clear:
  call void @PyErr_Clear()
  br label %no
yes:
  ret i1 true
no:
  ret i1 false
}}
"""

# Whatever replaces the entry meanwhile, it lives until its call is over; and this code is never freed.
FRONT = f"""
define ptr @{abi.FRONT}(ptr %self, ptr %args, i64 %count, ptr %names) {{
  %entry = call ptr @PyList_GetItem(ptr %self, i64 0)
  call void @Py_IncRef(ptr %entry)
  %answer = call ptr @PyObject_Vectorcall(ptr %entry, ptr %args, i64 %count, ptr %names)
  call void @Py_DecRef(ptr %entry)
  ret ptr %answer
}}

declare ptr @PyList_GetItem(ptr, i64) nonlazybind
"""

# A stub bound to `(code, fallback)` hands a call it refuses to the fallback, with the same arguments.
REJECT = f"""
reject:
  %self.type.at = getelementptr i8, ptr %self, i64 {at.TYPE}
  %self.type = load ptr, ptr %self.type.at
  %chained = icmp eq ptr %self.type, @PyTuple_Type
  br i1 %chained, label %hand.on, label %refuse
hand.on:
  %fallback = call ptr @PyTuple_GetItem(ptr %self, i64 1)
  %answer = call ptr @PyObject_Vectorcall(ptr %fallback, ptr %args, i64 %count, ptr %names)
  ret ptr %answer
refuse:
  call void @Py_IncRef(ptr @_Py_NotImplementedStruct)
  ret ptr @_Py_NotImplementedStruct
"""
