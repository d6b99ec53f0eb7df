"""Thread-stage IR -> LLVM text for AMD GPUs: one `amdgpu_kernel` per kernel.

Parameters follow `base.abi`: pointers, scalars, then sizes; the loader adds hidden ones, of which the blocks of the grid are read. What a
block shares is one array of the LDS, laid out as `ir.needs.shared_places` says, so that a kernel uses as much of it as was planned. Tensors
that are only read are `noalias`, so that loads at an address that is the same for a wave go through the scalar cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.artifact import FAILURE_EXTENT, FAILURE_FLAG, FAILURE_INDEX
from tilewright.base.dtypes import f32, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.codegen.amdgpu import atomics, simt
from tilewright.codegen.amdgpu.matrix import wave_mma
from tilewright.codegen.amdgpu.values import GLOBAL, SHARED, block_barrier, scope_of, thread_id
from tilewright.codegen.llvm.constants import initialiser
from tilewright.codegen.llvm.emitter import FunctionWriter, literal, llvm_type, memory_type
from tilewright.ir.needs import alignment, element_count, shared_places
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, Type, Vec, dtype_of

_SPACES = {"global": 1, "shared": 3, "constant": 4, "local": 5}
_APPROXIMATIONS = {
    "exp2_approx": "exp2", "rcp_approx": "rcp", "log2_approx": "log", "sqrt_approx": "sqrt", "rsqrt_approx": "rsq", "sin_approx": "sin", "cos_approx": "cos",
}  # fmt: skip
"""Ops that are one instruction, `v_exp_f32` and the like."""
_TURN = 0.15915494309189535
"""One radian, in the turns that the device's sine takes."""
_PASSING = frozenset({"cs", "lu", "l1_evict_first", "l1_no_allocate", "l2_evict_first"})
"""Hints that say an element is not needed again soon; others change nothing here, but for `cv`, which reads memory itself."""
_TANH_SERIES = (2.0 / 15.0, -1.0 / 3.0)
_WRITES = ("store", "atomic", "atomic_store", "raise_flag", "report")


def written_tensors(kernel: Kernel) -> set[Value]:
    """The tensors that the kernel writes, or that may be one it writes."""
    if kernel.attrs.get("aliased"):
        return set(kernel.params)
    coherent = kernel.attrs.get("coherent", ())
    assert isinstance(coherent, tuple)
    others = {kernel.params[i] for i in coherent if isinstance(i, int)}
    return others | {op.operands[0] for op in walk(kernel.body) if op.opcode in _WRITES}


class _AmdgpuDialect:
    def __init__(self, kernel: Kernel, entry: str, target: Target) -> None:
        self.kernel, self.entry, self.target = kernel, entry, target
        self.globals: list[str] = []
        self.places, self.shared = shared_places(kernel)
        self.written = written_tensors(kernel)

    def pointer(self, space: str) -> str:
        return f"ptr addrspace({_SPACES[space]})"

    def load_suffix(self, memory: Value) -> str:
        return ", !invariant.load !0" if memory in self.kernel.params and memory not in self.written else ""

    def location(self, op: Op) -> str:
        return ""

    def turn(self, w: FunctionWriter, op: Op) -> None: ...

    def rest(self, w: FunctionWriter, op: Op) -> int:
        return 0

    def pause(self, w: FunctionWriter) -> None: ...

    def before_report(self, w: FunctionWriter, loaded: Sequence[Value]) -> None: ...

    def better(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
        if op.opcode == "load" and ("cache" in op.attrs or op.attrs.get("apart")):
            return self._load(w, op, operands)
        if op.opcode == "dp4a":
            return simt.dp4a(w, op, operands, self.target)
        return None

    def emit(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        handler = simt.HANDLERS.get(op.opcode) or atomics.HANDLERS.get(op.opcode)
        if handler is not None:
            return handler(w, op, operands, self.target)
        if op.opcode == "wave_mma":
            return [wave_mma(w, op, operands)]
        if op.opcode == "store":
            return self._store(w, op, operands)
        if op.opcode == "load":
            return [self._masked_load(w, op, operands)]
        if op.opcode in ("program_id", "thread_id", "grid_size"):
            return [self._index(w, op)]
        if op.opcode == "barrier":
            block_barrier(w)
            return []
        if op.opcode == "fence":
            w.line(f"fence{scope_of(str(op.attrs['scope']))} seq_cst")
            return []
        if op.opcode == "prefetch":
            # The devices have no such instruction: LLVM leaves it out where there is none.
            where = w.element_pointer(op.operands[0], operands[1:])
            w.call("void", "llvm.prefetch.p1", (GLOBAL, where), ("i32", "0"), ("i32", "3"), ("i32", "1"))
            return []
        if op.opcode == "alloc":
            return [self._alloc(w, op)]
        if op.opcode == "report":
            return self._report(w, op, operands)
        if op.opcode == "assert":
            return self._assert(w, op, operands)
        if op.opcode in _APPROXIMATIONS or op.opcode in ("div_approx", "tanh_approx"):
            return [self._approximation(w, op, operands)]
        return None

    # -- where ------------------------------------------------------------------------------------------------------

    def _index(self, w: FunctionWriter, op: Op) -> str:
        axis = op.attrs.get("axis", 0)
        assert isinstance(axis, int)
        if op.opcode == "thread_id":
            value = thread_id(w)
        elif op.opcode == "program_id":
            value = w.call("i32", f"llvm.amdgcn.workgroup.id.{'xyz'[axis]}")
        else:
            value = atomics.grid_blocks(w, axis)
        return w.let(f"zext i32 {value} to i64")

    # -- memory -----------------------------------------------------------------------------------------------------

    def _alloc(self, w: FunctionWriter, op: Op) -> str:
        memory = op.results[0].type
        assert isinstance(memory, Tensor)
        align = alignment(memory)
        if memory.space == "local":
            name = w.fresh("local")
            w.first.append(f"  {name} = alloca [{element_count(memory)} x {memory_type(memory.dtype)}], align {align}, addrspace({_SPACES['local']})")
            return name
        if memory.space == "shared":
            block = f"@{self.entry}.shared"
            if not any(line.startswith(block) for line in self.globals):
                self.globals.append(f"{block} = internal addrspace(3) global [{self.shared} x i8] poison, align 128")
            return w.let(f"getelementptr inbounds i8, {SHARED} {block}, i32 {self.places[op.results[0]]}")
        name = f"@{self.entry}.{memory.space}{len(self.globals)}"
        self.globals.append(f"{name} = internal addrspace({_SPACES['constant']}) constant {initialiser(op)}, align {align}")
        return name

    def _load(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
        """A load with a hint, or one that LLVM must not join with others."""
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
        if op.attrs.get("apart"):
            where = w.let(f'call {GLOBAL} asm "", "=v,0"({GLOBAL} {where})')
        return self._read(w, op, where)

    def _read(self, w: FunctionWriter, op: Op, where: str) -> str:
        memory, type_ = op.operands[0].type, op.results[0].type
        assert isinstance(memory, Tensor)
        width = type_.width if isinstance(type_, Vec) else 1
        stored = memory_type(memory.dtype, width)
        align = memory.dtype.itemsize * (1 if op.attrs.get("unaligned") else width)
        cache = op.attrs.get("cache")
        volatile = "volatile " if cache == "cv" else ""
        suffix = ", !nontemporal !1" if cache in _PASSING else ""
        value = w.let(f"load {volatile}{stored}, {self.pointer(memory.space)} {where}, align {align}{suffix}{'' if volatile else self.load_suffix(op.operands[0])}")
        if memory.dtype.is_bool:
            return w.let(f"icmp ne {stored} {value}, {'0' if width == 1 else 'zeroinitializer'}")
        return value

    def _masked_load(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
        """A branch that LLVM makes the lanes' own: those where the condition does not hold keep their zero."""
        memory, kind = op.operands[0].type, llvm_type(op.results[0].type)
        assert isinstance(memory, Tensor)
        where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
        wanted, after, before = w.new_label("wanted"), w.new_label("loaded"), w.label
        w.line(f"br i1 {operands[-1]}, label %{wanted}, label %{after}")
        w.open_label(wanted)
        value = self._read(w, op, where)
        w.line(f"br label %{after}")
        w.open_label(after)
        zero = "zeroinitializer" if isinstance(op.results[0].type, Vec) else literal(0, dtype_of(op.results[0].type))
        return w.let(f"phi {kind} [ {value}, %{wanted} ], [ {zero}, %{before} ]")

    def _store(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        """A store with a hint; None for one that is like any other."""
        memory, type_ = op.operands[0].type, op.operands[-1].type
        assert isinstance(memory, Tensor)
        if op.attrs["cache"] not in _PASSING:
            return None
        width = type_.width if isinstance(type_, Vec) else 1
        value, stored = operands[-1], memory_type(memory.dtype, width)
        where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
        if memory.dtype.is_bool:
            value = w.let(f"zext {llvm_type(type_)} {value} to {stored}")
        align = memory.dtype.itemsize * (1 if op.attrs.get("unaligned") else width)
        w.line(f"store {stored} {value}, {self.pointer(memory.space)} {where}, align {align}, !nontemporal !1")
        return []

    # -- what kernels tell the host -----------------------------------------------------------------------------------

    def _report(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
        """Leave site, index and extent, if nobody has since the host last looked, and raise the flag. The thread goes on."""
        cell, index, extent = operands
        site = int(str(op.attrs["site"]))
        tried = w.let(f'cmpxchg {GLOBAL} {cell}, i64 0, i64 {-site} syncscope("agent") monotonic monotonic')
        first, flagged, after = w.new_label("first"), w.new_label("flagged"), w.new_label("after")
        w.line(f"br i1 {w.let(f'extractvalue {{ i64, i1 }} {tried}, 1')}, label %{first}, label %{after}")
        w.open_label(first)
        places = {field: w.let(f"getelementptr i64, {GLOBAL} {cell}, i64 {field}") for field in (FAILURE_INDEX, FAILURE_EXTENT, FAILURE_FLAG)}
        w.line(f"store volatile i64 {index}, {GLOBAL} {places[FAILURE_INDEX]}, align 8")
        w.line(f"store volatile i64 {extent}, {GLOBAL} {places[FAILURE_EXTENT]}, align 8")
        # Who sees the site sees the rest, and who sees the flag sees the site.
        w.line(f"store atomic volatile i64 {site}, {GLOBAL} {cell} release, align 8")
        flag = w.let(f"load volatile ptr, {GLOBAL} {places[FAILURE_FLAG]}, align 8")
        w.line(f"br i1 {w.let(f'icmp eq ptr {flag}, null')}, label %{after}, label %{flagged}")
        w.open_label(flagged)
        w.line(f"store atomic volatile i64 1, ptr {flag} release, align 8")
        w.line(f"br label %{after}")
        w.open_label(after)
        return []

    def _assert(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
        """A failed assertion ends the kernel: the queue reports a trap."""
        failed, held = w.new_label("failed"), w.new_label("held")
        w.line(f"br i1 {operands[0]}, label %{held}, label %{failed}")
        w.open_label(failed)
        w.call("void", "llvm.trap", attributes=" noreturn")
        w.line("unreachable")
        w.open_label(held)
        return []

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def _approximation(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
        """Instructions of f32, element by element on a vec."""
        type_ = op.operands[0].type
        if dtype_of(type_) is not f32:
            raise CompilerBug.at("TW040", f"{op.opcode} is for f32 only", op.span)
        if isinstance(type_, Scalar):
            return self._scalar(w, op.opcode, *operands)
        assert isinstance(type_, Vec)
        kind, result = llvm_type(type_), "poison"
        for lane in range(type_.width):
            element = self._scalar(w, op.opcode, *(w.let(f"extractelement {kind} {operand}, i64 {lane}") for operand in operands))
            result = w.let(f"insertelement {kind} {result}, float {element}, i64 {lane}")
        return result

    def _scalar(self, w: FunctionWriter, opcode: str, value: str, divisor: str = "") -> str:
        if opcode == "div_approx":
            return w.let(f"fmul float {value}, {self._scalar(w, 'rcp_approx', divisor)}")
        if opcode == "tanh_approx":
            return self._tanh(w, value)
        if opcode in ("sin_approx", "cos_approx"):
            value = w.let(f"fmul float {value}, {literal(_TURN, f32)}")
        return w.call("float", f"llvm.amdgcn.{_APPROXIMATIONS[opcode]}.f32", ("float", value))

    def _tanh(self, w: FunctionWriter, x: str) -> str:
        """1 - 2 / (2^(2 x log2 e) + 1), and near zero, where that would lose bits, the first terms of the series."""
        power = self._scalar(w, "exp2_approx", w.let(f"fmul float {x}, {literal(2.8853900817779268, f32)}"))
        inverse = self._scalar(w, "rcp_approx", w.let(f"fadd float {power}, {literal(1.0, f32)}"))
        far = w.call("float", "llvm.fma.f32", ("float", inverse), ("float", literal(-2.0, f32)), ("float", literal(1.0, f32)))
        square, near = w.let(f"fmul float {x}, {x}"), literal(_TANH_SERIES[0], f32)
        for term in (_TANH_SERIES[1], 1.0):
            near = w.call("float", "llvm.fma.f32", ("float", near), ("float", square), ("float", literal(term, f32)))
        small = w.let(f"fcmp olt float {w.call('float', 'llvm.fabs.f32', ('float', x))}, {literal(0.25, f32)}")
        return w.let(f"select i1 {small}, float {w.let(f'fmul float {near}, {x}')}, float {far}")


def amdgpu_function(kernel: Kernel, entry: str, target: Target) -> tuple[str, set[str]]:
    """The LLVM text of the kernel, and the declarations it needs."""
    dialect = _AmdgpuDialect(kernel, entry, target)
    writer = FunctionWriter(kernel, dialect)
    shares = atomics.is_cooperative(kernel) or not kernel.attrs.get("noalias", True)
    params: list[str] = []
    for position, param in enumerate(kernel.params):
        name = f"%p{position}"
        writer.names[param] = name
        type_: Type = param.type
        if isinstance(type_, Tensor):
            align = f" align {type_.align}" if type_.align else ""
            # What other threads write before a barrier is read after it: LLVM must not think it knows all accesses.
            noalias = "" if kernel.attrs.get("aliased") or (shares and param in dialect.written) else " noalias"
            params.append(f"{GLOBAL}{noalias}{'' if param in dialect.written else ' readonly'}{align} {name}")
        elif dtype_of(type_).is_bool:
            params.append(f"i8 {name}.byte")
            writer.lines.append(f"  {name} = icmp ne i8 {name}.byte, 0")
        else:
            params.append(f"{dtype_of(type_).llvm} {name}")
    values = {size: f"%s{position}" for position, size in enumerate(kernel.size_names)}
    params += [f"{i64.llvm} {name}" for name in values.values()]
    writer.prepare_sizes(values)
    writer.block(kernel.body)
    writer.line("ret void")
    text = "\n".join(dialect.globals) + ("\n" if dialect.globals else "")
    text += (
        f"define protected amdgpu_kernel void @{entry}({', '.join(params)}) {_attributes(kernel)} {{\nentry:\n"
        + "\n".join([*writer.first, *writer.lines])
        + "\n}\n"
        + "\n".join(writer.metadata)
    )
    return text, writer.declarations


def _attributes(kernel: Kernel) -> str:
    """What LLVM should know of the kernel's launches."""
    return f'"amdgpu-flat-work-group-size"="{kernel.threads},{kernel.threads}" "uniform-work-group-size"="true"'
