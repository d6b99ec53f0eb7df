"""The parts of an entry stub that do not depend on the signature: outside symbols, scalar conversions, the refusal.

Plain LLVM text, put together by `codegen.host`. Functions from outside are called through the loader's table (`nonlazybind`): one
indirect call, and no distance limit between objects.
"""

from __future__ import annotations

from tilewright.base import abi
from tilewright.codegen import interpreter as at

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
@PyTuple_Type = external global i8
@out.text = private unnamed_addr constant [4 x i8] c"out\\00"

declare double @PyFloat_AsDouble(ptr) nonlazybind
declare i64 @PyLong_AsLongLong(ptr) nonlazybind
declare ptr @PyErr_Occurred() nonlazybind
declare void @PyErr_Clear() nonlazybind
declare ptr @PyErr_NoMemory() nonlazybind
declare i32 @PyUnicode_CompareWithASCIIString(ptr, ptr) nonlazybind
declare ptr @PyEval_SaveThread() nonlazybind
declare void @PyEval_RestoreThread(ptr) nonlazybind
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

# Anything but an exact float or a plain object goes through Python's own conversion. An array is not a scalar here, even one
# that would convert; the slow path has the words for it.
CONVERSIONS = f"""
define internal i1 @float_argument(ptr %object, ptr %result) {{
  %type.at = getelementptr i8, ptr %object, i64 {at.TYPE}
  %type = load ptr, ptr %type.at
  %exact = icmp eq ptr %type, @PyFloat_Type
  br i1 %exact, label %fast, label %other
fast:
  %value.at = getelementptr i8, ptr %object, i64 {at.FLOAT_VALUE}
  %value = load double, ptr %value.at
  store double %value, ptr %result
  ret i1 true
other:
  %array = icmp eq ptr %type, @tilewright_ndarray
  br i1 %array, label %no, label %slow
slow:
  %converted = call double @PyFloat_AsDouble(ptr %object)
  store double %converted, ptr %result
  %suspect = fcmp oeq double %converted, -1.0
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

define internal i1 @int_argument(ptr %object, ptr %result) {{
  %type.at = getelementptr i8, ptr %object, i64 {at.TYPE}
  %type = load ptr, ptr %type.at
  %array = icmp eq ptr %type, @tilewright_ndarray
  br i1 %array, label %no, label %convert
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
