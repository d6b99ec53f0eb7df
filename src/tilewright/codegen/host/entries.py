"""The host part of a CPU artifact: a CPython function in machine code that checks its arguments and runs the launches.

In: an `Artifact` (signature, sizes, checks, launches; its code is not looked at). Out: LLVM text that defines
`ptr @tilewright_call(ptr self, ptr args, i64 count, ptr names)`, a METH_FASTCALL | METH_KEYWORDS function. The positional
arguments are the artifact's inputs; `out=` may give the output, or a tuple of them.

What holds: the function does all of the call or none of it. Whatever it does not recognise (another type, dtype, rank, layout or
keyword, a size that does not fit, a fact that does not hold, outputs that overlap inputs) makes it return `NotImplemented` before
anything was written, so that the caller's slow path can say exactly what is wrong or choose other code. So does a size that leaves 64
bits on its way, and results or scratch there is no memory for. An exception (null) comes out only when an index that is checked as the
kernel runs lay outside. The order matters: scalars are converted first, since that may run Python code; after it nothing runs that could
change an array that was looked at. Outputs and scratch are created last, when only memory can be lacking.

The text has no process addresses: everything outside is a symbol of `base.abi`, bound by the loader.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base import abi
from tilewright.base.artifact import (
    FAILURE,
    FAILURE_EXTENT,
    FAILURE_INDEX,
    FAILURE_SITE,
    SMALL_MANY,
    ArrayParam,
    Artifact,
    CallCheck,
    Launch,
    ScalarParam,
)
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import Size, contiguous_strides, number_name, product
from tilewright.base.target import Target
from tilewright.codegen.host import interpreter as at
from tilewright.codegen.host.entry_text import ARRANGE, FRONT, HEADER, REJECT, conversions
from tilewright.codegen.host.stub_emitter import StubEmitter
from tilewright.codegen.llvm.native import compile_object
from tilewright.codegen.llvm.sizes import CHECKED_STEPS, DECLARATIONS, SizeEmitter, names_bound

STACK_SCRATCH = 1 << 14
"""Bytes of scratch that live on the stack."""

_RELATIONS = {"eq": "eq", "le": "sle", "lt": "slt"}


@record
class _View:
    """Registers that describe one array argument."""

    param: ArrayParam
    data: str
    extents: tuple[str, ...]
    """In elements, per axis."""
    strides: tuple[str, ...]
    """In bytes, per axis; empty where the array is known to be contiguous."""
    steps: tuple[str, ...]
    """The same in elements."""


def is_contiguous(param: ArrayParam) -> bool:
    """Whether the parameter is declared row-major without gaps."""
    return param.strides == contiguous_strides(param.shape)


def _scalar_is_native(dtype: DType) -> bool:
    """Whether the stub can convert to it. Floats below 32 bits go through NumPy's rounding on the slow path."""
    return dtype.is_bool or dtype.is_int or dtype.bits >= 32


def host_ir(artifact: Artifact, fields: int = 3, special: bool = False) -> str:
    """LLVM text of the entry stub for the artifact's signature. `fields`: words that describe an access outside an array. `special`: calls are handed on
    while somebody records or watches."""
    arrays = [p for p in (*artifact.inputs, *artifact.outputs) if isinstance(p, ArrayParam)]
    scalars = [p for p in artifact.inputs if isinstance(p, ScalarParam)]
    parts = [HEADER, *DECLARATIONS, FRONT, ARRANGE]
    if any(not p.dtype.is_bool and not p.typed for p in scalars):
        parts.append(conversions())
    parts.append(f'@outside.fields = private unnamed_addr constant [{fields + 1} x i8] c"{"L" * fields}\\00"')
    if special:
        parts.append("@tilewright_streams_special = external global i64")
    parts += [f"@tilewright_descr_{n} = external global i8" for n in sorted({p.dtype.name for p in arrays})]
    parts += [f"@tilewright_number_{n} = external global i8" for n in sorted({p.dtype.name for p in scalars if p.typed})]
    parts += [f'declare void @"{e}"(ptr, i64, i64) nonlazybind' for e in sorted({x.entry for x in artifact.launches})]
    parts.append(f"define ptr @{abi.STUB_ENTRY}(ptr %self, ptr %args, i64 %count, ptr %names) {{")
    # A call that failed halfway must not be made again where that writes in place, or prints.
    unsure = any(not text.startswith(abi.LOCAL_MEMORY) for x in artifact.launches for _, text in x.asserts)
    if unsure or any(p.dtype.kind == "q" for p in arrays) or not all(_scalar_is_native(p.dtype) for p in scalars):
        parts.append("  br label %reject")
    else:
        parts += _Stub(artifact, fields, special).emit()
    parts += [REJECT, "}"]
    text = "\n".join(parts)
    return "\n".join([text, *(step for step in CHECKED_STEPS if step[step.index("@") : step.index("(")] in text), ""])


def host_object(artifact: Artifact, target: Target, fields: int = 3, special: bool = False) -> bytes:
    """The stub as an object, empty where this interpreter takes no stubs. `target` is the machine we run on."""
    if not at.stubs_work():
        return b""
    # Straight-line code with one use of everything: LLVM's passes would multiply the compile time and gain nothing measurable.
    return compile_object(host_ir(artifact, fields, special), target, opt=0)


class _Stub(StubEmitter):
    """Emits the body of one stub, front to back."""

    def __init__(self, artifact: Artifact, fields: int = 3, special: bool = False) -> None:
        super().__init__()
        self.artifact, self.fields, self.special = artifact, fields, special
        self.sizes = SizeEmitter(self.lines, {})
        self.data: dict[str, str] = {}
        """Data pointer of each array."""
        self.scalars: dict[str, tuple[str, str]] = {}
        """LLVM type and register of each scalar."""
        self.bound = {(b.array, b.axis, b.stride): b.name for b in artifact.bindings}
        outputs = {o.name for o in artifact.outputs}
        self.output_strides = [b for b in artifact.bindings if b.array in outputs and b.stride]
        self.out_required = any(b.array in outputs and not b.stride for b in artifact.bindings)
        self.reports = sum(bool(x.asserts) for x in artifact.launches)
        """How many launches can fail, for want of memory. What they wrote until then is written again on the slow path, or, where that was in place, the error comes at once."""
        self.scratch_bytes = [
            product(p.shape) * p.dtype.itemsize if p.dtype.kind != "q" else product(p.shape) // p.dtype.block * p.dtype.itemsize
            for p in artifact.scratch
        ]

    # -- the call, in order -------------------------------------------------------------------------------------

    def emit(self) -> list[str]:
        artifact = self.artifact
        self.start("entry")
        self._allocate_frame()
        if self.special:
            self.require(self.equal("i64", self.new("load atomic i64, ptr @tilewright_streams_special monotonic, align 8"), "0"))
            self.settle()
        out = self._keyword()
        for position in artifact.absent:
            self.require(self.equal("ptr", self.load("ptr", "%args", 8 * position), "@_Py_NoneStruct"))
        places = [position for position in range(len(artifact.inputs) + len(artifact.absent)) if position not in artifact.absent]
        arguments = [self.load("ptr", "%args", 8 * position) for position in places]
        for parameter, argument in zip(artifact.inputs, arguments):
            if isinstance(parameter, ScalarParam):
                self._scalar(parameter, argument)
        inputs = [
            self._array(parameter, argument, at.ALIGNED | (at.WRITEABLE if parameter.role == "inout" else 0))
            for parameter, argument in zip(artifact.inputs, arguments)
            if isinstance(parameter, ArrayParam)
        ]
        for view in inputs:
            self._bind(view, self.sizes)
        known = set(self.sizes.values)
        self._guard_sizes([size for size in self._all_sizes() if size.names <= known])
        for name, size in artifact.computed:
            self.sizes.bind(name, self.sizes.value(size))
        computed = [name for name, _ in artifact.computed]
        known.update(computed)
        self._guard_sizes([size for size in self._all_sizes() if size.names <= known and not size.names.isdisjoint(computed)])
        for view in inputs:
            self._check_axes(view, self.sizes)
        if not artifact.is_sized:
            self._leave_small(inputs)
        late = self._checks(known, early=True)
        self._written_in_place(inputs)
        self.settle()
        self._outputs(out, inputs)
        self._guard_sizes([size for size in self._all_sizes() if not size.names <= known])
        if late:
            self._checks(known, early=False)
            self.settle()
        self._scratch_extents()
        self._create(out)
        self._launch_all(out)
        self._return(out)
        self._interrupted(out)
        return self.lines

    def _allocate_frame(self) -> None:
        """Stack memory must be asked for in the first block to have a fixed place in the frame."""
        slots = max((len(x.args) + len(x.sizes) + bool(x.asserts) for x in self.artifact.launches), default=0)
        if self.reports:
            self.line(f"%reports = alloca [{self.reports} x i64], align 8")
        self.line(f"%slots = alloca [{max(slots, 1)} x i64], align 8")
        rank = max((len(o.shape) for o in self.artifact.outputs), default=0)
        self.line(f"%dims = alloca [{max(rank, 1)} x i64], align 8")
        self.line("%converted = alloca i64, align 8")
        for i in range(len(self.artifact.outputs)):
            self.line(f"%object.{i} = alloca ptr, align 8")
            self.line(f"%data.{i} = alloca ptr, align 8")
        if self.artifact.scratch:
            self.line(f"%stack.scratch = alloca [{STACK_SCRATCH} x i8], align {abi.SCRATCH_ALIGN}")
            self.line("%heap = alloca ptr, align 8")

    def _keyword(self) -> str:
        """Count the positional arguments and find `out=`; null when it was not given."""
        count = len(self.artifact.inputs) + len(self.artifact.absent)
        self.require(self.equal("i64", "%count", str(count)))
        self.settle()
        before = self.current
        self.fork(self.new("icmp ne ptr %names, null"), "keywords", "arguments")
        self.start("keywords")
        if not self.artifact.outputs:
            self.jump("reject")
            self.start("arguments")
            return "null"
        self.require(self.equal("i64", self.load("i64", "%names", at.TUPLE_SIZE), "1"))
        self.settle()
        key = self.load("ptr", "%names", at.TUPLE_ITEMS)
        self.fork(self.equal("ptr", key, "@tilewright_name_out"), "out.found", "keyword.compare")
        self.start("keyword.compare")
        order = self.new(f"call i32 @PyUnicode_CompareWithASCIIString(ptr {key}, ptr @out.text)")
        self.require(self.equal("i32", order, "0"))
        self.settle()
        self.jump("out.found")
        self.start("out.found")
        found = self.load("ptr", "%args", 8 * count)
        self.jump("arguments")
        self.start("arguments")
        return self.new(f"phi ptr [ null, %{before} ], [ {found}, %out.found ]")

    def _scalar(self, param: ScalarParam, argument: str) -> None:
        dtype = param.dtype
        if dtype.is_bool:
            yes = self.equal("ptr", argument, "@_Py_TrueStruct")
            no = self.equal("ptr", argument, "@_Py_FalseStruct")
            self.require(self.new(f"or i1 {yes}, {no}"))
            self.settle()
            self.scalars[param.name] = ("i64", self.new(f"zext i1 {yes} to i64"))
            return
        if param.typed:
            self._typed_scalar(param, argument)
            return
        function = "float_argument" if dtype.is_float else "int_argument"
        self.require(self.new(f"call i1 @{function}(ptr {argument}, ptr %converted)"))
        self.settle()
        if dtype.is_float:
            value = self.new("load double, ptr %converted")
            if dtype.bits == 32:
                value = self.new(f"fptrunc double {value} to float")
            self.scalars[param.name] = ("float" if dtype.bits == 32 else "double", value)
            return
        value = self.new("load i64, ptr %converted")
        # Values of u64 beyond i64 are for the slow path.
        low = 0 if dtype.kind == "u" else -(1 << (dtype.bits - 1))
        high = min((1 << (dtype.bits - (dtype.kind == "i"))) - 1, (1 << 63) - 1)
        self.require(self.new(f"icmp sge i64 {value}, {low}"))
        self.require(self.new(f"icmp sle i64 {value}, {high}"))
        self.settle()
        self._bind_number(param, value)

    def _bind_number(self, param: ScalarParam, value: str) -> None:
        """A whole number, as a value and as a part of sizes."""
        self.scalars[param.name] = ("i64", value)
        self.sizes.bind(param.name, value)
        self.sizes.bind(number_name(param.name), value)

    def _typed_scalar(self, param: ScalarParam, argument: str) -> None:
        """A number of NumPy of just that type: the value lies behind the header."""
        dtype = param.dtype
        self.require(self.equal("ptr", self.load("ptr", argument, at.TYPE), f"@tilewright_number_{dtype.name}"))
        self.settle()
        if dtype.is_float:
            kind = "float" if dtype.bits == 32 else "double"
            self.scalars[param.name] = (kind, self.load(kind, argument, at.FLOAT_VALUE))
            return
        value = self.load(f"i{dtype.bits}", argument, at.FLOAT_VALUE)
        if dtype.bits < 64:
            value = self.new(f"{'zext' if dtype.kind == 'u' else 'sext'} i{dtype.bits} {value} to i64")
        elif dtype.kind == "u":
            self.require(self.new(f"icmp sge i64 {value}, 0"))  # larger ones are for the slow path
            self.settle()
        self._bind_number(param, value)

    def _array(self, param: ArrayParam, argument: str, flags: int) -> _View:
        """Check what can be checked without sizes, and read the fields."""
        contiguous = is_contiguous(param)
        if contiguous:
            flags |= at.C_CONTIGUOUS
        self.require(self.equal("ptr", self.load("ptr", argument, at.TYPE), "@tilewright_ndarray"))
        self.settle()
        descr = self.load("ptr", argument, at.ARRAY_DESCR)
        self.require(self.equal("ptr", descr, f"@tilewright_descr_{param.dtype.name}"))
        self.require(self.equal("i32", self.load("i32", argument, at.ARRAY_RANK), str(len(param.shape))))
        masked = self.new(f"and i32 {self.load('i32', argument, at.ARRAY_FLAGS)}, {flags}")
        self.require(self.equal("i32", masked, str(flags)))
        self.settle()
        data = self.load("ptr", argument, at.ARRAY_DATA)
        self.data[param.name] = data
        self._require_alignment(param, data)
        if not param.shape:
            return _View(param, data, (), (), ())
        shape = self.load("ptr", argument, at.ARRAY_SHAPE)
        extents = tuple(self.load("i64", shape, 8 * axis) for axis in range(len(param.shape)))
        if contiguous:
            return _View(param, data, extents, (), ())
        strides_at = self.load("ptr", argument, at.ARRAY_STRIDES)
        strides = tuple(self.load("i64", strides_at, 8 * axis) for axis in range(len(param.shape)))
        return _View(param, data, extents, strides, tuple(self._elements(s, param.dtype.itemsize) for s in strides))

    def _elements(self, stride: str, itemsize: int) -> str:
        """A stride in bytes as one in elements; it must divide."""
        if itemsize == 1:
            return stride
        # Item sizes are powers of two.
        self.require(self.equal("i64", self.new(f"and i64 {stride}, {itemsize - 1}"), "0"))
        return self.new(f"ashr i64 {stride}, {itemsize.bit_length() - 1}")

    def _require_alignment(self, param: ArrayParam, data: str) -> None:
        if param.align > 1:
            address = self.new(f"ptrtoint ptr {data} to i64")
            self.require(self.equal("i64", self.new(f"and i64 {address}, {param.align - 1}"), "0"))

    def _bind(self, view: _View, sizes: SizeEmitter) -> None:
        for axis in range(len(view.extents)):
            name = self.bound.get((view.param.name, axis, False))
            if name is not None:
                sizes.bind(name, view.extents[axis])
            name = self.bound.get((view.param.name, axis, True))
            if name is not None:
                step = view.steps[axis] if view.steps else sizes.product(list(view.extents[axis + 1 :]))
                sizes.bind(name, step)

    def _all_sizes(self) -> list[Size]:
        """Every size that the stub computes: for checks, results, scratch, blocks and work."""
        artifact, launches = self.artifact, self.artifact.launches
        arrays = [p for p in (*artifact.inputs, *artifact.outputs, *artifact.scratch) if isinstance(p, ArrayParam)]
        offsets, total = self._scratch_layout()
        work = sum((product(x.grid) * x.work for x in launches), Size.of(0))
        return [
            *(size for _, size in artifact.computed), *(size for p in arrays for size in (*p.shape, *p.strides)), *(size for c in artifact.checks for size in (c.left, c.right)),
            *self.scratch_bytes, *offsets, total + abi.SCRATCH_ALIGN, *(product(x.grid) for x in launches), *(x.work for x in launches), work,
        ]  # fmt: skip

    def _guard_sizes(self, sizes: list[Size]) -> None:
        """Refuse calls for which one of the sizes leaves 64 bits on its way. Where all names are small none can; only where one is large all
        are computed an extra time, each step checked."""
        sizes = [size for size in dict.fromkeys(sizes) if size.constant is None or not -(1 << 62) < size.constant < 1 << 62]
        names = sorted(frozenset[str]().union(*(size.names for size in sizes)))
        if not sizes:
            return
        axes = {b.name for b in self.artifact.bindings if not b.stride}
        reach = "0"
        for name in names:
            value = self.sizes.values[name]
            if name not in axes:
                value = self.new(f"xor i64 {value}, {self.new(f'ashr i64 {value}, 63')}")  # as large, and not negative
            reach = self.new(f"or i64 {reach}, {value}") if reach != "0" else value
        careful, fine = self.fresh_label("careful"), self.fresh_label("fine")
        self.settle()
        self.fork(self.new(f"icmp ult i64 {reach}, {names_bound(sizes)}"), fine, careful)
        self.start(careful)
        emitter = SizeEmitter(self.lines, self.sizes.values, careful.replace(".", "_"), checked=True)
        for size in sizes:
            emitter.value(size)
        for overflow in emitter.take_overflows():
            self.require(self.new(f"xor i1 {overflow}, true"))
        self.settle()
        self.jump(fine)
        self.start(fine)

    def _check_axes(self, view: _View, sizes: SizeEmitter) -> None:
        """Extents and strides that no name was bound to must be what the parameter says."""
        for axis, extent in enumerate(view.extents):
            if (view.param.name, axis, False) not in self.bound:
                self.require(self.equal("i64", extent, sizes.value(view.param.shape[axis])))
            if view.steps and (view.param.name, axis, True) not in self.bound:
                fits = self.equal("i64", view.steps[axis], sizes.value(view.param.strides[axis]))
                # The stride of an axis with one element is never used, and NumPy leaves anything in it.
                unused = self.new(f"icmp sle i64 {extent}, 1")
                self.require(self.new(f"or i1 {fits}, {unused}"))

    def _checks(self, known: set[str], early: bool) -> bool:
        """Emit the call checks and facts whose names are known early (or the others). Whether others are left."""
        others = False
        for check in self.artifact.checks:
            if (check.left.names | check.right.names <= known) == early:
                self._check(check)
            else:
                others = True
        for name, divisor in self.artifact.facts:
            if (name in known) == early:
                self.require(self.equal("i64", self.sizes.value(Size.of(name) % divisor), "0"))
            else:
                others = True
        return others

    def _leave_small(self, inputs: list[_View]) -> None:
        """Calls with short sums and many elements are for code that is made for these."""
        views = {view.param.name: view for view in inputs}
        few: list[str] = []
        for nest in self.artifact.small:
            large = "false"
            for name, axis in nest.sums:
                beyond = self.new(f"icmp ugt i64 {self.new(f'sub i64 {views[name].extents[axis]}, 1')}, {nest.most - 1}")
                large = self.new(f"or i1 {large}, {beyond}")
            few.append(large)
        if not few:
            return
        elements = "0"
        for view in inputs:
            count = "1"
            for extent in view.extents:
                count = self.new(f"mul i64 {count}, {extent}")
            elements = self.new(f"add i64 {elements}, {count}")
        is_light = self.new(f"icmp ult i64 {elements}, {SMALL_MANY}")
        for large in few:
            self.require(self.new(f"or i1 {is_light}, {large}"))

    def _check(self, check: CallCheck) -> None:
        left, right = self.sizes.value(check.left), self.sizes.value(check.right)
        self.require(self.new(f"icmp {_RELATIONS[check.relation]} i64 {left}, {right}"))

    # -- outputs ------------------------------------------------------------------------------------------------

    def _outputs(self, out: str, inputs: list[_View]) -> None:
        """Check the arrays given by `out=`; bind the strides of given and of new outputs alike."""
        if not self.artifact.outputs:
            return
        given = self.new(f"icmp ne ptr {out}, null")
        if self.out_required:
            # Only the output itself says how large it is.
            self.require(given)
            self.settle()
            self._given(out, inputs, self.sizes)
            self.settle()
            return
        for output in self.artifact.outputs:
            for extent in output.shape:
                self.sizes.value(extent)
        self.fork(given, "out.given", "out.new")

        self.start("out.given")
        given_sizes = self.sizes.branch()
        self._given(out, inputs, given_sizes)
        self.settle()
        given_end = self.current
        self.jump("out.known")

        self.start("out.new")
        new_sizes = self.sizes.branch()
        for i, output in enumerate(self.artifact.outputs):
            self._new_strides(i, output, new_sizes)
        self.settle()
        new_end = self.current
        self.jump("out.known")

        self.start("out.known")
        for binding in self.output_strides:
            a, b = given_sizes.values[binding.name], new_sizes.values[binding.name]
            self.sizes.bind(binding.name, self.new(f"phi i64 [ {a}, %{given_end} ], [ {b}, %{new_end} ]"))

    def _given(self, out: str, inputs: list[_View], sizes: SizeEmitter) -> None:
        outputs = self.artifact.outputs
        if len(outputs) == 1:
            objects = [out]
        else:
            self.require(self.equal("ptr", self.load("ptr", out, at.TYPE), "@PyTuple_Type"))
            self.settle()
            self.require(self.equal("i64", self.load("i64", out, at.TUPLE_SIZE), str(len(outputs))))
            self.settle()
            objects = [self.load("ptr", out, at.TUPLE_ITEMS + 8 * i) for i in range(len(outputs))]
        views: list[_View] = []
        for i, (output, item) in enumerate(zip(outputs, objects)):
            view = self._array(output, item, at.ALIGNED | at.WRITEABLE)
            self._bind(view, sizes)
            views.append(view)
            self.line(f"store ptr {item}, ptr %object.{i}")
            self.line(f"store ptr {view.data}, ptr %data.{i}")
        for view in views:
            self._check_axes(view, sizes)
        ranges = {view.param.name: self._range(view) for view in (*inputs, *views)}
        for i, view in enumerate(views):
            safe: list[str] = []
            for extent, stride in zip(view.extents, view.strides):
                # A zero stride would write one element many times.
                moves = self.new(f"icmp ne i64 {stride}, 0")
                safe.append(self.new(f"or i1 {moves}, {self.new(f'icmp sle i64 {extent}, 1')}"))
            for other in views[:i]:
                safe.append(self._disjoint(ranges[view.param.name], ranges[other.param.name]))
            for other in inputs:
                apart = self._disjoint(ranges[view.param.name], ranges[other.param.name])
                safe.append(self._or_same(apart, view, other) if self.artifact.alias_safe else apart)
            # Where nothing is written nothing can go wrong, and NumPy's strides of empty arrays say nothing.
            empty = self.equal("i64", self.sizes.product(list(view.extents)), "0")
            for condition in safe:
                self.require(self.new(f"or i1 {empty}, {condition}"))

    def _written_in_place(self, inputs: list[_View]) -> None:
        """Arrays that are written where they lie share no memory with others, nor their elements with each other."""
        written = [view for view in inputs if view.param.role == "inout"]
        ranges = {view.param.name: self._range(view) for view in inputs} if written else {}
        for position, view in enumerate(written):
            for other in (*written[position + 1 :], *(v for v in inputs if v.param.role != "inout")):
                self.require(self._disjoint(ranges[view.param.name], ranges[other.param.name]))
            self._elements_apart(view)

    def _elements_apart(self, view: _View) -> None:
        """Each stride reaches beyond all that smaller ones do."""
        sizes = [self.new(f"call i64 @llvm.smax.i64(i64 {stride}, i64 {self.new(f'sub i64 0, {stride}')})") for stride in view.strides]
        reaches = [
            self.new(f"mul i64 {size}, {self.new(f'sub i64 {extent}, 1')}") for size, extent in zip(sizes, view.extents)
        ]
        for axis, (size, extent) in enumerate(zip(sizes, view.extents)):
            below = "0"
            for other, reach in enumerate(reaches):
                if other != axis:
                    smaller = self.new(f"icmp {'ule' if other < axis else 'ult'} i64 {sizes[other]}, {size}")
                    below = self.new(f"add i64 {below}, {self.new(f'select i1 {smaller}, i64 {reach}, i64 0')}")
            one = self.new(f"icmp sle i64 {extent}, 1")
            self.require(self.new(f"or i1 {one}, {self.new(f'icmp sgt i64 {size}, {below}')}"))

    def _range(self, view: _View) -> tuple[str, str]:
        """First byte and the byte after the last, as integers."""
        start = self.new(f"ptrtoint ptr {view.data} to i64")
        itemsize = view.param.dtype.itemsize
        if not view.strides:
            length = self.sizes.product([*view.extents, str(itemsize)])
            return start, self.new(f"add i64 {start}, {length}")
        low, high = start, self.new(f"add i64 {start}, {itemsize}")
        for extent, stride in zip(view.extents, view.strides):
            reach = self.new(f"mul i64 {self.new(f'sub i64 {extent}, 1')}, {stride}")
            down = self.new(f"call i64 @llvm.smin.i64(i64 {reach}, i64 0)")
            up = self.new(f"call i64 @llvm.smax.i64(i64 {reach}, i64 0)")
            low, high = self.new(f"add i64 {low}, {down}"), self.new(f"add i64 {high}, {up}")
        return low, high

    def _disjoint(self, a: tuple[str, str], b: tuple[str, str]) -> str:
        before = self.new(f"icmp ule i64 {a[1]}, {b[0]}")
        after = self.new(f"icmp ule i64 {b[1]}, {a[0]}")
        return self.new(f"or i1 {before}, {after}")

    def _or_same(self, apart: str, view: _View, other: _View) -> str:
        """Whether they are apart or the very same elements in the same order."""
        same_kind = view.param.dtype.itemsize == other.param.dtype.itemsize
        # Of two arrays of which only one is declared contiguous, the strides are not all at hand; that pair is refused.
        if len(view.extents) != len(other.extents) or not same_kind or bool(view.strides) != bool(other.strides):
            return apart
        same = self.equal("ptr", view.data, other.data)
        for a, b in (*zip(view.extents, other.extents), *zip(view.strides, other.strides)):
            same = self.new(f"and i1 {same}, {self.equal('i64', a, b)}")
        return self.new(f"or i1 {apart}, {same}")

    def _new_strides(self, index: int, output: ArrayParam, sizes: SizeEmitter) -> None:
        """A new output is contiguous: bind or check its strides as such."""
        self.line(f"store ptr null, ptr %object.{index}")
        extents = [sizes.value(e) for e in output.shape]
        for extent in extents:
            self.require(self.new(f"icmp sge i64 {extent}, 0"))
        if is_contiguous(output) and not any(b.array == output.name for b in self.output_strides):
            return
        for axis, extent in enumerate(extents):
            step = sizes.product(extents[axis + 1 :])
            name = self.bound.get((output.name, axis, True))
            if name is not None:
                sizes.bind(name, step)
            else:
                fits = self.equal("i64", step, sizes.value(output.strides[axis]))
                self.require(self.new(f"or i1 {fits}, {self.new(f'icmp sle i64 {extent}, 1')}"))

    def _create(self, out: str) -> None:
        """Make the outputs that were not given. From here on only memory can fail."""
        outputs = self.artifact.outputs
        if not outputs or self.out_required:
            self._load_output_data()
            return
        self.fork(self.new(f"icmp eq ptr {out}, null"), "create", "ready")
        self.start("create")
        for i in range(len(outputs)):
            self.line(f"store ptr null, ptr %object.{i}")
        create = self.new(f"load ptr, ptr getelementptr (i8, ptr @tilewright_numpy_api, i64 {8 * at.NUMPY_EMPTY})")
        for i, output in enumerate(outputs):
            for axis, extent in enumerate(output.shape):
                place = self.new(f"getelementptr i64, ptr %dims, i64 {axis}")
                self.line(f"store i64 {self.sizes.value(extent)}, ptr {place}")
            descr = f"@tilewright_descr_{output.dtype.name}"
            self.line(f"call void @Py_IncRef(ptr {descr})")  # the array takes this reference
            made = self.new(f"call ptr {create}(i32 {len(output.shape)}, ptr %dims, ptr {descr}, i32 0)")
            self.line(f"store ptr {made}, ptr %object.{i}")
            self.require(self.new(f"icmp ne ptr {made}, null"))
            self.settle("exhausted")
            data = self.load("ptr", made, at.ARRAY_DATA)
            self.line(f"store ptr {data}, ptr %data.{i}")
            self._require_alignment(output, data)
            self.settle("withdraw")
        self.jump("ready")
        self.start("exhausted")  # the slow path says what was wanted
        self.line("call void @PyErr_Clear()")
        self.jump("withdraw")
        self.start("withdraw")
        self._drop_outputs()
        self.jump("reject")
        self.start("ready")
        self._load_output_data()

    def _load_output_data(self) -> None:
        for i, output in enumerate(self.artifact.outputs):
            self.data[output.name] = self.new(f"load ptr, ptr %data.{i}")

    def _drop_outputs(self) -> None:
        for i in range(len(self.artifact.outputs)):
            self.line(f"call void @Py_DecRef(ptr {self.new(f'load ptr, ptr %object.{i}')})")

    # -- running ------------------------------------------------------------------------------------------------

    def _scratch_extents(self) -> None:
        """Extents of scratch arrays must not be negative, while the call can be refused."""
        axes = {b.name for b in self.artifact.bindings if not b.stride}
        for extent in dict.fromkeys(e for p in self.artifact.scratch for e in p.shape):
            if extent.constant is None and extent.name not in axes:
                self.require(self.new(f"icmp sge i64 {self.sizes.value(extent)}, 0"))
        self.settle()

    def _scratch_layout(self) -> tuple[list[Size], Size]:
        """Where each scratch array begins, in bytes, and how many all take."""
        offsets: list[Size] = []
        total = Size.of(0)
        for size in self.scratch_bytes:
            offsets.append(total)
            total = total + (size + (abi.SCRATCH_ALIGN - 1)) // abi.SCRATCH_ALIGN * abi.SCRATCH_ALIGN
        return offsets, total

    def _scratch(self) -> None:
        """Give every scratch array its place: on the stack when all of them are small, else in one block of memory."""
        if not self.artifact.scratch:
            return
        places, total = self._scratch_layout()
        offsets = [self.sizes.value(place) for place in places]
        amount = self.sizes.value(total)
        self.line("store ptr null, ptr %heap")
        before = self.current
        self.fork(self.new(f"icmp sle i64 {amount}, {STACK_SCRATCH}"), "scratch.ready", "scratch.heap")
        self.start("scratch.heap")
        block = self.new(f"call ptr @{abi.TAKE}(i64 {self.sizes.value(total + abi.SCRATCH_ALIGN)})")
        self.line(f"store ptr {block}, ptr %heap")
        self.require(self.new(f"icmp ne ptr {block}, null"))
        self.settle("out.of.memory")
        address = self.new(f"ptrtoint ptr {block} to i64")
        padding = self.new(f"and i64 {self.new(f'sub i64 0, {address}')}, {abi.SCRATCH_ALIGN - 1}")
        aligned = self.new(f"getelementptr i8, ptr {block}, i64 {padding}")
        after = self.current
        self.jump("scratch.ready")
        self.start("scratch.ready")
        base = self.new(f"phi ptr [ %stack.scratch, %{before} ], [ {aligned}, %{after} ]")
        for param, offset in zip(self.artifact.scratch, offsets):
            self.data[param.name] = self.new(f"getelementptr i8, ptr {base}, i64 {offset}")

    def _launch_all(self, out: str) -> None:
        launches = self.artifact.launches
        self._scratch()
        for position in range(self.reports):
            self.line(f"store i64 0, ptr {self._report(position)}")
        if self.artifact.sites:
            self.line(f"store i64 0, ptr {self.data[FAILURE]}")
        blocks = [self.sizes.value(product(x.grid)) for x in launches]
        total = self.sizes.value(sum((product(x.grid) * x.work for x in launches), Size.of(0)))
        before = self.current
        self.fork(self.new(f"icmp sge i64 {total}, {abi.RELEASE_WORK}"), "large", "run")
        self.start("large")
        started = self.new(f"getelementptr i8, ptr @tilewright_pool, i64 {abi.POOL_STARTED}")
        ready = self.new(f"icmp ne i32 {self.new(f'load atomic i32, ptr {started} monotonic, align 4')}, 0")
        self.fork(ready, "release", "start.pool")
        self.start("start.pool")
        self.line("call void @tilewright_pool_start()")
        self.jump("release")
        self.start("release")
        count = self.new("call i32 @tilewright_interrupt_begin()")
        state = self.new("call ptr @PyEval_SaveThread()")
        self.jump("run")
        self.start("run")
        saved = self.new(f"phi ptr [ null, %{before} ], [ {state}, %release ]")
        interrupts = self.new(f"phi i32 [ 0, %{before} ], [ {count}, %release ]")
        failing = [launch for launch in launches if launch.asserts]
        for launch, count in zip(launches, blocks):
            self._launch(launch, count, failing.index(launch) if launch.asserts else -1)
        self.fork(self.new(f"icmp eq ptr {saved}, null"), "kept", "regain")
        self.start("kept")
        # The main thread's long call may be leaving for Ctrl-C, and kernels of this thread with it.
        asked = self.new(f"load atomic i32, ptr @{abi.STOP} monotonic, align 4")
        self.fork(self.equal("i32", asked, "0"), "ran", "interrupted")
        self.start("regain")
        self.line(f"call void @PyEval_RestoreThread(ptr {saved})")
        stopped = self.new(f"call i32 @tilewright_interrupt_end(i32 {interrupts})")
        self.fork(self.equal("i32", stopped, "0"), "ran", "interrupted")
        self.start("ran")
        found = [self.load("i64", self.data[FAILURE], 8 * field) for field in range(self.fields)] if self.artifact.sites else []
        self._free_scratch()
        reports = [self.new(f"load i64, ptr {self._report(position)}") for position in range(self.reports)]
        if self.artifact.in_place:
            for launch, word in zip(failing, reports):
                # In the place of the site, none; then what was reported, and by which launch.
                self._raise(f"starved.{launches.index(launch)}", {FAILURE_SITE: "0", FAILURE_INDEX: word, FAILURE_EXTENT: str(launches.index(launch))}, word, out)
        elif reports:
            for word in reports:
                self.require(self.equal("i64", word, "0"))
            self.settle("out.of.memory")
        if found:
            self._raise("outside", dict(enumerate(found)), found[FAILURE_SITE], out)

    def _free_scratch(self) -> None:
        if self.artifact.scratch:
            self.line(f"call void @{abi.GIVE}(ptr {self.new('load ptr, ptr %heap')})")

    def _report(self, position: int) -> str:
        """Where a launch reports that it failed."""
        return self.new(f"getelementptr i64, ptr %reports, i64 {position}")

    def _raise(self, label: str, found: Mapping[int, str], failed: str, out: str) -> None:
        """Where a word is not 0, an access lay outside its array, or a launch had no memory: the program's code says so, in Python."""
        self.fork(self.equal("i64", failed, "0"), f"{label}.not", label)
        self.start(label)
        if self.artifact.outputs and not self.out_required:
            # Given outputs belong to the caller.
            self.fork(self.equal("ptr", out, "null"), f"{label}.drop", f"{label}.kept")
            self.start(f"{label}.drop")
            self._drop_outputs()
            self.jump(f"{label}.kept")
            self.start(f"{label}.kept")
        kind = self.load("ptr", "%self", at.TYPE)
        before = self.current
        self.fork(self.equal("ptr", kind, "@PyTuple_Type"), f"{label}.pair", f"{label}.raise")
        self.start(f"{label}.pair")
        code = self.new("call ptr @PyTuple_GetItem(ptr %self, i64 0)")
        self.jump(f"{label}.raise")
        self.start(f"{label}.raise")
        code = self.new(f"phi ptr [ %self, %{before} ], [ {code}, %{label}.pair ]")
        values = ", ".join(f"i64 {value}" for _, value in sorted(found.items()))
        self.line(f"ret ptr {self.new(f'call ptr (ptr, ptr, ptr, ...) @PyObject_CallMethod(ptr {code}, ptr @outside.name, ptr @outside.fields, {values})')}")
        self.start(f"{label}.not")

    def _interrupted(self, out: str) -> None:
        """Ctrl-C came during a long call, and kernels left early: what handles it says what to raise."""
        self.start("interrupted")
        self._free_scratch()
        if self.artifact.outputs and not self.out_required:
            self.fork(self.new(f"icmp eq ptr {out}, null"), "interrupted.drop", "interrupted.raise")
            self.start("interrupted.drop")
            self._drop_outputs()
            self.jump("interrupted.raise")
            self.start("interrupted.raise")
        raised = self.new("call ptr @PyErr_Occurred()")
        self.fork(self.equal("ptr", raised, "null"), "interrupted.look", "interrupted.done")
        self.start("interrupted.look")
        handled = self.new("call i32 @PyErr_CheckSignals()")
        self.fork(self.equal("i32", handled, "0"), "interrupted.plain", "interrupted.done")
        self.start("interrupted.plain")
        self.line("call void @PyErr_SetNone(ptr @tilewright_keyboard_interrupt)")
        self.jump("interrupted.done")
        self.start("interrupted.done")
        self.line("ret ptr null")

    def _launch(self, launch: Launch, blocks: str, report: int) -> None:
        slots: list[tuple[str, str]] = []
        for name in launch.args:
            slots.append(self.scalars[name] if name in self.scalars else ("ptr", self.data[name]))
        slots += [("i64", self.sizes.value(Size.of(name))) for name in launch.sizes]
        if launch.asserts:
            slots.append(("ptr", self._report(report)))
        for index, (kind, value) in enumerate(slots):
            place = self.new(f"getelementptr i64, ptr %slots, i64 {index}")
            self.line(f"store {kind} {value}, ptr {place}")
        work = self.sizes.value(launch.work)
        entry = f'@"{launch.entry}"'
        self.line(f"call void @tilewright_launch(ptr @tilewright_pool, ptr {entry}, ptr %slots, i64 {blocks}, i64 {work})")

    # -- results ------------------------------------------------------------------------------------------------

    def _return(self, out: str) -> None:
        outputs = self.artifact.outputs
        if not outputs:
            self.line("call void @Py_IncRef(ptr @_Py_NoneStruct)")
            self.line("ret ptr @_Py_NoneStruct")
        else:
            if not self.out_required:
                self.fork(self.new(f"icmp eq ptr {out}, null"), "return.new", "return.given")
                self.start("return.new")
                self._return_new()
                self.start("return.given")
            self.line(f"call void @Py_IncRef(ptr {out})")
            self.line(f"ret ptr {out}")
        if self.artifact.scratch or self.reports:
            self.start("out.of.memory")
            if outputs and not self.out_required:
                # Given outputs belong to the caller.
                self.fork(self.new(f"icmp eq ptr {out}, null"), "memory.drop", "memory.refuse")
                self.start("memory.drop")
                self._drop_outputs()
                self.jump("memory.refuse")
                self.start("memory.refuse")
            self.jump("reject")  # the slow path says what was wanted
        if outputs and not self.out_required:
            self.start("fail")
            self._drop_outputs()
            self.line("ret ptr null")

    def _return_new(self) -> None:
        outputs = self.artifact.outputs
        items: list[str] = []
        if len(outputs) > 1:
            result = self.new(f"call ptr @PyTuple_New(i64 {len(outputs)})")
            self.require(self.new(f"icmp ne ptr {result}, null"))
            self.settle("fail")
        for i, output in enumerate(outputs):
            item = self.new(f"load ptr, ptr %object.{i}")
            if not output.shape:
                # Like NumPy, give a scalar for an array without axes.
                scalar = f"getelementptr (i8, ptr @tilewright_numpy_api, i64 {8 * at.NUMPY_RETURN})"
                item = self.new(f"call ptr {self.new(f'load ptr, ptr {scalar}')}(ptr {item})")
            items.append(item)
        if len(outputs) == 1:
            self.line(f"ret ptr {items[0]}")
            return
        for i, item in enumerate(items):
            self.new(f"call i32 @PyTuple_SetItem(ptr {result}, i64 {i}, ptr {item})")
        for item in items:
            self.require(self.new(f"icmp ne ptr {item}, null"))
        self.settle("return.failed")
        self.line(f"ret ptr {result}")
        self.start("return.failed")
        self.line(f"call void @Py_DecRef(ptr {result})")
        self.line("ret ptr null")
