"""The CPython entry of a critical function, and the loop that times it. In: a `CriticalText`; out: LLVM text beside the function's body.

`ptr @tilewright_critical(ptr self, ptr args, i64 count, ptr names)` is a vectorcall function: `self` is the object that is called. It takes exactly
Python's own int, float and bool, states of the very class and NumPy arrays of the very form. Whatever else it is given it hands to `self.general`, before
anything was done; a fault goes to `self.failed(number, first, second)`, which raises.

`i64 @tilewright_time(ptr slots, i64 batches, i64 calls, ptr samples)` calls the function `calls` times between two readings of the counter, `batches`
times, and keeps the differences; it gives how many calls ended with a fault. The compiler may not move the calls: every argument and result passes through an empty piece of assembly.
"""

from __future__ import annotations

import sys

from tilewright.base.dtypes import DType
from tilewright.base.target import Target
from tilewright.codegen.critical.body import COUNTERS, body_text, counter, llvm_argument, result_type
from tilewright.codegen.critical.records import CriticalArgument, CriticalText
from tilewright.codegen.host import interpreter as at
from tilewright.codegen.host.entry_text import HEADER, conversions
from tilewright.codegen.host.stub_emitter import StubEmitter

ENTRY, TIMER = "tilewright_critical", "tilewright_time"
TYPE_SYMBOL = "tilewright_critical_type_"
"""The symbol of the class of a state, by the position of its parameter."""
_COUNT_MASK = (1 << 63) - 1
"""Without the bit that says that the word before the arguments may be used."""
_DECLARATIONS = """
declare ptr @PyFloat_FromDouble(double) nonlazybind
declare ptr @PyLong_FromLongLong(i64) nonlazybind
declare ptr @PyLong_FromUnsignedLongLong(i64) nonlazybind
declare ptr @PyObject_GetAttrString(ptr, ptr) nonlazybind
@general.name = private unnamed_addr constant [8 x i8] c"general\\00"
@failed.name = private unnamed_addr constant [7 x i8] c"failed\\00"
"""


def module_text(text: CriticalText, target: Target) -> str:
    """The whole module: body, entry and timing loop."""
    body, needs = body_text(text, target)
    arrays = sorted({a.dtype.name for a in text.arguments if a.is_memory and a.dtype is not None})
    parts = [HEADER, _DECLARATIONS, conversions(), *(line for line in sorted(needs | set(COUNTERS)))]
    parts += [f"@tilewright_descr_{name} = external global i8" for name in arrays]
    parts += [f"@{TYPE_SYMBOL}{k} = external global i8" for k, a in enumerate(text.arguments) if a.state]
    parts += [body, _CriticalEntry(text).text(), timer_text(text, target), ""]
    return "\n".join(parts)


class _CriticalEntry(StubEmitter):
    def __init__(self, critical: CriticalText) -> None:
        super().__init__()
        self.critical = critical

    def text(self) -> str:
        critical = self.critical
        self.start("entry")
        self.line("%converted = alloca i64, align 8")
        self.line("%result = alloca i64, align 8")
        self.line("%detail = alloca [2 x i64], align 8")
        given = self.new(f"and i64 %count, {_COUNT_MASK}")
        self.require(self.equal("i64", given, str(len(critical.arguments))))
        self.require(self.equal("ptr", "%names", "null"))
        self.settle("general")
        passed = []
        for position, argument in enumerate(critical.arguments):
            value = self.load("ptr", "%args", 8 * position)
            passed.append(f"{llvm_argument(argument)} {self._argument(position, argument, value)}")
        code = self.new(f"call i64 @{critical.name}.body({', '.join([*passed, 'ptr %result', 'ptr %detail'])})")
        self.fork(self.new(f"icmp eq i64 {code}, 0"), "done", "fault")
        self.start("fault")
        first = self.load("i64", "%detail", 0)
        second = self.load("i64", "%detail", 8)
        answer = self.new(f"call ptr (ptr, ptr, ptr, ...) @PyObject_CallMethod(ptr %self, ptr @failed.name, ptr @outside.form, i64 {code}, i64 {first}, i64 {second})")
        self.line(f"ret ptr {answer}")
        self.start("done")
        self._return(critical.result)
        self.start("general")
        path = self.new("call ptr @PyObject_GetAttrString(ptr %self, ptr @general.name)")
        self.fork(self.equal("ptr", path, "null"), "lost", "hand.on")
        self.start("lost")
        self.line("ret ptr null")
        self.start("hand.on")
        count = self.new(f"and i64 %count, {_COUNT_MASK}")
        answer = self.new(f"call ptr @PyObject_Vectorcall(ptr {path}, ptr %args, i64 {count}, ptr %names)")
        self.line(f"call void @Py_DecRef(ptr {path})")
        self.line(f"ret ptr {answer}")
        return f"define ptr @{ENTRY}(ptr %self, ptr %args, i64 %count, ptr %names) nounwind {{\n" + "\n".join(self.lines) + "\n}\n"

    def _argument(self, position: int, argument: CriticalArgument, value: str) -> str:
        if argument.state:
            self.require(self.equal("ptr", self.load("ptr", value, at.TYPE), f"@{TYPE_SYMBOL}{position}"))
            self.settle("general")
            return self.load("ptr", self.load("ptr", value, at.HEADER), at.ARRAY_DATA)
        if argument.is_memory:
            return self._array(argument, value)
        assert argument.dtype is not None
        return self._number(argument.dtype, value)

    def _array(self, argument: CriticalArgument, value: str) -> str:
        assert argument.dtype is not None
        self.require(self.equal("ptr", self.load("ptr", value, at.TYPE), "@tilewright_ndarray"))
        self.settle("general")
        flags = at.C_CONTIGUOUS | at.ALIGNED | (at.WRITEABLE if argument.written else 0)
        self.require(self.equal("ptr", self.load("ptr", value, at.ARRAY_DESCR), f"@tilewright_descr_{argument.dtype.name}"))
        self.require(self.equal("i32", self.load("i32", value, at.ARRAY_RANK), str(len(argument.shape))))
        self.require(self.equal("i32", self.new(f"and i32 {self.load('i32', value, at.ARRAY_FLAGS)}, {flags}"), str(flags)))
        self.settle("general")
        extents = self.load("ptr", value, at.ARRAY_SHAPE)
        for axis, extent in enumerate(argument.shape):
            self.require(self.equal("i64", self.load("i64", extents, 8 * axis), str(extent)))
        self.settle("general")
        return self.load("ptr", value, at.ARRAY_DATA)

    def _number(self, dtype: DType, value: str) -> str:
        if dtype.is_bool:
            yes = self.equal("ptr", value, "@_Py_TrueStruct")
            self.require(self.new(f"or i1 {yes}, {self.equal('ptr', value, '@_Py_FalseStruct')}"))
            self.settle("general")
            return yes
        self.require(self.new(f"call i1 @{'float_argument' if dtype.is_float else 'int_argument'}(ptr {value}, ptr %converted)"))
        self.settle("general")
        if dtype.is_float:
            number = self.new("load double, ptr %converted")
            return number if dtype.bits == 64 else self.new(f"fptrunc double {number} to float")
        number = self.new("load i64, ptr %converted")
        if dtype.bits == 64 and dtype.kind == "i":
            return number
        low = 0 if dtype.kind == "u" else -(1 << (dtype.bits - 1))
        high = min((1 << (dtype.bits - (dtype.kind == "i"))) - 1, (1 << 63) - 1)  # larger ones of u64 are for the general path
        self.require(self.new(f"icmp sge i64 {number}, {low}"))
        self.require(self.new(f"icmp sle i64 {number}, {high}"))
        self.settle("general")
        return number if dtype.bits == 64 else self.new(f"trunc i64 {number} to {dtype.llvm}")

    def _return(self, dtype: DType | None) -> None:
        if dtype is None:
            self._known("@_Py_NoneStruct")
            return
        value = self.new(f"load {result_type(dtype)}, ptr %result")
        if dtype.is_bool:
            true = self.new(f"icmp ne i8 {value}, 0")
            self._known(self.new(f"select i1 {true}, ptr @_Py_TrueStruct, ptr @_Py_FalseStruct"))
            return
        if dtype.is_float:
            wide = value if dtype.bits == 64 else self.new(f"fpext float {value} to double")
            self.line(f"ret ptr {self.new(f'call ptr @PyFloat_FromDouble(double {wide})')}")
            return
        wide = value if dtype.bits == 64 else self.new(f"{'sext' if dtype.kind == 'i' else 'zext'} {dtype.llvm} {value} to i64")
        made = "PyLong_FromUnsignedLongLong" if dtype.kind == "u" else "PyLong_FromLongLong"
        self.line(f"ret ptr {self.new(f'call ptr @{made}(i64 {wide})')}")

    def _known(self, value: str) -> None:
        """Return one of Python's own objects; from 3.12 on they are not counted."""
        if sys.version_info < (3, 12):
            count = self.load("i64", value, at.HEADER - 16)
            self.line(f"store i64 {self.new(f'add i64 {count}, 1')}, ptr {value}")
        self.line(f"ret ptr {value}")


def timer_text(text: CriticalText, target: Target) -> str:
    """The loop that times calls. Numbers and addresses come in slots of eight bytes; samples are ticks of the counter."""
    lines: list[str] = []
    values: list[tuple[str, str]] = []
    for position, argument in enumerate(text.arguments):
        where = f"%slot{position}"
        lines.append(f"  {where} = getelementptr i8, ptr %slots, i64 {8 * position}")
        kind = llvm_argument(argument)
        stored = "i8" if kind == "i1" else kind
        lines.append(f"  %raw{position} = load {stored}, ptr {where}")
        if kind == "i1":
            lines.append(f"  %bit{position} = icmp ne i8 %raw{position}, 0")
        values.append((kind, f"%bit{position}" if kind == "i1" else f"%raw{position}"))
    inner: list[str] = []
    passed: list[str] = []
    arm = target.triple.startswith(("aarch64", "arm64"))
    for position, (kind, value) in enumerate(values):
        if kind == "i1":
            passed.append(f"i1 {value}")
            continue
        register = ("w" if arm else "x") if kind in ("float", "double") else "r"
        inner.append(f'  %in{position} = call {kind} asm sideeffect "", "={register},0"({kind} {value})')
        passed.append(f"{kind} %in{position}")
    used = ""
    if text.result is not None:
        kind = result_type(text.result)
        register = ("w" if arm else "x") if kind in ("float", "double") else "r"
        used = f"  %got = load {kind}, ptr %result\n" + f'  call void asm sideeffect "", "{register}"({kind} %got)\n'
    return (
        f"define i64 @{TIMER}(ptr %slots, i64 %batches, i64 %calls, ptr %samples) nounwind {{\nentry:\n  %result = alloca i64, align 8\n  %detail = alloca [2 x i64], align 8\n"
        + "\n".join(lines)
        + "\n  br label %outer\nouter:\n  %b = phi i64 [ 0, %entry ], [ %bn, %stop ]\n  %fb = phi i64 [ 0, %entry ], [ %f, %stop ]\n"
        + '  call void asm sideeffect "", "~{memory}"()\n'
        + f"  %t0 = call {counter(target, fenced=True)}\n"
        + '  call void asm sideeffect "", "~{memory}"()\n  br label %inner\ninner:\n  %c = phi i64 [ 0, %outer ], [ %cn, %next ]\n  %f = phi i64 [ %fb, %outer ], [ %fn, %next ]\n'
        + "  %left = icmp ult i64 %c, %calls\n  br i1 %left, label %next, label %stop\nnext:\n"
        + "\n".join(inner)
        + f"\n  %code = call i64 @{text.name}.body({', '.join([*passed, 'ptr %result', 'ptr %detail'])})\n"
        + used
        + '  call void asm sideeffect "", "r,~{memory}"(i64 %code)\n  %bad = icmp ne i64 %code, 0\n  %more.bad = zext i1 %bad to i64\n  %fn = add i64 %f, %more.bad\n  %cn = add i64 %c, 1\n  br label %inner\nstop:\n'
        + '  call void asm sideeffect "", "~{memory}"()\n'
        + f"  %t1 = call {counter(target, fenced=True)}\n"
        + "  %spent = sub i64 %t1, %t0\n  %to = getelementptr i64, ptr %samples, i64 %b\n  store i64 %spent, ptr %to\n"
        + "  %bn = add i64 %b, 1\n  %more = icmp ult i64 %bn, %batches\n  br i1 %more, label %outer, label %end\nend:\n  ret i64 %f\n}\n"
    )
