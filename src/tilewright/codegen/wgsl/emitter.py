"""Thread-stage kernels -> WGSL. In: a kernel after the order `portable` of passes. Out: declarations and an entry point.

A kernel's arrays are storage buffers, its numbers one uniform buffer (`uniform_fields`): the number of blocks, where each array begins in its buffer,
sizes that the host computes, and the numbers of the call. Elements narrower than 32 bits lie in words: to write one, a thread clears its
bits and sets them with two atomics, so that neighbours other threads write keep theirs; where the device has memory of f16, those are elements of their own. Arrays that are read and written in vectors
(`passes/portable/split_registers.py`) are arrays of `vec4`. `tables.py` has expressions and functions.

    %2 = load %x, %i : f32                let v2 = k0_a0[o0 + v1];
    %3 = mul %2, %2 : f32           ->    let v3 = v2 * v2;
    store %out, %i, %3                    k0_a1[o1 + v1] = v3;
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.base.target import Target
from tilewright.codegen.text.structured import STRUCTURE, StructuredWriter
from tilewright.codegen.wgsl.tables import ATOMICS, BITCASTS, CASTS, OPS, REGISTERS
from tilewright.ir.needs import element_count
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Type, Vec, dtype_of

_NOTHING = frozenset({"prefetch", "warp_sync", "step"})
_WRITES = frozenset({"store", "atomic", "atomic_store", "report"})
FAILURE_WORDS = 8


def letter(dtype: DType, half: bool = False) -> str:
    """The letter of the tables. `half`: the device has f16."""
    return "e" if half and dtype.name == "f16" else REGISTERS[dtype.name][1]


def register(type_: Type, half: bool = False) -> str:
    return "f16" if half and dtype_of(type_).name == "f16" else REGISTERS[dtype_of(type_).name][0]


def kernel_values(kernel: Kernel) -> tuple[Size, ...]:
    """The sizes that the code reads, each once, in order: those of `size` ops and strides of arrays."""
    found: dict[Size, None] = {}
    for param in kernel.params:
        if isinstance(param.type, Tensor):
            found.update((stride, None) for stride in param.type.strides if stride.constant is None)
    for op in walk(kernel.body):
        if op.opcode == "size" and Size.of(op.attrs["value"]).constant is None:  # type: ignore[arg-type]
            found[Size.of(op.attrs["value"])] = None  # type: ignore[arg-type]
    return tuple(found)


def uniform_fields(kernel: Kernel) -> list[tuple[str, str]]:
    """Names and types of the words of the uniform buffer, in order; numbers of 64 bits are two."""
    fields = [("blocks", "u32"), ("zero", "u32")]
    fields += [(f"o{k}", "i32") for k, _ in enumerate(kernel.tensors)]
    fields += [(f"s{k}", "i32") for k, _ in enumerate(kernel_values(kernel))]
    for k, param in enumerate(kernel.scalars):
        kind = register(param.type)
        fields += [(f"n{k}", "u32"), (f"n{k}_high", "u32")] if kind == "vec2<u32>" else [(f"n{k}", "u32" if kind == "bool" else kind)]
    return fields


class Place:
    """An array of the kernel: its name, where it begins, and how its elements lie."""

    def __init__(self, name: str, memory: Tensor, start: str = "", atomic: bool = False, vectors: bool = False, half: bool = False) -> None:
        """`vectors`: its memory is one of vectors of four elements. `half`: the device has memory of f16."""
        self.vectors = vectors
        self.half = half and memory.dtype.name == "f16" and not atomic
        self.name, self.memory, self.start, self.atomic = name, memory, start, atomic
        self.dtype = memory.dtype
        self.packed = memory.space == "global" and self.dtype.itemsize < 4 and not self.half

    @property
    def element(self) -> str:
        if self.half:
            return "f16"
        kind, code = REGISTERS[self.dtype.name]
        word = "u32" if self.packed or code in "bh" or (code == "f" and self.atomic) else kind
        # An atomic of 64 bits is refused; the cell that reports indices is one of words.
        if self.vectors:
            return f"vec4<{word}>"
        return ("atomic<u32>" if word == "vec2<u32>" else f"atomic<{word}>") if self.atomic else word

    @property
    def word(self) -> str:
        return self.element.removeprefix("atomic<").removesuffix(">") if self.atomic else self.element


class WgslWriter(StructuredWriter):
    """Writes one kernel."""

    def __init__(self, kernel: Kernel, entry: str, position: int, target: Target) -> None:
        super().__init__(kernel)
        self.target, self.prefix, self.half = target, f"k{position}_", target.has("f16")
        self.values = {size: f"s{k}" for k, size in enumerate(kernel_values(kernel))}
        self.places: dict[Value, Place] = {}
        self.head: list[str] = []
        self.shared = 0
        self.producers: dict[Value, Op] = {}
        written = {op.operands[0] for op in walk(kernel.body) if op.opcode in _WRITES}
        atomic = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("atomic", "atomic_load", "atomic_store", "report")}
        self.atomic = atomic
        read = {op.operands[0] for op in walk(kernel.body) if op.opcode == "load"}
        self.meets_in_memory = any(p in written and p in read for p in kernel.tensors)
        vectors = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("load", "store") and any(isinstance(v.type, Vec) for v in (*op.results, *op.operands))}
        fields = uniform_fields(kernel)
        self.head.append(f"struct {self.prefix}P {{ {', '.join(f'{n}: {t}' for n, t in fields)} }}")
        self.head.append(f"@group(0) @binding(0) var<uniform> {self.prefix}p: {self.prefix}P;")
        for k, param in enumerate(kernel.tensors):
            assert isinstance(param.type, Tensor)
            own = Place(f"{self.prefix}a{k}", param.type, f"o{k}", param in atomic, param in vectors, self.half)
            own.atomic |= own.packed and param in written
            self.places[param] = own
            access = "read_write" if param in written else "read"
            self.head.append(f"@group(0) @binding({k + 1}) var<storage, {access}> {own.name}: array<{own.element}>;")
        for k, param in enumerate(kernel.scalars):
            name = f"{self.prefix}p.n{k}"
            kind = self.register(param.type)
            if kind == "f16":
                self.names[param] = f"tw_half({name})"
                continue
            self.names[param] = f"vec2<u32>({name}, {name}_high)" if kind == "vec2<u32>" else f"({name} != 0u)" if kind == "bool" else name
        self._positions()
        used = {value for op in walk(kernel.body) for value in op.operands}
        for param in kernel.tensors:
            if param not in used:
                self.line(f"_ = &{self.places[param].name};")  # a binding that nothing names is none
        self.block(kernel.body)
        if self.shared > target.max_shared:
            raise TargetLimit.at("TW020", f"{kernel.name} needs {self.shared} bytes of shared memory; a block of {target.name} has {target.max_shared}", kernel.span)
        self.text = "\n".join([
            *self.head, f"@compute @workgroup_size({kernel.threads})",
            f"fn {entry}(@builtin(workgroup_id) block: vec3<u32>, @builtin(num_workgroups) blocks: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{",
            *self.lines, "}",
        ])  # fmt: skip

    def _positions(self) -> None:
        if len(self.kernel.grid) <= 1:
            self.line("let linear = block.x + block.y * blocks.x;")
            self.line(f"if (linear >= {self.prefix}p.blocks) {{ return; }}")
        for name in (*(place.start for place in self.places.values()), *self.values.values()):
            self.line(f"let {name} = {self.prefix}p.{name};")

    def letter(self, dtype: DType) -> str:
        return letter(dtype, self.half)

    def register(self, type_: Type) -> str:
        return register(type_, self.half)

    def number(self, value: object, dtype: DType) -> str:
        return number(value, dtype, self.half)

    # -- the language ---------------------------------------------------------------------------------------------------

    def constant(self, name: str, type_: Type, text: str) -> str:
        return f"let {name} = {text};"

    def variable(self, name: str, type_: Type, text: str) -> str:
        return f"var {name} = {text};" if text else f"var {name}: {self.register(type_)};"

    def compare_index(self, index: str, high: str, type_: Type) -> str:
        return OPS["lt"]["l"].format(index, high) if self.letter(dtype_of(type_)) == "l" else f"{index} < {high}"

    def advance(self, index: str, step: str, type_: Type) -> str:
        return OPS["add"]["lm"].format(index, step) if self.letter(dtype_of(type_)) == "l" else f"{index} + {step}"

    def literal(self, op: Op) -> str:
        return self.number(op.attrs["value"], dtype_of(op.results[0].type))

    def expression(self, op: Op) -> str | None:
        if op.opcode not in OPS:
            return None
        dtype = dtype_of(op.operands[0].type)
        code = self.letter(dtype)
        if code == "h" and op.opcode in ("eq", "ne"):
            return _same_bits(self.of(op.operands[0]), self.of(op.operands[1]), dtype, op.opcode == "ne")
        template = next((text for letters, text in OPS[op.opcode].items() if code in letters), None)
        if template is None:
            return None
        if code == "f" and op.opcode in ("add", "sub"):
            text = template.format(*self._kept(op))
        elif op.attrs.get("once"):
            text = f"tw_fma({', '.join(map(self.of, op.operands))}, {self.prefix}p.zero)"
        else:
            text = template.format(*map(self.of, op.operands), m=dtype.bits - 1)
        self.producers[op.results[0]] = op
        result = dtype_of(op.results[0].type)
        if op.opcode in ("popcount", "clz", "ctz"):
            text = _counted(op.opcode, text, dtype, result)
        return wrapped(text, result) if result is dtype and op.opcode not in ("and", "or", "min", "max") else text

    def _kept(self, op: Op) -> list[str]:
        """The operands of a sum. Drivers take `(a + b) - a` for b: where a sum undoes another, what it undoes goes through a word they cannot see through."""
        texts = [self.of(v) for v in op.operands]
        for one, other in ((0, 1), (1, 0)):
            inner = self.producers.get(op.operands[one])
            if inner is not None and inner.opcode in ("add", "sub", "fma") and texts[other] in map(self.of, inner.operands):
                texts[one] = f"tw_keep({texts[one]}, {self.prefix}p.zero)"
                break
        return texts

    def size(self, size: Size) -> str:
        return str(size.constant) if size.constant is not None else self.values[size]

    # -- ops ------------------------------------------------------------------------------------------------------------

    def cast(self, op: Op) -> None:
        source, result = dtype_of(op.operands[0].type), dtype_of(op.results[0].type)
        template = CASTS.get(self.letter(source) + self.letter(result))
        if template is None:
            raise self.unknown(op)
        low, high = (int(result.min_value), int(result.max_value)) if result.is_int else (0, 0)
        text = template.format(self.of(op.operands[0]), low=f"i32({low})", high=f"{high}u" if self.letter(result) == "u" else f"i32({high})")
        narrows = result.is_int and result.bits < 32 and (not source.is_int or source.bits > result.bits or source.kind != result.kind) and source.kind != "f"
        self.let(op.results[0], wrapped(text, result) if narrows else text)

    def bitcast(self, op: Op) -> None:
        source, result = dtype_of(op.operands[0].type), dtype_of(op.results[0].type)
        template = BITCASTS.get(self.letter(source) + self.letter(result))
        if template is None:
            raise self.unknown(op)
        self.let(op.results[0], wrapped(template.format(self.of(op.operands[0])), result))

    def select(self, op: Op) -> None:
        cond, a, b = map(self.of, op.operands)
        self.let(op.results[0], f"select({b}, {a}, {cond})")

    def size_(self, op: Op) -> None:
        self.let(op.results[0], f"tw_widen({self.size(Size.of(op.attrs['value']))})")  # type: ignore[arg-type]

    def position(self, op: Op) -> None:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        own, count = ("linear", f"{self.prefix}p.blocks") if len(self.kernel.grid) <= 1 and axis == 0 else (f"block.{'xyz'[axis]}", f"blocks.{'xyz'[axis]}")
        if len(self.kernel.grid) <= 1 and axis:
            own, count = "0u", "1u"
        self.let(op.results[0], f"vec2<u32>({own if op.opcode == 'program_id' else count}, 0u)")

    def thread(self, op: Op) -> None:
        self.let(op.results[0], "vec2<u32>(thread, 0u)" if self.register(op.results[0].type) == "vec2<u32>" else f"{self.register(op.results[0].type)}(thread)")

    def barrier(self, op: Op) -> None:
        if self.meets_in_memory:
            self.line("storageBarrier();")
        self.line("workgroupBarrier();")

    def extract(self, op: Op) -> None:
        lane = op.attrs["lane"]
        assert isinstance(lane, int)
        self.let(op.results[0], f"{self.of(op.operands[0])}.{'xyzw'[lane]}")

    def pack(self, op: Op) -> None:
        self.let(op.results[0], f"vec4<{self.register(op.results[0].type)}>({', '.join(map(self.of, op.operands))})")

    def nothing(self, op: Op) -> None:
        return

    def alloc(self, op: Op) -> None:
        memory = op.results[0].type
        assert isinstance(memory, Tensor)
        name, count = self.fresh("m"), element_count(memory)
        place = self.places[op.results[0]] = Place(self.prefix + name, memory, "", memory.space == "shared" and op.results[0] in self.atomic, half=self.half)
        kind = f"array<{place.element}, {count}>"
        if memory.space == "shared":
            self.shared += count * {"vec2<u32>": 8, "f16": 2}.get(place.word, 4)
            self.head.append(f"var<workgroup> {place.name}: {kind};")
            return
        values = op.attrs.get("values")
        assert values is None or isinstance(values, tuple)
        texts = ", ".join(_stored(place, self.number(v, memory.dtype)) for v in values or ())
        self.line(f"var {place.name} = {kind}({texts});" if values else f"var {place.name}: {kind};")

    def _where(self, op: Op) -> tuple[Place, str, tuple[Value, ...]]:
        """The array of an access, the element, and the operands after the indices."""
        memory = op.operands[0]
        place, type_ = self.places[memory], memory.type
        assert isinstance(type_, Tensor)
        strides = type_.strides if type_.space == "global" else contiguous_strides(type_.shape)
        terms = [place.start] if place.start else []
        for index, stride in zip(op.operands[1 : 1 + type_.rank], strides, strict=True):
            text = self._index(index)
            terms.append(text if stride.constant == 1 else f"{text} * {self.size(stride)}")
        return place, " + ".join(terms) or "0", op.operands[1 + type_.rank :]

    def _index(self, value: Value) -> str:
        text, code = self.of(value), self.letter(dtype_of(value.type))
        return f"i32({text}.x)" if code in "lm" else f"i32({text})" if code == "u" else text

    def load(self, op: Op) -> None:
        place, where, rest = self._where(op)
        if place.vectors:
            text = f"{place.name}[({where}) >> 2u]"
            if not isinstance(op.results[0].type, Vec):
                at = self.fresh("e")
                self.line(f"let {at} = {where};")
                text = f"{place.name}[{at} >> 2u][{at} & 3]"
        else:
            text = self._loaded(place, where)
        if op.attrs.get("masked") and rest:
            text = f"select({'0.0h' if place.half else zero(place.dtype)}, {text}, {self.of(rest[0])})"
        self.let(op.results[0], text)

    def _loaded(self, place: Place, where: str) -> str:
        if place.packed:
            at = self.fresh("e")
            self.line(f"let {at} = {where};")
            bits, shift = place.dtype.itemsize * 8, 2 if place.dtype.itemsize == 1 else 1
            word = self._word(place, f"{at} >> {shift}u")
            return _from_bits(f"({word} >> (u32({at} & {(1 << shift) - 1}) * {bits}u)) & {(1 << bits) - 1}u", place.dtype)
        return _read(place, self._word(place, where))

    def _word(self, place: Place, where: str) -> str:
        return f"atomicLoad(&{place.name}[{where}])" if place.atomic else f"{place.name}[{where}]"

    def store(self, op: Op) -> None:
        place, where, rest = self._where(op)
        value = self.of(rest[0])
        masked = op.attrs.get("masked") and len(rest) > 1

        def write() -> None:
            if place.vectors:
                self.line(f"{place.name}[({where}) >> 2u] = {value};")
                return
            if not place.packed:
                text = _stored(place, value)
                self.line(f"atomicStore(&{place.name}[{where}], {text});" if place.atomic else f"{place.name}[{where}] = {text};")
                return
            at, by = self.fresh("e"), self.fresh("e")
            bits, shift = place.dtype.itemsize * 8, 2 if place.dtype.itemsize == 1 else 1
            self.line(f"let {at} = {where};")
            self.line(f"let {by} = u32({at} & {(1 << shift) - 1}) * {bits}u;")
            self.line(f"atomicAnd(&{place.name}[{at} >> {shift}u], ~({(1 << bits) - 1}u << {by}));")
            self.line(f"atomicOr(&{place.name}[{at} >> {shift}u], {_to_bits(value, place.dtype)} << {by});")

        if masked:
            self.inside(f"if ({self.of(rest[1])})", write)
        else:
            write()

    def atomic_update(self, op: Op) -> None:
        place, where, rest = self._where(op)
        kind = str(op.attrs["kind"])
        given = [_stored(place, self.of(value)) for value in rest]
        if kind == "cas":
            old, one = self.fresh("t"), self.fresh("t")
            self.line(f"var {old}: {place.word};")

            def attempt() -> None:
                """The instruction may fail for no reason; then it is tried again."""
                self.line(f"let {one} = atomicCompareExchangeWeak(&{place.name}[{where}], {given[0]}, {given[1]});")
                self.line(f"if ({one}.exchanged || {one}.old_value != {given[0]}) {{ {old} = {one}.old_value; break; }}")

            self.inside("loop", attempt)
            self.let(op.results[0], _read(place, old))
            return
        self.let(op.results[0], _read(place, f"{ATOMICS[kind]}(&{place.name}[{where}], {given[0]})"))

    def report(self, op: Op) -> None:
        """The first thread to come here leaves site, index and extent, each as two words."""
        place, site = self.places[op.operands[0]], op.attrs["site"]
        texts = [self.of(v) if self.letter(dtype_of(v.type)) == "l" else f"tw_widen({self._index(v)})" for v in op.operands[1:3]]
        name = place.name

        def write() -> None:
            for k, text in enumerate(texts):
                for half, part in enumerate("xy"):
                    self.line(f"atomicStore(&{name}[{place.start} * 2 + {2 * k + 2 + half}], ({text}).{part});")

        self.inside(f"if (atomicExchange(&{name}[{place.start} * 2], {site}u) == 0u)", write)


def number(value: object, dtype: DType, half: bool = False) -> str:
    """A literal."""
    code = letter(dtype, half)
    if code == "b":
        return "true" if value else "false"
    if dtype.is_float:
        assert isinstance(value, int | float)
        if code == "e":
            rounded = float(np.float16(value))
            return f"{rounded!r}h" if 2.0**-14 <= rounded < 2.0**16 or (rounded == 0 and math.copysign(1, rounded) > 0) else f"tw_half({dtype_bits(float(value), dtype)}u)"
        if code == "h":
            return f"{dtype_bits(float(value), dtype)}u"
        if not math.isfinite(value) or (value and abs(value) < 1.2e-38) or abs(value) > 3.4028234e38:
            return f"tw_f32({struct.unpack('<I', struct.pack('<f', value))[0] if math.isfinite(value) or value != value else (0x7F800000 if value > 0 else 0xFF800000)}u)"
        text = repr(struct.unpack("<f", struct.pack("<f", value))[0])
        return f"{text}f" if value >= 0 and not text.startswith("-") else f"({text}f)"
    assert isinstance(value, int)
    if code in "lm":
        return f"vec2<u32>({value & 0xFFFFFFFF}u, {value >> 32 & 0xFFFFFFFF}u)"
    if code == "u":
        return f"{value & 0xFFFFFFFF}u"
    return str(value) if value >= 0 else f"i32({value})"


def _same_bits(a: str, b: str, dtype: DType, differ: bool) -> str:
    """Whether two narrow floats are equal, by their bits: zeros are, whatever their sign, NaNs never."""
    sizes, last = (1 << dtype.bits - 1) - 1, {"f16": 0x7C00, "bf16": 0x7F80, "f8e5m2": 0x7C, "f8e4m3": 0x7E}[dtype.name]
    text = f"(({a} == {b} && ({a} & {sizes}u) <= {last}u) || (({a} | {b}) & {sizes}u) == 0u)"
    return f"!{text}" if differ else text


def dtype_bits(value: float, dtype: DType) -> int:
    """The bits of a narrow float."""
    return int(np.asarray(value, np.float32).astype(dtype.numpy).view(f"u{dtype.itemsize}"))


def zero(dtype: DType) -> str:
    return {"f": "0.0f", "i": "0i", "u": "0u", "h": "0u", "b": "false", "l": "vec2<u32>()", "m": "vec2<u32>()"}[letter(dtype)]


def wrapped(text: str, dtype: DType) -> str:
    """A result as its dtype holds it: narrow integers wrap around."""
    if not dtype.is_int or dtype.bits >= 32:
        return text
    return f"extractBits({text}, 0u, {dtype.bits}u)" if letter(dtype) == "i" else f"({text}) & {(1 << dtype.bits) - 1}u"


def _counted(opcode: str, text: str, dtype: DType, result: DType) -> str:
    """A count of bits: narrow integers are extended, and the result has a dtype of its own."""
    if dtype.bits < 32:
        spare = 32 - dtype.bits
        text = f"{text} - {spare}{'u' if letter(dtype) == 'u' else ''}" if opcode == "clz" else f"min({text}, {dtype.bits}{'u' if letter(dtype) == 'u' else ''})"
    template = CASTS.get(letter(dtype) + letter(result), "{0}")
    return template.format(f"({text})")


def _from_bits(text: str, dtype: DType) -> str:
    """Bits of a narrow element as its register."""
    code = letter(dtype)
    return f"({text}) != 0u" if code == "b" else f"extractBits(i32({text}), 0u, {dtype.bits}u)" if code == "i" else text


def _to_bits(text: str, dtype: DType) -> str:
    code = letter(dtype)
    return f"select(0u, 1u, {text})" if code == "b" else f"(u32({text}) & {(1 << dtype.bits) - 1}u)" if code == "i" else f"({text})"


def _read(place: Place, text: str) -> str:
    """A word of memory as the element's register."""
    code = letter(place.dtype)
    if code == "b":
        return f"({text}) != 0u"
    return f"bitcast<f32>({text})" if code == "f" and place.word == "u32" else text


def _stored(place: Place, text: str) -> str:
    """A register as the word of memory."""
    code = letter(place.dtype)
    if code == "b":
        return f"select(0u, 1u, {text})"
    return f"bitcast<u32>({text})" if code == "f" and place.word == "u32" else text


_HANDLERS: dict[str, Callable[[WgslWriter, Op], None]] = {
    "cast": WgslWriter.cast, "bitcast": WgslWriter.bitcast, "select": WgslWriter.select, "size": WgslWriter.size_, "program_id": WgslWriter.position,
    "grid_size": WgslWriter.position, "thread_id": WgslWriter.thread, "barrier": WgslWriter.barrier, "alloc": WgslWriter.alloc, "load": WgslWriter.load,
    "store": WgslWriter.store, "atomic_load": WgslWriter.load, "atomic_store": WgslWriter.store, "atomic": WgslWriter.atomic_update,
    "report": WgslWriter.report, "extract": WgslWriter.extract, "pack": WgslWriter.pack, **dict.fromkeys(_NOTHING, WgslWriter.nothing),
}  # fmt: skip
WgslWriter.handlers = _HANDLERS
KNOWN = frozenset({*_HANDLERS, *OPS, *STRUCTURE})
