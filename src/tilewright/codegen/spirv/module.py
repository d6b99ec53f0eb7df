"""A SPIR-V module as text: its sections, and every type and constant once.

In: what kernels ask for while they are written. Out: the text of the module, sections in the order the specification wants. A `Flavour` says how
OpenCL and Vulkan differ: how memory is reached, which vectors and functions there are.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, f16
from tilewright.base.record import record
from tilewright.codegen.spirv.assembler import float_text


@record
class Flavour:
    """What one environment does its own way."""

    name: str
    version: str
    functions: str
    """The set of extended instructions."""
    addressing: str
    memory_model: str
    global_class: str
    """The storage class of arrays."""
    constant_class: str
    widths: tuple[int, ...]
    """The lengths vectors may have, the longest first."""
    model: str
    """The execution model of kernels."""
    index: int
    """Bits of the numbers of blocks and threads."""
    barrier: int
    """Memory semantics of a barrier: acquire and release, of the memory of a block and of arrays."""
    array_memory: int
    """The bit of memory semantics for arrays."""
    names: tuple[tuple[str, str], ...]
    """What it calls functions that both have."""


OPENCL = Flavour(
    "opencl", "1.0", "OpenCL.std", "Physical64", "OpenCL", "CrossWorkgroup", "UniformConstant", (4, 2), "Kernel", 64, 0x308, 0x200,
    (("floor", "floor"), ("ceil", "ceil"), ("round", "rint"), ("trunc", "trunc"), ("sqrt", "sqrt"), ("abs", "fabs"), ("fma", "fma"),
     ("exp2_approx", "native_exp2"), ("log2_approx", "native_log2"), ("sin_approx", "native_sin"), ("cos_approx", "native_cos"),
     ("sqrt_approx", "native_sqrt"), ("rsqrt_approx", "native_rsqrt")),
)  # fmt: skip
VULKAN = Flavour(
    "vulkan", "1.5", "GLSL.std.450", "PhysicalStorageBuffer64", "GLSL450", "PhysicalStorageBuffer", "Private", (4, 2), "GLCompute", 32, 0x148, 0x40,
    (("floor", "Floor"), ("ceil", "Ceil"), ("round", "RoundEven"), ("trunc", "Trunc"), ("sqrt", "Sqrt"), ("abs", "FAbs"), ("fma", "Fma"),
     ("exp2_approx", "Exp2"), ("log2_approx", "Log2"), ("sin_approx", "Sin"), ("cos_approx", "Cos"), ("sqrt_approx", "Sqrt"),
     ("rsqrt_approx", "InverseSqrt")),
)  # fmt: skip
_CAPABILITIES = {"i8": "Int8", "i16": "Int16", "i64": "Int64", "f16": "Float16", "f64": "Float64"}

_IN_MEMORY = {"%i8": "StorageBuffer8BitAccess", "%i16": "StorageBuffer16BitAccess", "%f16": "StorageBuffer16BitAccess"}


class ModuleText:
    """The module that is being written."""

    def __init__(self, flavour: Flavour, half: bool = False, preserves: bool = False, spir: bool = False, vector_bytes: int = 16, half_modes: tuple[tuple[str, int], ...] = ()) -> None:
        self.widths = (*(w for w in (16, 8) if flavour is OPENCL and 4 * w <= vector_bytes), *flavour.widths)
        """The lengths of vectors, the longest first: OpenCL has as long ones as a CPU's registers."""
        self.half_modes = half_modes
        """How a shader asks for conversions to f16 that round to nearest: modes, and bits of the floats that they are for."""
        self.flavour, self.half, self.preserves, self.spir = flavour, half, preserves, spir
        """`spir`: whether the module becomes LLVM's SPIR, in which LLVM's own functions have names. `half`: whether the device has f16; its numbers are 16-bit integers where it does not. `preserves`: whether a shader may ask it to
        keep NaN, infinities and the sign of zero."""
        self.capabilities: set[str] = set()
        self.entries: list[str] = []
        self.modes: list[str] = []
        self.block_bytes = 0
        """Bytes of the memory of a block that kernels have in common, one after the other (`block_memory`)."""
        self.decorations: list[str] = []
        self.globals: list[str] = []
        self.imports: list[str] = []
        self.functions: list[str] = []
        self._known: dict[object, str] = {}
        self._values: dict[str, int | float | bool] = {}
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"%{self._count}"

    def block_memory(self, nbytes: int) -> str:
        """Memory of a block for kernels that take what they need of it. PoCL gives every kernel of a module the memory of all, so it is one piece."""
        self.block_bytes = max(self.block_bytes, nbytes)
        self.pointer("Workgroup", self.type("i8"))
        return "%block_memory"

    def text(self) -> str:
        if self.block_bytes:
            self.variable("Workgroup", self.array("i8", self.block_bytes), name="%block_memory")
            self.decorations.append("OpDecorate %block_memory Alignment 64")
        f = self.flavour
        base = ["Addresses", "Kernel"] if f is OPENCL else ["Shader", "PhysicalStorageBufferAddresses", "Int64"]
        lines = [f"; SPIR-V {f.version}"]
        lines += [f"OpCapability {name}" for name in (*base, *sorted(self.capabilities - {*base}))]
        lines += [f'%functions = OpExtInstImport "{f.functions}"', f"OpMemoryModel {f.addressing} {f.memory_model}"]
        return "\n".join([*lines, *self.entries, *self.modes, *self.decorations, *self.globals, *self.imports, *self.functions]) + "\n"

    # -- types ----------------------------------------------------------------------------------------------------------

    def element(self, dtype: DType) -> str:
        """The name of the type an element has in registers."""
        if dtype.is_bool:
            return "bool"
        if dtype.is_float and (dtype.bits > 16 or (dtype is f16 and self.half)):
            return dtype.name
        return f"i{dtype.bits}"

    def stored(self, dtype: DType) -> str:
        """The same in memory: a bool is a byte."""
        return "i8" if dtype.is_bool else self.element(dtype)

    def type(self, element: str, width: int = 1) -> str:
        """The id of a number's or a vector's type."""
        if width > 1:
            return self._once(f"%v{width}{element}", f"OpTypeVector {self.type(element)} {width}", "Vector16" if width > 4 else "")
        if element == "bool":
            return self._once("%bool", "OpTypeBool")
        kind = f"OpTypeInt {element[1:]} 0" if element[0] == "i" else f"OpTypeFloat {element[1:]}"
        return self._once(f"%{element}", kind, _CAPABILITIES.get(element, ""))

    def pointer(self, storage: str, pointee: str) -> str:
        return self._once(f"%p_{storage}_{pointee[1:]}", f"OpTypePointer {storage} {pointee}")

    def array(self, element: str, count: int) -> str:
        return self._once(f"%a{count}_{element}", f"OpTypeArray {self.type(element)} {self.constant('i32', count)}")

    def function_type(self, result: str, params: tuple[str, ...]) -> str:
        known = self._known.get(("function", result, params))
        if known is None:
            known = self._known[("function", result, params)] = self.fresh()
            self.globals.append(f"{known} = OpTypeFunction {' '.join((result, *params))}")
        return known

    def block_of_words(self, words: int) -> str:
        """A block of so many numbers of 64 bits, as push constants are."""
        name = f"%words{words}"
        if name not in self._known:
            self._once(name, f"OpTypeStruct {' '.join((self.type('i64'),) * words)}")
            self.decorations.append(f"OpDecorate {name} Block")
            self.decorations += [f"OpMemberDecorate {name} {k} Offset {8 * k}" for k in range(words)]
        return name

    def imported(self, name: str, kind: str, count: int) -> str:
        """A function of numbers or vectors of one type that the module does not define."""
        known = self._known.get(("import", name))
        if known is None:
            known = self._known[("import", name)] = self.fresh()
            self.capabilities.add("Linkage")
            self.decorations.append(f'OpDecorate {known} LinkageAttributes "{name}" Import')
            params = [f"{self.fresh()} = OpFunctionParameter {kind}" for _ in range(count)]
            self.imports += [f"{known} = OpFunction {kind} None {self.function_type(kind, (kind,) * count)}", *params, "OpFunctionEnd"]
        return known

    def void(self) -> str:
        return self._once("%void", "OpTypeVoid")

    def _once(self, name: str, text: str, capability: str = "") -> str:
        if name not in self._known:
            self._known[name] = name
            if capability:
                self.capabilities.add(capability)
            if name in _IN_MEMORY and self.flavour is VULKAN:
                self.capabilities.add(_IN_MEMORY[name])
            self.globals.append(f"{name} = {text}")
        return name

    # -- constants ------------------------------------------------------------------------------------------------------

    def constant(self, element: str, value: int | float | bool, width: int = 1) -> str:
        """The id of a constant; `value` of floats that are kept as integers is their bits."""
        if element[0] == "i":
            bits = int(element[1:])
            value = int(value) & ((1 << bits) - 1)
            value = value - (1 << bits) if value >> (bits - 1) else value
            written = str(value)
        elif element == "bool":
            written = ""
        else:
            written = float_text(float(value), int(element[1:]))
        key = (element, written, bool(value) if element == "bool" else None)
        known = self._known.get(key)
        if known is None:
            kind = self.type(element)
            known = self._known[key] = self.fresh()
            word = ("OpConstantTrue" if value else "OpConstantFalse") if element == "bool" else "OpConstant"
            self.globals.append(f"{known} = {word} {kind}{' ' + written if written else ''}")
            self._values[known] = value
        return known if width == 1 else self.composite(element, (known,) * width)

    def composite(self, element: str, parts: tuple[str, ...]) -> str:
        """A vector of constants."""
        known = self._known.get((element, parts))
        if known is None:
            kind = self.type(element, len(parts))
            known = self._known[(element, parts)] = self.fresh()
            self.globals.append(f"{known} = OpConstantComposite {kind} {' '.join(parts)}")
        return known

    def table(self, element: str, values: tuple[str, ...]) -> str:
        """An array of constants."""
        known = self._known.get(("table", element, values))
        if known is None:
            kind = self.array(element, len(values))
            known = self._known[("table", element, values)] = self.fresh()
            self.globals.append(f"{known} = OpConstantComposite {kind} {' '.join(values)}")
        return known

    def undefined(self, kind: str) -> str:
        """A value of a type that nobody looks at."""
        return self._once(f"%u_{kind[1:]}", f"OpUndef {kind}")

    def value_of(self, name: str) -> int | float | bool | None:
        """The number that a constant is; None for other ids."""
        return self._values.get(name)

    def variable(self, storage: str, pointee: str, initial: str = "", name: str = "") -> str:
        """A variable of the module."""
        kind = self.pointer(storage, pointee)
        name = name or self.fresh()
        self.globals.append(f"{name} = OpVariable {kind} {storage}{' ' + initial if initial else ''}")
        return name

    def builtin(self, what: str) -> str:
        """The variable that holds something the device knows, such as a block's number: three numbers."""
        known = self._known.get(("builtin", what))
        if known is None:
            known = self._known[("builtin", what)] = self.variable("Input", self.type(f"i{self.flavour.index}", 3))
            self.decorations.append(f"OpDecorate {known} BuiltIn {what}")
        return known
