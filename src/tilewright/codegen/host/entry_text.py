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
@tilewright_stop = external global i32
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
declare ptr @tilewright_take(i64) nonlazybind
declare void @tilewright_give(ptr) nonlazybind
declare void @tilewright_launch(ptr, ptr, ptr, i64, i64) nonlazybind
declare void @tilewright_pool_start() nonlazybind
"""

# Python's own float and int, and nothing that converts to one: a number of NumPy has a type of its own, and an int is no float. The
# slow path knows what code they need.
_SMALL = {
    "size": "  %small = icmp ult i64 %more, 3\n  %sign = add i64 %word, 0\n",
    "tag": "  %small = icmp ult i64 %word, 16\n  %bits = and i64 %word, 3\n  %sign = sub i64 1, %bits\n",
    "": "  %small = icmp ult i64 %word, 0\n  %sign = add i64 0, 0\n",
}
"""Whether a whole number is kept in one digit, and its sign, by how the interpreter keeps them."""


def conversions() -> str:
    """Functions that read Python's own numbers."""
    return _CONVERSIONS.replace("; small\n", _SMALL[at.small_ints()])


_CONVERSIONS = f"""
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
  %word.at = getelementptr i8, ptr %object, i64 {at.INT_SIZE}
  %word = load i64, ptr %word.at
  %more = add i64 %word, 1
; small
  br i1 %small, label %one.digit, label %ask.python
one.digit:
  %digit.at = getelementptr i8, ptr %object, i64 {at.INT_DIGIT}
  %digit = load i32, ptr %digit.at
  %wide = zext i32 %digit to i64
  %value = mul i64 %sign, %wide
  store i64 %value, ptr %result
  br label %yes
ask.python:
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

MOST_ARRANGED = 48
"""Parameters up to which calls with keywords and defaults are arranged by machine code."""

# `self` is (list of the latest entry, all parameters, those that may be given by position, defaults, the general path, names of `out=`).
# Arguments given by keyword and defaults go to their places; then the entry is called as if all had been given in order. What cannot be
# arranged goes to the general path as it came. A place without a default holds NotImplemented.
ARRANGE = f"""
define internal ptr @item(ptr %tuple, i64 %index) {{
  %items = getelementptr i8, ptr %tuple, i64 {at.TUPLE_ITEMS}
  %place = getelementptr ptr, ptr %items, i64 %index
  %found = load ptr, ptr %place
  ret ptr %found
}}

define internal i64 @length(ptr %tuple) {{
  %place = getelementptr i8, ptr %tuple, i64 {at.TUPLE_SIZE}
  %found = load i64, ptr %place
  ret i64 %found
}}

define ptr @{abi.ARRANGE}(ptr %self, ptr %args, i64 %count, ptr %names) {{
begin:
  %slots = alloca [{MOST_ARRANGED + 1} x ptr], align 8
  %all = call ptr @item(ptr %self, i64 1)
  %positional = call ptr @item(ptr %self, i64 2)
  %defaults = call ptr @item(ptr %self, i64 3)
  %wanted = call i64 @length(ptr %all)
  %most = call i64 @length(ptr %positional)
  %complete = icmp eq i64 %count, %wanted
  %many = icmp ugt i64 %count, %most
  %long = icmp ugt i64 %wanted, {MOST_ARRANGED}
  %some = or i1 %complete, %many
  %no = or i1 %some, %long
  br i1 %no, label %general, label %clear
clear:
  %at.c = phi i64 [ 0, %begin ], [ %next.c, %put ]
  %done.c = icmp uge i64 %at.c, %wanted
  br i1 %done.c, label %named, label %choose
choose:
  %given = icmp ult i64 %at.c, %count
  br i1 %given, label %take, label %put
take:
  %from = getelementptr ptr, ptr %args, i64 %at.c
  %argument = load ptr, ptr %from
  br label %put
put:
  %first = phi ptr [ null, %choose ], [ %argument, %take ]
  %slot.c = getelementptr ptr, ptr %slots, i64 %at.c
  store ptr %first, ptr %slot.c
  %next.c = add i64 %at.c, 1
  br label %clear
named:
  %any = icmp ne ptr %names, null
  br i1 %any, label %count.names, label %fill.begin
count.names:
  %keywords = call i64 @length(ptr %names)
  br label %keyword
keyword:
  %at.k = phi i64 [ 0, %count.names ], [ %next.k, %settled ]
  %out.k = phi ptr [ null, %count.names ], [ %out.n, %settled ]
  %done.k = icmp uge i64 %at.k, %keywords
  br i1 %done.k, label %fill.begin, label %read.key
read.key:
  %key = call ptr @item(ptr %names, i64 %at.k)
  %place.k = add i64 %count, %at.k
  %value.at = getelementptr ptr, ptr %args, i64 %place.k
  %value = load ptr, ptr %value.at
  br label %search
search:
  %at.s = phi i64 [ 0, %read.key ], [ %next.s, %other ]
  %done.s = icmp uge i64 %at.s, %wanted
  br i1 %done.s, label %is.out, label %compare
compare:
  %name = call ptr @item(ptr %all, i64 %at.s)
  %same = icmp eq ptr %name, %key
  br i1 %same, label %found, label %other
other:
  %next.s = add i64 %at.s, 1
  br label %search
found:
  %slot.s = getelementptr ptr, ptr %slots, i64 %at.s
  %before = load ptr, ptr %slot.s
  %twice = icmp ne ptr %before, null
  br i1 %twice, label %general, label %set
set:
  store ptr %value, ptr %slot.s
  br label %settled
is.out:
  %called.out = icmp eq ptr %key, @tilewright_name_out
  br i1 %called.out, label %settled, label %general
settled:
  %out.n = phi ptr [ %out.k, %set ], [ %value, %is.out ]
  %next.k = add i64 %at.k, 1
  br label %keyword
fill.begin:
  %out = phi ptr [ null, %named ], [ %out.k, %keyword ]
  br label %fill
fill:
  %at.f = phi i64 [ 0, %fill.begin ], [ %next.f, %filled ]
  %done.f = icmp uge i64 %at.f, %wanted
  br i1 %done.f, label %ready, label %look
look:
  %slot.f = getelementptr ptr, ptr %slots, i64 %at.f
  %has = load ptr, ptr %slot.f
  %empty = icmp eq ptr %has, null
  br i1 %empty, label %default, label %filled
default:
  %usual = call ptr @item(ptr %defaults, i64 %at.f)
  %none = icmp eq ptr %usual, @_Py_NotImplementedStruct
  br i1 %none, label %general, label %use
use:
  store ptr %usual, ptr %slot.f
  br label %filled
filled:
  %next.f = add i64 %at.f, 1
  br label %fill
ready:
  %last = getelementptr ptr, ptr %slots, i64 %wanted
  store ptr %out, ptr %last
  %has.out = icmp ne ptr %out, null
  %out.names = call ptr @item(ptr %self, i64 5)
  %keys = select i1 %has.out, ptr %out.names, ptr null
  %latest = call ptr @item(ptr %self, i64 0)
  %entry = call ptr @PyList_GetItem(ptr %latest, i64 0)
  call void @Py_IncRef(ptr %entry)
  %answer = call ptr @PyObject_Vectorcall(ptr %entry, ptr %slots, i64 %wanted, ptr %keys)
  call void @Py_DecRef(ptr %entry)
  ret ptr %answer
general:
  %path = call ptr @item(ptr %self, i64 4)
  call void @Py_IncRef(ptr %path)
  %result = call ptr @PyObject_Vectorcall(ptr %path, ptr %args, i64 %count, ptr %names)
  call void @Py_DecRef(ptr %path)
  ret ptr %result
}}
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
