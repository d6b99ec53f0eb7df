"""Entry stubs of CUDA kernels: a CPython function in machine code that recognises its arguments and launches.

In: a `Pattern`, what the arguments of a call are, and a `Layout`, where their fields lie. Out: an object that defines `CALL`,
a METH_FASTCALL | METH_KEYWORDS function whose `self` is `(owner, fallback, address of the state)`, and `PROBE`, which shows
what `CALL` reads. Inputs come by position, results by `out=` where the pattern says so.

What holds: `CALL` does all of a call or hands it on, with the same arguments, before anything was launched or made. It hands
on what it does not recognise: another type or rank, a freed or read-only array, a tensor that needs a gradient, sizes it has
no form for, another context, results that overlap inputs. Nothing of Python runs between reading the arguments and deciding,
but for arrays of ours that were never an argument before; these are named first.
"""

from __future__ import annotations

import functools

from tilewright.base import launch_abi as abi
from tilewright.base.launch_abi import Layout, Pattern, Slot
from tilewright.base.target import host_cpu
from tilewright.codegen.host import interpreter as at
from tilewright.codegen.host.entry_text import ARRANGE, FRONT, REJECT
from tilewright.codegen.host.launcher_text import ENGINE, OUTSIDE
from tilewright.codegen.host.stub_emitter import StubEmitter
from tilewright.codegen.llvm.native import compile_object

_DECLARATIONS = f"""
@_Py_NotImplementedStruct = external global i8
@PyTuple_Type = external global i8
@PyFloat_Type = external global i8
@PyLong_Type = external global i8
@tilewright_name_out = external global i8
@out.text = private unnamed_addr constant [4 x i8] c"out\\00"
@tilewright_device_array = external global i8
@tilewright_block = external global i8
@tilewright_array_form = external global i8
@tilewright_tensor = external global i8
@tilewright_name_is_neg = external global i8

declare i32 @PyUnicode_CompareWithASCIIString(ptr, ptr) nonlazybind
declare ptr @PyObject_VectorcallMethod(ptr, ptr, i64, ptr) nonlazybind
declare ptr @{abi.FIND}(ptr, ptr) nonlazybind
declare i32 @{abi.SCALAR}(ptr, i64, ptr, ptr) nonlazybind
declare i1 @{abi.APART}(ptr, ptr) nonlazybind
declare i32 @{abi.NAMED}(ptr, ptr) nonlazybind
declare i1 @{abi.NOTE}(ptr, i64, i64, i64) nonlazybind
declare i1 @{abi.RUN}(ptr, ptr, ptr, i64) nonlazybind
declare i32 @aoti_torch_get_data_ptr(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_dim(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_sizes(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_strides(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_dtype(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_device_type(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_device_index(ptr, ptr) nonlazybind
declare ptr @tilewright_requires_grad(ptr, ptr) nonlazybind
"""

_ALIGNED = 16
"""Code is made for arrays at multiples of so many bytes, and for others."""


@functools.cache
def engine_object() -> bytes:
    """What all stubs share."""
    # As with the stubs, LLVM's passes would take ten times as long and gain nothing measurable.
    return compile_object(ENGINE, host_cpu(), opt=0)


@functools.cache
def stub_object(pattern: Pattern, layout: Layout) -> bytes:
    """The stub for calls of a pattern. The same for all kernels."""
    return compile_object(stub_ir(pattern, layout), host_cpu(), opt=0)


def stub_ir(pattern: Pattern, layout: Layout) -> str:
    """LLVM text of `CALL` and `PROBE`."""
    parts = [OUTSIDE, _DECLARATIONS, FRONT, ARRANGE]
    parts += [*_Read(pattern, layout).emit(), "}", ""]
    parts.append(f"define ptr @{abi.PROBE}(ptr %self, ptr %args, i64 %count, ptr %names) {{")
    parts += [*_Probe(pattern).emit(), "}", ""]
    parts.append(f"define ptr @{abi.CALL}(ptr %self, ptr %args, i64 %count, ptr %names) {{")
    parts += [*_StubCall(pattern, layout).emit(), REJECT, "}", ""]
    return "\n".join(parts)


def value_count(pattern: Pattern) -> int:
    return sum(slot.is_array or slot.is_number for slot in pattern.arguments) + len(pattern.results)


def key_count(pattern: Pattern) -> int:
    given = pattern.results if pattern.given else ()
    arrays = [slot for slot in (*pattern.arguments, *given) if slot.is_array]
    return sum(1 if slot.kind == abi.OWN else 1 + 2 * slot.rank for slot in arrays) + sum(slot.kind == abi.SHAPING for slot in pattern.arguments)


def _value_of(pattern: Pattern) -> tuple[list[int], list[int]]:
    """The slot of each argument and of each result: arrays first, then results, then numbers."""
    arrays = sum(slot.is_array for slot in pattern.arguments)
    next_array, next_number = 0, arrays + len(pattern.results)
    arguments: list[int] = []
    for slot in pattern.arguments:
        if slot.is_array:
            arguments.append(next_array)
            next_array += 1
        else:
            arguments.append(next_number)
            next_number += slot.is_number
    return arguments, [arrays + i for i in range(len(pattern.results))]


class _Frame(StubEmitter):
    """What the functions of a stub have in common."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.pattern = pattern
        self.argument_values, self.result_values = _value_of(pattern)

    def allocate(self, name: str, words: int) -> None:
        self.line(f"%{name} = alloca [{max(words, 1)} x i64], align 8")

    def place(self, base: str, index: int) -> str:
        return self.new(f"getelementptr i64, ptr {base}, i64 {index}") if index else base

    def store(self, kind: str, value: str, base: str, index: int) -> None:
        self.line(f"store {kind} {value}, ptr {self.place(base, index)}")

    def settle_as(self, condition: str, otherwise: str) -> None:
        self.settle()
        self.require(condition)
        self.settle(otherwise)

    def pointer_of(self, item: str, offset: int) -> str:
        """The address in an array of ours."""
        return self.new(f"call i64 @PyLong_AsUnsignedLongLong(ptr {self.load('ptr', item, offset)})")

    def results_of(self, item: str) -> list[str]:
        """The results in what `out=` or the maker gave."""
        count = len(self.pattern.results)
        return [item] if count == 1 else [self.load("ptr", item, at.TUPLE_ITEMS + 8 * i) for i in range(count)]


class _Read(_Frame):
    """`i32 read(args, count, names, values, keys)`: 1 when everything is as the pattern says, 0 when not, 2 with an exception."""

    def __init__(self, pattern: Pattern, layout: Layout) -> None:
        super().__init__(pattern)
        self.layout = layout
        self.keys = 0

    def emit(self) -> list[str]:
        pattern = self.pattern
        self.lines.append("define internal i32 @read(ptr %args, i64 %count, ptr %names, ptr %values, ptr %keys) {")
        self.start("entry")
        self.allocate("got", 1)
        self.allocate("given", 1)
        self._count()
        objects = [self.load("ptr", "%args", 8 * i) for i in range(len(pattern.arguments))]
        arrays = [(slot, item) for slot, item in zip(pattern.arguments, objects, strict=True) if slot.is_array]
        given = self._given()
        for slot, item in (*arrays, *given):
            self._type(slot, item)
        for slot, item in (*arrays, *given):
            if slot.kind == abi.OWN:
                self._named(item)
        for slot, item, value in zip(pattern.arguments, objects, self.argument_values, strict=True):
            if slot.is_number:
                self._number(slot, item, value)
            elif slot.kind == abi.NOTHING:
                self.require(self.equal("ptr", item, "@_Py_NoneStruct"))
                self.settle()
        for position, (slot, item, value) in enumerate(zip(pattern.arguments, objects, self.argument_values, strict=True)):
            if slot.is_array:
                self._array(slot, item, value, written=position in pattern.written)
        for (slot, item), value in zip(given, self.result_values, strict=pattern.given):
            self._array(slot, item, value, written=True)
        self.settle()
        self.line("ret i32 1")
        self.start("reject")
        self.line("ret i32 0")
        self.start("error")
        self.line("ret i32 2")
        return self.lines

    def _count(self) -> None:
        """As many arguments as the pattern has, and `out=` where it says so."""
        self.require(self.equal("i64", "%count", str(len(self.pattern.arguments))))
        if not self.pattern.given:
            self.require(self.equal("ptr", "%names", "null"))
            self.settle()
            return
        self.require(self.new("icmp ne ptr %names, null"))
        self.settle()
        self.require(self.equal("i64", self.load("i64", "%names", at.TUPLE_SIZE), "1"))
        self.settle()
        key = self.load("ptr", "%names", at.TUPLE_ITEMS)
        self.fork(self.equal("ptr", key, "@tilewright_name_out"), "named.out", "compare")
        self.start("compare")
        order = self.new(f"call i32 @PyUnicode_CompareWithASCIIString(ptr {key}, ptr @out.text)")
        self.fork(self.equal("i32", order, "0"), "named.out", "reject")
        self.start("named.out")

    def _given(self) -> list[tuple[Slot, str]]:
        if not self.pattern.given:
            return []
        out = self.load("ptr", "%args", 8 * len(self.pattern.arguments))
        if len(self.pattern.results) > 1:
            self.require(self.equal("ptr", self.load("ptr", out, at.TYPE), "@PyTuple_Type"))
            self.settle()
            self.require(self.equal("i64", self.load("i64", out, at.TUPLE_SIZE), str(len(self.pattern.results))))
            self.settle()
        return list(zip(self.pattern.results, self.results_of(out), strict=True))

    def _type(self, slot: Slot, item: str) -> None:
        wanted = "@tilewright_device_array" if slot.kind == abi.OWN else "@tilewright_tensor"
        self.require(self.equal("ptr", self.load("ptr", item, at.TYPE), wanted))
        self.settle()

    def _named(self, item: str) -> None:
        """An array of ours has an object for its form, made when it is first an argument."""
        ready, ask, asked = (self.fresh_label(name) for name in ("form.known", "form.ask", "form.asked"))
        form = self.load("ptr", item, self.layout.array_form)
        none, unset = self.equal("ptr", form, "@_Py_NoneStruct"), self.equal("ptr", form, "null")
        self.fork(self.new(f"or i1 {none}, {unset}"), ask, ready)
        self.start(ask)
        self.line(f"store ptr {item}, ptr %given")
        made = self.new("call ptr @PyObject_Vectorcall(ptr @tilewright_array_form, ptr %given, i64 1, ptr null)")
        self.fork(self.equal("ptr", made, "null"), "error", asked)
        self.start(asked)
        self.line(f"call void @Py_DecRef(ptr {made})")  # the array holds it
        self.jump(ready)
        self.start(ready)

    def _number(self, slot: Slot, item: str, value: int) -> None:
        if slot.kind == abi.BOOL:
            yes, no = self.equal("ptr", item, "@_Py_TrueStruct"), self.equal("ptr", item, "@_Py_FalseStruct")
            self.require(self.new(f"or i1 {yes}, {no}"))
            self.settle()
            self.store("i64", self.new(f"zext i1 {yes} to i64"), "%values", value)
            return
        wanted = "@PyFloat_Type" if slot.kind == abi.FLOAT else "@PyLong_Type"
        self.require(self.equal("ptr", self.load("ptr", item, at.TYPE), wanted))
        self.settle()
        if slot.kind == abi.FLOAT:
            self.store("i64", self.load("i64", item, at.FLOAT_VALUE), "%values", value)
            return
        number = self.new(f"call i64 @PyLong_AsLongLong(ptr {item})")
        fine, suspect, clear = (self.fresh_label(name) for name in ("number", "suspect", "too.large"))
        self.fork(self.equal("i64", number, "-1"), suspect, fine)
        self.start(suspect)
        self.fork(self.equal("ptr", self.new("call ptr @PyErr_Occurred()"), "null"), fine, clear)
        self.start(clear)
        self.line("call void @PyErr_Clear()")
        self.jump("reject")
        self.start(fine)
        self.store("i64", number, "%values", value)
        if slot.kind == abi.SHAPING:
            self._key(number)

    def _array(self, slot: Slot, item: str, value: int, written: bool) -> None:
        if slot.kind == abi.OWN:
            self._own(item, value, written)
        else:
            self._tensor(slot, item, value)

    def _own(self, item: str, value: int, written: bool) -> None:
        layout = self.layout
        owner = self.load("ptr", item, layout.array_owner)
        self.require(self.equal("ptr", self.load("ptr", owner, at.TYPE), "@tilewright_block"))
        self.settle()
        self.require(self.equal("ptr", self.load("ptr", owner, layout.block_freed), "@_Py_FalseStruct"))
        if written:
            self.require(self.equal("ptr", self.load("ptr", item, layout.array_readonly), "@_Py_FalseStruct"))
        pointer = self.pointer_of(item, layout.array_pointer)
        self.store("i64", pointer, "%values", value)
        form = self.new(f"ptrtoint ptr {self.load('ptr', item, layout.array_form)} to i64")
        # Objects lie at multiples of 16, so there is room for the bits.
        self._key(self.new(f"or i64 {form}, {self._about_address(pointer)}"))

    def _tensor(self, slot: Slot, item: str, value: int) -> None:
        handle = self.new(f"getelementptr i8, ptr {item}, i64 {self.layout.tensor}")
        self._no_gradient(item, handle)
        if slot.kind == abi.CHECKED_TENSOR:
            self._not_negated(item)
        self.require(self.equal("i64", self._ask("get_dim", handle, "i64"), str(slot.rank)))
        self.require(self.equal("i32", self._ask("get_device_type", handle, "i32"), str(self.layout.tensor_device)))
        self.settle()
        dtype = self.new(f"zext i32 {self._ask('get_dtype', handle, 'i32')} to i64")
        index = self.new(f"zext i32 {self._ask('get_device_index', handle, 'i32')} to i64")
        pointer = self.new(f"ptrtoint ptr {self._ask('get_data_ptr', handle, 'ptr')} to i64")
        self.store("i64", pointer, "%values", value)
        word = self.new(f"or i64 {dtype}, {self.new(f'shl i64 {self._about_address(pointer)}, 16')}")
        self._key(self.new(f"or i64 {word}, {self.new(f'shl i64 {index}, 32')}"))
        if slot.rank:
            for question in ("get_sizes", "get_strides"):
                numbers = self._ask(question, handle, "ptr")
                for axis in range(slot.rank):
                    self._key(self.load("i64", numbers, 8 * axis))

    def _no_gradient(self, item: str, handle: str) -> None:
        plain, ask = self.fresh_label("plain"), self.fresh_label("ask")
        if self.layout.tensor_gradient:
            word = self.load("i64", self.new(f"load ptr, ptr {handle}"), self.layout.tensor_gradient)
            self.fork(self.equal("i64", word, "0"), plain, ask)
            self.start(ask)
        gradient = self.new(f"call ptr @tilewright_requires_grad(ptr {item}, ptr null)")
        answered = self.fresh_label("answered")
        self.fork(self.equal("ptr", gradient, "@_Py_FalseStruct"), answered, "drop." + answered)
        self._refuse_answer("drop." + answered, gradient)
        self.start(answered)
        self.line(f"call void @Py_DecRef(ptr {gradient})")
        self.jump(plain)
        self.start(plain)

    def _ask(self, question: str, handle: str, kind: str) -> str:
        """One of PyTorch's C functions, which write their answer and return 0."""
        status = self.new(f"call i32 @aoti_torch_{question}(ptr {handle}, ptr %got)")
        self.settle_as(self.equal("i32", status, "0"), "reject")
        return self.new(f"load {kind}, ptr %got")

    def _not_negated(self, item: str) -> None:
        self.line(f"store ptr {item}, ptr %given")
        answer = self.new("call ptr @PyObject_VectorcallMethod(ptr @tilewright_name_is_neg, ptr %given, i64 1, ptr null)")
        plain = self.fresh_label("positive")
        self.fork(self.equal("ptr", answer, "@_Py_FalseStruct"), plain, "drop." + plain)
        self._refuse_answer("drop." + plain, answer)
        self.start(plain)
        self.line(f"call void @Py_DecRef(ptr {answer})")

    def _refuse_answer(self, label: str, answer: str) -> None:
        """Leave after an answer other than `False`; it may be an exception."""
        drop = self.fresh_label("drop")
        self.start(label)
        self.fork(self.equal("ptr", answer, "null"), "error", drop)
        self.start(drop)
        self.line(f"call void @Py_DecRef(ptr {answer})")
        self.jump("reject")

    def _about_address(self, pointer: str) -> str:
        """What the code to run depends on: bit 0 says that it is not aligned, bit 1 that there is no memory, as empty arrays may be."""
        low = self.new(f"and i64 {pointer}, {_ALIGNED - 1}")
        misaligned = self.new(f"zext i1 {self.new(f'icmp ne i64 {low}, 0')} to i64")
        nowhere = self.new(f"select i1 {self.equal('i64', pointer, '0')}, i64 2, i64 0")
        return self.new(f"or i64 {misaligned}, {nowhere}")

    def _key(self, word: str) -> None:
        self.store("i64", word, "%keys", self.keys)
        self.keys += 1


class _Probe(_Frame):
    """What a call reads, as bytes; None where it refuses."""

    def emit(self) -> list[str]:
        values, keys = value_count(self.pattern), key_count(self.pattern)
        self.start("entry")
        self.allocate("words", values + keys)
        behind = self.place("%words", values)
        self.line(f"call void @llvm.memset.p0.i64(ptr %words, i8 0, i64 {8 * (values + keys)}, i1 false)")
        answer = self.new(f"call i32 @read(ptr %args, i64 %count, ptr %names, ptr %words, ptr {behind})")
        self.line(f"switch i32 {answer}, label %refused [ i32 1, label %fits i32 2, label %error ]")
        self.start("fits")
        self.line(f"ret ptr {self.new(f'call ptr @PyBytes_FromStringAndSize(ptr %words, i64 {8 * (values + keys)})')}")
        self.start("refused")
        self.line("call void @Py_IncRef(ptr @_Py_NoneStruct)")
        self.line("ret ptr @_Py_NoneStruct")
        self.start("error")
        self.line("ret ptr null")
        return self.lines


class _StubCall(_Frame):
    """The whole of a call."""

    def __init__(self, pattern: Pattern, layout: Layout) -> None:
        super().__init__(pattern)
        self.layout = layout
        self.torch = any(slot.kind in (abi.TENSOR, abi.CHECKED_TENSOR) for slot in (*pattern.arguments, *pattern.results))

    def emit(self) -> list[str]:
        pattern = self.pattern
        self.start("entry")
        self.allocate("values", value_count(pattern))
        self.allocate("keys", key_count(pattern))
        self.allocate("got", 1)
        self.allocate("stream.at", 1)
        self.allocate("argument", 1)
        # While somebody records a graph, say, all calls take the general path.
        special = self.new("load atomic i64, ptr @tilewright_streams_special monotonic, align 8")
        self.require(self.equal("i64", special, "0"))
        self.settle()
        answer = self.new("call i32 @read(ptr %args, i64 %count, ptr %names, ptr %values, ptr %keys)")
        self.line(f"switch i32 {answer}, label %reject [ i32 1, label %read i32 2, label %error ]")
        self.start("read")
        number = self.load("ptr", "%self", at.TUPLE_ITEMS + 16)
        state = self.new(f"inttoptr i64 {self.new(f'call i64 @PyLong_AsUnsignedLongLong(ptr {number})')} to ptr")
        form = self.new(f"call ptr @{abi.FIND}(ptr {state}, ptr %keys)")
        self.require(self.new(f"icmp ne ptr {form}, null"))
        self.settle()
        self._scalars(form)
        self._context(state, form)
        if pattern.given or pattern.written:
            self.require(self.new(f"call i1 @{abi.APART}(ptr {form}, ptr %values)"))
            self.settle()
        stream = self._stream(state, form)
        result = self._results(form, stream)
        self._note(stream)
        done = self.new(f"call i1 @{abi.RUN}(ptr {state}, ptr {form}, ptr %values, i64 {stream})")
        self.fork(done, "done", "drop")
        self.start("done")
        if pattern.given or not pattern.results:
            self.line(f"call void @Py_IncRef(ptr {result})")
        self.line(f"ret ptr {result}")
        self.start("drop")
        if not pattern.given and pattern.results:
            self.line(f"call void @Py_DecRef(ptr {result})")
        self.jump("error")
        self.start("error")
        self.line("ret ptr null")
        return self.lines

    def _scalars(self, form: str) -> None:
        index = 0
        for position, slot in enumerate(self.pattern.arguments):
            if not slot.is_number:
                continue
            place = self.place("%values", self.argument_values[position])
            item = self.load("ptr", "%args", 8 * position)
            answer = self.new(f"call i32 @{abi.SCALAR}(ptr {form}, i64 {index}, ptr {place}, ptr {item})")
            taken = self.fresh_label("scalar")
            self.line(f"switch i32 {answer}, label %reject [ i32 1, label %{taken} i32 2, label %error ]")
            self.start(taken)
            index += 1

    def _context(self, state: str, form: str) -> None:
        function = self.load("ptr", state, abi.STATE_CONTEXT)
        status = self.new(f"call i32 {function}(ptr %got)")
        self.require(self.equal("i32", status, "0"))
        self.require(self.equal("i64", self.new("load i64, ptr %got"), self.load("i64", form, abi.FORM_CONTEXT)))
        self.settle()

    def _stream(self, state: str, form: str) -> str:
        """The stream this thread named, else PyTorch's current one where there are tensors, else the default one."""
        self.line("store i64 0, ptr %stream.at")
        if self.torch:
            function = self.load("ptr", state, abi.STATE_TORCH_STREAM)
            device = self.new(f"trunc i64 {self.load('i64', form, abi.FORM_DEVICE)} to i32")
            status = self.new(f"call i32 {function}(i32 {device}, ptr %stream.at)")
            self.require(self.equal("i32", status, "0"))
            self.settle()
        usual = self.new("load i64, ptr %stream.at")
        before = self.current
        opened = self.new("load atomic i64, ptr @tilewright_streams_open monotonic, align 8")
        self.fork(self.equal("i64", opened, "0"), "stream.known", "stream.ask")
        self.start("stream.ask")
        # A graph is recorded, or calls are held back: the general path knows.
        special = self.new("load atomic i64, ptr @tilewright_streams_special monotonic, align 8")
        self.require(self.equal("i64", special, "0"))
        self.settle()
        asked = self.current
        answer = self.new(f"call i32 @{abi.NAMED}(ptr {form}, ptr %stream.at)")
        self.line(f"switch i32 {answer}, label %error [ i32 0, label %stream.known i32 1, label %stream.named ]")
        self.start("stream.named")
        named = self.new("load i64, ptr %stream.at")
        if self.torch:
            # Two streams have to be put in order, which the general path does.
            self.require(self.equal("i64", named, usual))
            self.settle()
        after = self.current
        self.jump("stream.known")
        self.start("stream.known")
        return self.new(f"phi i64 [ {usual}, %{before} ], [ {usual}, %{asked} ], [ {named}, %{after} ]")

    def _results(self, form: str, stream: str) -> str:
        """The object to return. From here on the call is not handed on any more."""
        if self.pattern.given:
            return self.load("ptr", "%args", 8 * len(self.pattern.arguments))
        if not self.pattern.results:
            return "@_Py_NoneStruct"
        handle = self.new(f"call ptr @PyLong_FromUnsignedLongLong(i64 {stream})")
        self.line(f"store ptr {handle}, ptr %argument")
        make = self.load("ptr", form, abi.FORM_MAKE)
        made = self.new(f"call ptr @PyObject_Vectorcall(ptr {make}, ptr %argument, i64 1, ptr null)")
        self.line(f"call void @Py_DecRef(ptr {handle})")
        self.fork(self.equal("ptr", made, "null"), "error", "made")
        self.start("made")
        for slot, item, value in zip(self.pattern.results, self.results_of(made), self.result_values, strict=True):
            if slot.kind == abi.OWN:
                pointer = self.pointer_of(item, self.layout.array_pointer)
            else:
                place = self.new(f"getelementptr i8, ptr {item}, i64 {self.layout.tensor}")
                self.new(f"call i32 @aoti_torch_get_data_ptr(ptr {place}, ptr %got)")
                pointer = self.new("load i64, ptr %got")
            self.store("i64", pointer, "%values", value)
        return made

    def _note(self, stream: str) -> None:
        """Blocks of memory know the streams they are used on. Those just made are at home on this one."""
        owned = [self.load("ptr", "%args", 8 * i) for i, slot in enumerate(self.pattern.arguments) if slot.kind == abi.OWN]
        if self.pattern.given:
            out = self.load("ptr", "%args", 8 * len(self.pattern.arguments))
            owned += [r for r, slot in zip(self.results_of(out), self.pattern.results, strict=True) if slot.kind == abi.OWN]
        for item in owned:
            block = self.load("ptr", item, self.layout.array_owner)
            places = f"i64 {self.layout.block_stream}, i64 {self.layout.block_recent}"
            self.require(self.new(f"call i1 @{abi.NOTE}(ptr {block}, {places}, i64 {stream})"))
            self.settle("drop")
