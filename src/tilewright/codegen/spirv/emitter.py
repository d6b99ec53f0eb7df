"""Thread-stage IR -> SPIR-V assembly: one entry point for each kernel.

In: a thread-stage kernel and the module it becomes a part of. Out: its function in the module's text. A scalar is a SPIR-V number; a vec is a
tuple of vectors of lengths that the flavour has. Control flow is structured in the IR and stays so. OpenCL's kernels take numbers, and pointers
each with an offset in elements; Vulkan's take addresses and numbers of 64 bits each, by push constants, or where those are too many from memory
whose address is the one push constant there is.

    %v = load %x, %i {width = 4} : vec<f32, 4>   ->   %7 = OpInBoundsPtrAccessChain %p_CrossWorkgroup_f32 %x %i
                                                      %8 = OpBitcast %p_CrossWorkgroup_v4f32 %7
                                                      %9 = OpLoad %v4f32 %8 Aligned 16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size, SizeCall
from tilewright.codegen.spirv.division import floor_divide
from tilewright.codegen.spirv.module import OPENCL, ModuleText
from tilewright.ir.needs import element_count
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, Type, Vec, dtype_of

Parts = tuple[str, ...]
"""A value: its vectors, or the one number it is."""
_LINE = 64
STACK = 8 << 10
"""Bytes of an array that a thread keeps on its stack."""
INTRINSICS = {"fma": "llvm.fma", "floor": "llvm.floor", "ceil": "llvm.ceil", "round": "llvm.rint", "trunc": "llvm.trunc", "sqrt": "llvm.sqrt", "abs": "llvm.fabs"}
"""Functions that LLVM has as instructions. A driver that takes SPIR knows them by these names; its own library's are calls, one for each vector."""
PUSHED = 128
"""Bytes of push constants that every Vulkan device has."""


def width_of(type_: Type) -> int:
    return type_.width if isinstance(type_, Vec) else 1


def chunks(width: int, allowed: Sequence[int]) -> list[int]:
    """The lengths of the vectors that hold so many elements."""
    found: list[int] = []
    while width:
        part = next((w for w in allowed if w <= width), 1)
        found.append(part)
        width -= part
    return found


class KernelText:
    """Writes the function of one kernel."""

    def __init__(self, module: ModuleText, kernel: Kernel, entry: str, handlers: Mapping[str, Callable[[KernelText, Op], Sequence[Parts]]], simt: bool) -> None:
        self.module, self.kernel, self.flavour, self.handlers = module, kernel, module.flavour, handlers
        self.simt = simt
        self._block_bytes = 0
        """Bytes of the block's memory that the kernel has taken."""
        self.lines: list[str] = []
        self.variables: list[str] = []
        """Memory of the function's own, which comes before all else."""
        self.first: list[str] = []
        """What follows it: numbers the device knows."""
        self.names: dict[Value, Parts] = {}
        self.memory: dict[Value, str] = {}
        """The pointer or the address of each tensor."""
        self.sizes: dict[Size, str] = {}
        self.size_names: dict[str, str] = {}
        self.interface: list[str] = []
        self.label = self.pushed = ""
        self._builtins: dict[tuple[str, int], str] = {}
        self._write(entry)

    # -- small helpers --------------------------------------------------------------------------------------------------

    def let(self, op: str, kind: str, *operands: str) -> str:
        """Append an instruction and name its result."""
        name = self.module.fresh()
        self.lines.append(f"{name} = {op} {kind} {' '.join(operands)}")
        return name

    def line(self, text: str) -> None:
        self.lines.append(text)

    def open(self, label: str) -> None:
        self.lines.append(f"{label} = OpLabel")
        self.label = label

    def widths(self, type_: Type) -> list[int]:
        return chunks(width_of(type_), self.module.widths)

    def type(self, dtype: DType, width: int = 1) -> str:
        return self.module.type(self.module.element(dtype), width)

    def const(self, dtype: DType, value: int | float | bool, width: int = 1) -> str:
        """A constant; one of a float that is kept as an integer is its bits."""
        element = self.module.element(dtype)
        if dtype.is_float and element[0] == "i":
            import numpy as np

            value = int(np.array(value).astype(dtype.numpy).view(f"u{dtype.itemsize}"))
        return self.module.constant(element, value, width)

    def index(self, value: int) -> str:
        return self.module.constant("i64", value)

    def each(self, op: str, type_: Type, *operands: Parts, decorate: bool = False) -> Parts:
        """An instruction on each of the vectors of a value."""
        element = self.module.element(dtype_of(type_))
        found = tuple(
            self.let(op, self.module.type(element, width), *parts) for width, *parts in zip(self.widths(type_), *operands, strict=True)
        )
        if decorate and self.flavour is not OPENCL:
            self.module.decorations += [f"OpDecorate {name} NoContraction" for name in found]
        return found

    def function(self, name: str, type_: Type, *operands: Parts) -> Parts:
        """A function of the flavour's set."""
        word = dict(self.flavour.names).get(name, name)
        if self.module.spir and name in INTRINSICS:
            element = self.module.element(dtype_of(type_))
            return tuple(self._call(INTRINSICS[name], element, width, parts) for width, *parts in zip(self.widths(type_), *operands, strict=True))
        return self.each("OpExtInst", type_, *self._prefixed(f"%functions {word}", type_), *operands)

    def _call(self, name: str, element: str, width: int, operands: Sequence[str]) -> str:
        """An intrinsic function of LLVM, by name."""
        kind = self.module.type(element, width)
        suffix = f"v{width}{element}" if width > 1 else element
        return self.let("OpFunctionCall", kind, self.module.imported(f"{name}.{suffix}", kind, len(operands)), *operands)

    def _prefixed(self, text: str, type_: Type) -> tuple[Parts]:
        return ((text,) * len(self.widths(type_)),)

    def filled(self, scalar: str, type_: Type) -> Parts:
        """A number in all elements."""
        element = self.module.element(dtype_of(type_))
        constant = self.module.value_of(scalar)
        if constant is not None:
            return tuple(self.module.constant(element, constant, width) for width in self.widths(type_))
        made: dict[int, str] = {1: scalar}
        for width in self.widths(type_):
            if width not in made:
                made[width] = self.vector(element, (scalar,) * width)
        return tuple(made[width] for width in self.widths(type_))

    def vector(self, element: str, lanes: Sequence[str]) -> str:
        """A vector of numbers. For OpenCL it is put together one by one: translators to LLVM's form take no others apart than constants."""
        kind = self.module.type(element, len(lanes))
        if self.flavour is not OPENCL:
            return self.let("OpCompositeConstruct", kind, *lanes)
        whole = self.module.undefined(kind)
        if len({*lanes}) == 1:
            one = self.let("OpCompositeInsert", kind, lanes[0], whole, "0")
            return self.let("OpVectorShuffle", kind, one, one, *("0",) * len(lanes))
        for lane, value in enumerate(lanes):
            whole = self.let("OpCompositeInsert", kind, value, whole, str(lane))
        return whole

    def splat(self, value: int | float | bool, type_: Type) -> Parts:
        return tuple(self.const(dtype_of(type_), value, width) for width in self.widths(type_))

    def lanes(self, value: Parts, type_: Type) -> list[str]:
        """The elements, one by one."""
        kind = self.type(dtype_of(type_))
        found: list[str] = []
        for part, width in zip(value, self.widths(type_), strict=True):
            found += [part] if width == 1 else [self.let("OpCompositeExtract", kind, part, str(lane)) for lane in range(width)]
        return found

    def lane(self, value: Parts, type_: Type, lane: int) -> str:
        for part, width in zip(value, self.widths(type_), strict=True):
            if lane < width:
                return part if width == 1 else self.let("OpCompositeExtract", self.type(dtype_of(type_)), part, str(lane))
            lane -= width
        raise CompilerBug.at("TW040", f"no element {lane} of {type_}")

    def packed(self, lanes: Sequence[str], type_: Type) -> Parts:
        """Numbers as a vec."""
        element, found, start = self.module.element(dtype_of(type_)), [], 0
        for width in self.widths(type_):
            part = tuple(lanes[start : start + width])
            start += width
            if width == 1:
                found.append(part[0])
            elif all(self.module.value_of(one) is not None for one in part):
                found.append(self.module.composite(element, part))
            else:
                found.append(self.vector(element, part))
        return tuple(found)

    # -- the function ---------------------------------------------------------------------------------------------------

    def _write(self, entry: str) -> None:
        module, kernel = self.module, self.kernel
        void, name = module.void(), f"%{entry}"
        params = self._take_parameters() if self.flavour is OPENCL else self._take_addresses()
        opening = self.label = module.fresh()
        if self.flavour is not OPENCL:
            self._read_addresses()
        self._bools()
        self._prepare_sizes()
        self.block(kernel.body)
        self.line("OpReturn")
        kind = module.function_type(void, tuple(type_ for type_, _ in params))
        module.functions += [
            f"{name} = OpFunction {void} None {kind}", *(f"{param} = OpFunctionParameter {type_}" for type_, param in params),
            f"{opening} = OpLabel", *self.variables, *self.first, *self.lines, "OpFunctionEnd",
        ]  # fmt: skip
        interface = "".join(f" {variable}" for variable in dict.fromkeys(self.interface))
        module.entries.append(f'OpEntryPoint {self.flavour.model} {name} "{entry}"{interface}')
        module.modes.append(f"OpExecutionMode {name} LocalSize {kernel.threads} 1 1")
        if self.flavour is OPENCL:
            module.modes.append(f"OpExecutionMode {name} ContractionOff")
        elif module.preserves:
            module.capabilities.add("SignedZeroInfNanPreserve")
            module.modes.append(f"OpExecutionMode {name} SignedZeroInfNanPreserve 32")
        if self.flavour is not OPENCL and module.half:
            for mode, bits in module.half_modes:
                module.capabilities.add(mode)
                module.modes.append(f"OpExecutionMode {name} {mode} {bits}")

    def _take_parameters(self) -> list[tuple[str, str]]:
        """OpenCL: pointers, numbers, sizes; types and names."""
        module = self.module
        params: list[tuple[str, str]] = []
        written = {op.operands[0] for op in walk(self.kernel.body) if op.opcode in ("store", "atomic", "atomic_store", "report", "scatter", "store_lanes")}
        shares = not self.kernel.attrs.get("noalias", True)
        for param in self.kernel.params:
            name = module.fresh()
            if isinstance(param.type, Tensor):
                kind = module.pointer(self.flavour.global_class, module.type(module.stored(param.type.dtype)))
                if not self.kernel.attrs.get("aliased") and not (shares and param in written):
                    module.decorations.append(f"OpDecorate {name} FuncParamAttr NoAlias")
            else:
                dtype = dtype_of(param.type)
                kind = module.type(module.stored(dtype))
                self.names[param] = (name,)
            params.append((kind, name))
            if isinstance(param.type, Tensor):
                offset = module.fresh()
                params.append((module.type("i64"), offset))
                # Offsets count elements: memory of OpenCL is opaque, and arrays begin anywhere in it.
                self.memory[param] = self.let("OpInBoundsPtrAccessChain", kind, name, offset)
        for size in self.kernel.size_names:
            self.size_names[size] = name = module.fresh()
            params.append((module.type("i64"), name))
        return params

    def _take_addresses(self) -> list[tuple[str, str]]:
        """Vulkan: the block of push constants, and no parameters."""
        module = self.module
        count = self.argument_count
        words = 1 if count * 8 > PUSHED else max(count, 1)
        kind = module.block_of_words(words)
        self.pushed = module.variable("PushConstant", kind)
        self.interface.append(self.pushed)
        return []

    @property
    def argument_count(self) -> int:
        return len(self.kernel.params) + len(self.kernel.size_names)

    def _read_addresses(self) -> None:
        module, word = self.module, self.module.type("i64")
        count = self.argument_count
        inside = module.pointer("PushConstant", word)
        if count * 8 > PUSHED:
            place = self.let("OpAccessChain", inside, self.pushed, module.constant("i32", 0))
            base = self.let("OpLoad", word, place)
            raw = []
            for k in range(count):
                at = self.let("OpIAdd", word, base, self.index(8 * k))
                pointer = self.let("OpConvertUToPtr", module.pointer("PhysicalStorageBuffer", word), at)
                raw.append(self.let("OpLoad", word, pointer, "Aligned", "8"))
        else:
            raw = [
                self.let("OpLoad", word, self.let("OpAccessChain", inside, self.pushed, module.constant("i32", k))) for k in range(count)
            ]
        for param, value in zip(self.kernel.params, raw, strict=False):
            if isinstance(param.type, Tensor):
                self.memory[param] = value
                continue
            element = module.stored(dtype_of(param.type))
            bits = int(element[1:])
            narrow = value if bits == 64 else self.let("OpUConvert", module.type(f"i{bits}"), value)
            self.names[param] = (narrow if element[0] == "i" else self.let("OpBitcast", module.type(element), narrow),)
        self.size_names = dict(zip(self.kernel.size_names, raw[len(self.kernel.params) :], strict=True))

    def _bools(self) -> None:
        for param in self.kernel.params:
            if isinstance(param.type, Scalar) and param.type.dtype.is_bool:
                (byte,) = self.names[param]
                self.names[param] = (self.let("OpINotEqual", self.module.type("bool"), byte, self.module.constant("i8", 0)),)

    # -- sizes ----------------------------------------------------------------------------------------------------------

    def _prepare_sizes(self) -> None:
        """Every symbolic size the body needs, once, at the function's start."""
        needed: set[Size] = set()
        for op in walk(self.kernel.body):
            if op.opcode == "grid_size":
                needed.update(self.kernel.grid)
            needed |= {attr for attr in op.attrs.values() if isinstance(attr, Size)}
            for operand in op.operands:
                if isinstance(operand.type, Tensor):
                    needed.update(operand.type.strides)
        for size in sorted(needed, key=str):
            self.size(size)

    def size(self, size: Size) -> str:
        """A size as a number of 64 bits."""
        known = self.sizes.get(size)
        if known is None:
            known = self.sizes[size] = self._sized(size)
        return known

    def _sized(self, size: Size) -> str:
        if size.constant is not None:
            return self.index(size.constant)
        if size.name is not None:
            return self.size_names[size.name]
        word, total = self.module.type("i64"), ""
        for monomial, factor in size.terms:
            term = ""
            for atom in monomial:
                value = self.size_names[atom] if isinstance(atom, str) else self._size_call(atom)
                term = self.let("OpIMul", word, term, value) if term else value
            if not term:
                term = self.index(factor)
            elif factor != 1:
                term = self.let("OpIMul", word, term, self.index(factor))
            total = self.let("OpIAdd", word, total, term) if total else term
        return total

    def _size_call(self, atom: SizeCall) -> str:
        a, b, word = self.size(atom.a), self.size(atom.b), self.module.type("i64")
        if atom.op in ("min", "max"):
            first = self.let("OpSLessThan" if atom.op == "min" else "OpSGreaterThan", self.module.type("bool"), a, b)
            return self.let("OpSelect", word, first, a, b)
        if atom.op == "ceildiv":
            negated = self.let("OpSNegate", word, a)
            return self.let("OpSNegate", word, floor_divide(self, negated, b, "i64", 1, True, False))
        return floor_divide(self, a, b, "i64", 1, True, atom.op == "mod")

    # -- control flow ---------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> list[Parts]:
        """Emit the ops; returns the operands of its `yield`."""
        for op in block.ops:
            if op.opcode == "yield":
                return [self.names[v] for v in op.operands]
            flow = _FLOW.get(op.opcode)
            if flow is not None:
                found: Sequence[Parts] = flow(self, op)
            else:
                handler = self.handlers.get(op.opcode)
                if handler is None:
                    raise CompilerBug.at("TW040", f"no SPIR-V for {op.opcode}", op.span)
                found = handler(self, op)
            for value, parts in zip(op.results, found, strict=True):
                self.names[value] = parts
        return []

    def phi(self, type_: Type, *ways: tuple[Parts, str]) -> Parts:
        """What a value is, by the block that control came from."""
        element = self.module.element(dtype_of(type_))
        return tuple(
            self.let("OpPhi", self.module.type(element, width), *(word for parts, label in ways for word in (parts[k], label)))
            for k, width in enumerate(self.widths(type_))
        )

    def choose(self, condition: str, then: Callable[[], Sequence[Parts]], otherwise: Callable[[], Sequence[Parts]], types: Sequence[Type]) -> list[Parts]:
        """`if`: what the taken side gives."""
        labels = [self.module.fresh() for _ in range(3)]
        self.line(f"OpSelectionMerge {labels[2]} None")
        self.line(f"OpBranchConditional {condition} {labels[0]} {labels[1]}")
        ways: list[tuple[Sequence[Parts], str]] = []
        for label, side in zip(labels, (then, otherwise), strict=False):
            self.open(label)
            found = side()
            ways.append((found, self.label))
            self.line(f"OpBranch {labels[2]}")
        self.open(labels[2])
        return [self.phi(type_, *((found[k], label) for found, label in ways)) for k, type_ in enumerate(types)]

    def _if(self, op: Op) -> list[Parts]:
        (condition,) = self.names[op.operands[0]]
        regions = [*op.regions, Block()][:2]
        return self.choose(condition, lambda: self.block(regions[0]), lambda: self.block(regions[1]), [r.type for r in op.results])

    def loop(
        self, types: Sequence[Type], initial: Sequence[Parts], test: Callable[[Sequence[Parts]], tuple[str, Sequence[Parts]]],
        turn: Callable[[Sequence[Parts]], Sequence[Parts]], hint: str = "None",
    ) -> list[Parts]:  # fmt: skip
        """A loop that carries values: `test` gives whether it goes on and what it hands to `turn`, which gives the next values. The results are
        what `test` handed on last."""
        head, check, body, latch, done = (self.module.fresh() for _ in range(5))
        before = self.label
        self.line(f"OpBranch {head}")
        self.open(head)
        carried, places = [], []
        for type_ in types:
            names = tuple(self.module.fresh() for _ in self.widths(type_))
            carried.append(names)
            places.append(len(self.lines))
            self.lines += [""] * len(names)
        self.line(f"OpLoopMerge {done} {latch} {hint}")
        self.line(f"OpBranch {check}")
        self.open(check)
        more, handed = test(carried)
        self.line(f"OpBranchConditional {more} {body} {done}")
        self.open(body)
        following = turn(handed)
        self.line(f"OpBranch {latch}")
        self.open(latch)
        self.line(f"OpBranch {head}")
        for place, names, type_, first, last in zip(places, carried, types, initial, following, strict=True):
            element = self.module.element(dtype_of(type_))
            for k, width in enumerate(self.widths(type_)):
                self.lines[place + k] = f"{names[k]} = OpPhi {self.module.type(element, width)} {first[k]} {before} {last[k]} {latch}"
        self.open(done)
        return list(handed)

    def _for(self, op: Op) -> list[Parts]:
        low, high, step, *initial = (self.names[v] for v in op.operands)
        region, kind = op.regions[0], op.operands[0].type
        dtype = dtype_of(kind)
        word = "OpULessThan" if dtype.kind == "u" else "OpSLessThan"

        def test(carried: Sequence[Parts]) -> tuple[str, Sequence[Parts]]:
            return self.let(word, self.module.type("bool"), carried[0][0], high[0]), carried

        def turn(carried: Sequence[Parts]) -> Sequence[Parts]:
            self.names.update(zip(region.args, carried, strict=True))
            yields = self.block(region)
            return [(self.let("OpIAdd", self.type(dtype), carried[0][0], step[0]),), *yields]

        unroll = op.attrs.get("unroll")
        hint = "DontUnroll" if isinstance(unroll, int) and unroll <= 1 else "None"
        types = [kind, *(v.type for v in op.operands[3:])]
        return self.loop(types, [low, *initial], test, turn, hint)[1:]

    def _while(self, op: Op) -> list[Parts]:
        condition, body = op.regions

        def test(carried: Sequence[Parts]) -> tuple[str, Sequence[Parts]]:
            self.names.update(zip(condition.args, carried, strict=True))
            more, *handed = self.block(condition)
            return more[0], handed

        def turn(handed: Sequence[Parts]) -> Sequence[Parts]:
            self.names.update(zip(body.args, handed, strict=True))
            return self.block(body)

        return self.loop([v.type for v in op.operands], [self.names[v] for v in op.operands], test, turn)

    # -- memory ---------------------------------------------------------------------------------------------------------

    def offset(self, memory: Value, indices: Sequence[str]) -> str:
        """Which element of a tensor's memory it is, as a number of 64 bits; empty for the first."""
        assert isinstance(memory.type, Tensor)
        word, total = self.module.type("i64"), ""
        for index, stride in zip(indices, memory.type.strides, strict=True):
            if stride.constant == 0 or self.module.value_of(index) == 0:
                continue
            part = index if stride.constant == 1 else self.let("OpIMul", word, index, self.size(stride))
            total = self.let("OpIAdd", word, total, part) if total else part
        return total

    def storage(self, memory: Value) -> str:
        assert isinstance(memory.type, Tensor)
        if memory.type.space == "global":
            return self.flavour.global_class
        if memory.type.space == "local" and not self.simt and element_count(memory.type) * memory.type.dtype.itemsize > STACK:
            return "Workgroup"  # a thread that is alone in its block has all the block's memory
        return {"shared": "Workgroup", "local": "Function", "constant": self.flavour.constant_class}[memory.type.space]

    def pointer(self, memory: Value, offset: str, width: int = 1) -> str:
        """A pointer to elements from that one on."""
        assert isinstance(memory.type, Tensor)
        module, storage, dtype = self.module, self.storage(memory), memory.type.dtype
        element = module.stored(dtype)
        single, several = module.pointer(storage, module.type(element)), module.pointer(storage, module.type(element, width))
        base = self.memory[memory]
        if storage == "PhysicalStorageBuffer":
            word = module.type("i64")
            if offset:
                step = offset if dtype.itemsize == 1 else self.let("OpIMul", word, offset, self.index(dtype.itemsize))
                base = self.let("OpIAdd", word, base, step)
            return self.let("OpConvertUToPtr", several, base)
        if storage == "CrossWorkgroup" or (storage == "Workgroup" and self.flavour is OPENCL and not self.simt):
            where = self.let("OpInBoundsPtrAccessChain", single, base, offset) if offset else base
        else:
            where = self.let("OpInBoundsAccessChain", single, base, offset or self.index(0))
        return where if width == 1 else self.let("OpBitcast", several, where)

    def bits_pointer(self, memory: Value, offset: str, element: str) -> str:
        """The same where addresses are numbers, as a pointer to integers."""
        assert isinstance(memory.type, Tensor)
        word, base = self.module.type("i64"), self.memory[memory]
        if offset:
            base = self.let("OpIAdd", word, base, self.let("OpIMul", word, offset, self.index(memory.type.dtype.itemsize)))
        return self.let("OpConvertUToPtr", self.module.pointer("PhysicalStorageBuffer", self.module.type(element)), base)

    def is_reached_whole(self, memory: Value) -> bool:
        """Whether vectors of its elements are read and written at once: pointers to them are pointers to vectors as well."""
        return self.flavour is OPENCL or self.storage(memory) == "PhysicalStorageBuffer"

    def moved(self, offset: str, by: int) -> str:
        if not by:
            return offset
        return self.let("OpIAdd", self.module.type("i64"), offset, self.index(by)) if offset else self.index(by)

    def read(self, memory: Value, offset: str, type_: Type, aligned: bool = True) -> Parts:
        """Neighbours from an element on, as they are in registers."""
        assert isinstance(memory.type, Tensor)
        module, dtype = self.module, memory.type.dtype
        element, found, start = module.stored(dtype), [], 0
        widths = self.widths(type_)
        for width in widths:
            if width > 1 and not self.is_reached_whole(memory):
                singles = [self.let("OpLoad", module.type(element), self.pointer(memory, self.moved(offset, start + k))) for k in range(width)]
                value = self.vector(element, singles)
            else:
                align = str(dtype.itemsize * (width if aligned else 1))
                where = self.pointer(memory, self.moved(offset, start), width)
                extra = ("Aligned", align) if self.is_reached_whole(memory) else ()
                value = self.let("OpLoad", module.type(element, width), where, *extra)
            start += width
            if dtype.is_bool:
                value = self.let("OpINotEqual", module.type("bool", width), value, module.constant("i8", 0, width))
            found.append(value)
        return tuple(found)

    def put(self, memory: Value, offset: str, value: Parts, type_: Type, aligned: bool = True) -> None:
        """The reverse."""
        assert isinstance(memory.type, Tensor)
        module, dtype, start = self.module, memory.type.dtype, 0
        element = module.stored(dtype)
        for part, width in zip(value, self.widths(type_), strict=True):
            if dtype.is_bool:
                part = self.let("OpSelect", module.type("i8", width), part, module.constant("i8", 1, width), module.constant("i8", 0, width))
            if width > 1 and not self.is_reached_whole(memory):
                for k in range(width):
                    single = self.let("OpCompositeExtract", module.type(element), part, str(k))
                    self.line(f"OpStore {self.pointer(memory, self.moved(offset, start + k))} {single}")
            else:
                where = self.pointer(memory, self.moved(offset, start), width)
                align = f" Aligned {dtype.itemsize * (width if aligned else 1)}" if self.is_reached_whole(memory) else ""
                self.line(f"OpStore {where} {part}{align}")
            start += width

    def allocate(self, op: Op) -> None:
        """Memory of the block, of the thread, or constants."""
        memory = op.results[0]
        assert isinstance(memory.type, Tensor)
        module = self.module
        element = module.stored(memory.type.dtype)
        kind = module.array(element, element_count(memory.type))
        storage = self.storage(memory)
        if storage == "Function":
            name = module.fresh()
            self.variables.append(f"{name} = OpVariable {module.pointer(storage, kind)} Function")
        elif memory.type.space == "constant":
            values = op.attrs["values"]
            assert isinstance(values, tuple)
            dtype = memory.type.dtype
            items = tuple(module.constant("i8", int(bool(v))) if dtype.is_bool else self.const(dtype, v) for v in values if isinstance(v, int | float))
            name = module.variable(storage, kind, module.table(element, items))
            if self.flavour is OPENCL:
                module.decorations.append(f"OpDecorate {name} Constant")
        else:
            name = self._own_part(memory.type) if self.flavour is OPENCL and not self.simt else module.variable(storage, kind)
        if self.flavour is OPENCL and (self.simt or storage != "Workgroup"):
            module.decorations.append(f"OpDecorate {name} Alignment {max(16, memory.type.align)}")
        if self.flavour is not OPENCL and storage != "Function":
            self.interface.append(name)
        self.memory[memory] = name

    def _own_part(self, memory: Tensor) -> str:
        """A pointer to the next part of the block's memory."""
        module, element = self.module, self.module.stored(memory.dtype)
        start = -(-self._block_bytes // _LINE) * _LINE
        self._block_bytes = start + element_count(memory) * memory.dtype.itemsize
        whole = module.block_memory(self._block_bytes)
        octet, single = module.pointer("Workgroup", module.type("i8")), module.pointer("Workgroup", module.type(element))
        place = module.fresh()
        self.first.append(f"{place} = OpInBoundsAccessChain {octet} {whole} {self.index(start)}")
        if element == "i8":
            return place
        name = module.fresh()
        self.first.append(f"{name} = OpBitcast {single} {place}")
        return name

    def position(self, what: str, axis: int) -> str:
        """A number the device knows, of 64 bits: read once, at the function's start."""
        known = self._builtins.get((what, axis))
        if known is None:
            module, bits = self.module, self.flavour.index
            variable = module.builtin(what)
            self.interface.append(variable)
            found = [module.fresh() for _ in range(3 if bits == 32 else 2)]
            self.first.append(f"{found[0]} = OpLoad {module.type(f'i{bits}', 3)} {variable}")
            self.first.append(f"{found[1]} = OpCompositeExtract {module.type(f'i{bits}')} {found[0]} {axis}")
            if bits == 32:
                self.first.append(f"{found[2]} = OpUConvert {module.type('i64')} {found[1]}")
            known = self._builtins[what, axis] = found[-1]
        return known


_FLOW: dict[str, Callable[[KernelText, Op], list[Parts]]] = {"if": KernelText._if, "for": KernelText._for, "while": KernelText._while}
