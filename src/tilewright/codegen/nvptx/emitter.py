"""Thread-stage IR -> LLVM text for NVIDIA GPUs: one `ptx_kernel` per kernel.

Parameters follow `base.abi`: pointers, scalars, then sizes, then the copy engine's maps by value. Tensors that are only read get
`noalias` and become non-coherent loads. Shared tensors are module globals, or places in one block of dynamic shared memory where
there is too much for that or mbarriers are used. Line information points at the user's source, so profilers show it.
Only intrinsics LLVM 22 knows may be named here: an unknown name would silently become an external call; a test compares
the names with LLVM's list and assembles every op with ptxas.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, f32, f64, i64
from tilewright.base.errors import CompilerBug, TargetLimit
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.codegen.llvm.constants import initialiser
from tilewright.codegen.llvm.emitter import FunctionWriter, intrinsic, literal, llvm_type, memory_type
from tilewright.codegen.nvptx import grid as nvptx_grid
from tilewright.codegen.nvptx.watchdog import Watchdog
from tilewright.ir.needs import alignment, cluster_of, element_count, feature_of, shared_places
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.ops_matrix import DEFINITIONS
from tilewright.ir.types import CopyMap, Scalar, Tensor, Vec, dtype_of, with_dtype

_CONSTRAINTS = {"float": "f", "double": "d", "i64": "l", "i32": "r"}
"""How inline assembly takes numbers."""
_SPACES = {"global": 1, "shared": 3, "constant": 4, "local": 0}
"""LLVM's numbers. Local memory is generic here: LLVM makes it local itself, and converts an `alloca` in address space 5 twice, so that
it faults."""
PTX_REQUIRED = {"tma": 80, "mbarrier": 80, "cluster": 78, "wgmma": 80, "setmaxnreg": 80}
"""The PTX version, times ten, that spells a feature's instructions; LLVM ends the process where it is lower."""
_MATRIX = frozenset(row.name for row in DEFINITIONS)
"""Ops of which `codegen.nvptx.matrix` has most; kernels without them do without it."""
SIMT = frozenset({
    "bulk_load", "bulk_store", "store_remote", "atomic_remote", "atomic", "atomic_load", "atomic_store", "warp_sync", "shuffle", "vote", "match", "redux",
    "barrier_reduce", "active_mask", "lane_id", "warp_id", "print", "assert", "report", "lane_mask", "clock", "global_timer", "nanosleep", "byte_perm", "dp4a",
    "sin_approx", "cos_approx", "log2_approx", "sqrt_approx", "rsqrt_approx", "div_approx",
})  # fmt: skip
"""Ops of `codegen.nvptx.simt`; kernels without them do without it."""
_OF_VERSIONS = frozenset({"atomic", "atomic_load", "atomic_store", "mma"})
"""Ops that some versions of PTX do not have, beside accesses that say something of caches."""
STATIC_SHARED = 48 << 10
"""Bytes of shared memory a kernel may have without asking for them at the launch."""


@record
class Map:
    """A map of the copy engine the kernel takes as a parameter: of which of the kernel's parameters, and how it is seen."""

    parameter: int
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: tuple[int, ...]
    swizzle: int
    pixels: int = 0
    lower: tuple[Size, ...] = ()
    upper: tuple[Size, ...] = ()
    steps: tuple[int, ...] = ()
    rounds: bool = False


@record
class Needs:
    """What a launch of the kernel must bring."""

    shared_bytes: int
    """Dynamic shared memory; 0 where it is static."""
    maps: tuple[Map, ...]


def kernel_needs(kernel: Kernel) -> Needs:
    """What a launch of the thread-stage kernel must bring, in the order of its parameters."""
    maps = tuple(dict.fromkeys(map_of(kernel, op) for op in walk(kernel.body) if op.opcode == "tensor_map"))
    _, shared = shared_places(kernel)
    return Needs(shared if _is_dynamic(kernel, shared) else 0, maps)


def map_of(kernel: Kernel, op: Op) -> Map:
    """The map that an op stands for."""
    if op.operands[0] not in kernel.params:
        raise CompilerBug.at("TW040", "a map of a tensor that is no parameter", op.span)
    type_ = op.results[0].type
    assert isinstance(type_, CopyMap)
    shape, strides, lower, upper = (_sizes(op, name) for name in ("shape", "strides", "lower", "upper"))
    steps = op.attrs.get("steps", ())
    assert isinstance(steps, tuple)
    return Map(
        kernel.params.index(op.operands[0]), type_.dtype, shape, strides, type_.box, type_.swizzle, type_.pixels, lower, upper,
        tuple(x for x in steps if isinstance(x, int)), bool(op.attrs.get("round")),
    )  # fmt: skip


def ptx_needed(kernel: Kernel, target: Target) -> int:
    """The PTX version, times ten, without which the kernel's ops cannot be spelled; 0 where any will do."""
    if kernel.opcodes.isdisjoint(_OF_VERSIONS) and not any("cache" in op.attrs or "prefetch" in op.attrs for op in walk(kernel.body)):
        return 0
    from tilewright.codegen.nvptx.simt import ptx_version

    return max(ptx_version(op, target) for op in walk(kernel.body))


def _sizes(op: Op, name: str) -> tuple[Size, ...]:
    found = op.attrs.get(name, ())
    assert isinstance(found, tuple)
    return tuple(Size.of(x) for x in found if isinstance(x, int | Size))


def _is_dynamic(kernel: Kernel, shared: int) -> bool:
    return shared > STATIC_SHARED or any(op.opcode == "mbarrier_init" or "phase" in op.attrs for op in walk(kernel.body))


def _written(kernel: Kernel, before: bool = True) -> set[Value]:
    """The tensors the kernel writes, by itself or through the copy engine, or as another parameter (`coherent`). All of them where it starts before the kernel
    before it has ended: the assembler moves non-coherent loads across the wait."""
    coherent = kernel.attrs.get("coherent", ())
    assert isinstance(coherent, tuple)
    if kernel.attrs.get("aliased") or (before and _waits(kernel)):
        return set(kernel.params)
    others = {kernel.params[i] for i in coherent if isinstance(i, int)}
    mapped = {op.results[0]: op.operands[0] for op in walk(kernel.body) if op.opcode == "tensor_map"}
    stores = {mapped[op.operands[2]] for op in walk(kernel.body) if op.opcode == "tma_store"}
    stores |= {op.operands[2] for op in walk(kernel.body) if op.opcode == "bulk_store"}
    return others | stores | {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "atomic_store", "raise_flag", "count_up", "report")}


def _waits(kernel: Kernel) -> bool:
    """Whether another kernel writes while it is there already."""
    return any(op.opcode == "wait_previous" for op in walk(kernel.body))


class _NvptxDialect:
    def __init__(self, kernel: Kernel, entry: str, target: Target) -> None:
        self.kernel, self.entry, self.target = kernel, entry, target
        self.globals: list[str] = []
        self.needs = kernel_needs(kernel)
        self.places, _ = shared_places(kernel)
        self.written = _written(kernel)
        # Nothing that the kernel itself does changes these: only the wait for the kernel before, after which all loads are.
        self.unwritten = set(kernel.params) - _written(kernel, before=False)
        self.constant = {op.results[0] for op in walk(kernel.body) if op.opcode == "tensor_at" and op.attrs.get("constant")}
        """Tensors behind addresses that nobody writes to."""
        self.unwritten |= self.constant
        self.locations: dict[tuple[int, int], int] = {}
        self.source = kernel.span.source
        self.watchdog = Watchdog(kernel)

    def pointer(self, space: str) -> str:
        return f"ptr addrspace({_SPACES[space]})"

    def load_suffix(self, memory: Value) -> str:
        read_only = (memory in self.kernel.params and memory not in self.written) or memory in self.constant
        return ", !invariant.load !0" if read_only else ""

    def location(self, op: Op) -> str:
        if not op.span.line or op.span.source is None or self.source is None or op.span.source.path != self.source.path:
            return ", !dbg !7" if self.source is not None else ""
        number = self.locations.setdefault((op.span.line, op.span.column), 100 + len(self.locations))
        return f", !dbg !{number}"

    def turn(self, w: FunctionWriter, op: Op) -> None:
        self.watchdog.turn(w, op)

    def rest(self, w: FunctionWriter, op: Op) -> int:
        return 0

    def pause(self, w: FunctionWriter) -> None: ...

    def before_report(self, w: FunctionWriter, loaded: Sequence[Value]) -> None:
        """All loads are under way before one of them is waited for: LLVM would move those that only a store needs behind the branch."""
        for value in loaded:
            type_, dtype = value.type, dtype_of(value.type)
            if dtype.llvm not in _CONSTRAINTS:
                continue
            name = w.names[value]
            element = w.let(f"extractelement {llvm_type(type_)} {name}, i64 0") if isinstance(type_, Vec) else name
            w.line(f'call void asm sideeffect "", "{_CONSTRAINTS[dtype.llvm]}"({dtype.llvm} {element})')

    def better(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
        if op.opcode == "size" and "kept" in op.attrs:
            # LLVM does not see what it is made of: multiples of a long polynomial, 64 of them in a chain, keep its straight-line strength reduction busy for hours.
            size = op.attrs["value"]
            assert isinstance(size, Size)
            return w.let(f'call i64 asm "mov.b64 $0, $1;", "=l,l"(i64 {w.sizes[size]})')
        if op.opcode == "load" and "cache" in op.attrs:
            from tilewright.codegen.nvptx import cache

            return cache.load(w, op, operands, self.target, op.operands[0] in self.written)
        if op.opcode in ("min", "max") and dtype_of(op.operands[0].type).is_float:
            return self._extreme(w, op, operands)
        if op.opcode in ("div", "sqrt") and "ordinary" in op.attrs:
            from tilewright.codegen.nvptx.ordinary import ordinary

            return ordinary(w, op, operands)
        if op.opcode in SIMT:
            from tilewright.codegen.nvptx.simt import BETTER

            if op.opcode in BETTER:
                return BETTER[op.opcode](w, op, operands)
        if not operands or dtype_of(op.operands[0].type) is not f32:
            return None
        if op.opcode == "div" and "narrow" in op.attrs:
            return self._elementwise(w, op, operands, "llvm.nvvm.div.full")
        return None

    def _extreme(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
        """One instruction where there is one that propagates NaN; else the one that does not, and a look for NaN. For both -0 is below 0."""
        type_ = op.operands[0].type
        if self.target.sm >= 80 and dtype_of(type_) is not f64:
            return intrinsic(w, f"{op.opcode}imum", type_, *operands)
        given, wide = llvm_type(type_), with_dtype(type_, f32)
        a, b = operands
        if dtype_of(type_).is_small_float:
            type_ = wide
            a, b = (w.let(f"fpext {given} {operand} to {llvm_type(wide)}") for operand in operands)
        kind = llvm_type(type_)
        found = intrinsic(w, f"{op.opcode}imumnum", type_, a, b)
        nan = w.let(f"fcmp uno {kind} {a}, {b}")
        mask = f"<{type_.width} x i1>" if isinstance(type_, Vec) else "i1"
        nothing = w.splat(literal(float("nan"), dtype_of(type_)), type_)
        result = w.let(f"select {mask} {nan}, {kind} {nothing}, {kind} {found}")
        return result if kind == given else w.let(f"fptrunc {kind} {result} to {given}")

    def emit(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        self._require(op)
        if op.opcode == "tensor_map":
            return [f"%map{self.needs.maps.index(map_of(self.kernel, op))}"]
        if op.opcode in _MATRIX:
            from tilewright.codegen.nvptx.matrix import HANDLERS

            if op.opcode in HANDLERS:
                return HANDLERS[op.opcode](w, op, operands)
        if op.opcode in SIMT:
            from tilewright.codegen.nvptx import simt

            if op.opcode in simt.FAST:
                return [self._elementwise(w, op, operands, simt.FAST[op.opcode])]
            return simt.HANDLERS[op.opcode](w, op, operands, self.target)
        if op.opcode == "store" and op.attrs.get("masked"):
            from tilewright.codegen.nvptx.masked import masked_store

            return masked_store(w, op, operands)
        if op.opcode == "store":
            from tilewright.codegen.nvptx import cache

            return cache.store(w, op, operands, self.target)
        if op.opcode == "load" and op.attrs.get("masked"):
            from tilewright.codegen.nvptx.masked import masked_load

            return [masked_load(w, op, operands, read_only=bool(self.load_suffix(op.operands[0])), ordered=bool(op.attrs.get("early")) or op.operands[0] not in self.unwritten)]
        if op.opcode == "program_id":
            return [self._register(w, "ctaid", op)]
        if op.opcode == "thread_id":
            return [self._register(w, "tid", op)]
        if op.opcode == "grid_size":
            return [self._register(w, "nctaid", op)]
        if op.opcode == "grid_barrier":
            nvptx_grid.grid_barrier(w, op)
            return []
        if op.opcode == "count_up":
            nvptx_grid.count_up(w, op, operands)
            return []
        if op.opcode == "await_count":
            nvptx_grid.await_count(w, op, operands)
            return []
        if op.opcode == "tensor_at":
            where = w.element_pointer(op.operands[0], operands[1:])
            address = w.let(f"load i64, ptr addrspace(1) {where}, align 8, !invariant.load !0")
            return [w.let(f"inttoptr i64 {address} to ptr addrspace(1)")]
        if op.opcode == "barrier":
            w.call("void", "llvm.nvvm.barrier.cta.sync.aligned.all", ("i32", "0"))
            return []
        if op.opcode == "fence":
            return self._fence(w, op)
        if op.opcode == "alloc":
            return [self._alloc(w, op)]
        if op.opcode == "prefetch":
            where = w.element_pointer(op.operands[0], operands[1:])
            size = op.attrs.get("bytes", 0)
            if size:
                w.line(f'call void asm sideeffect "cp.async.bulk.prefetch.L2.global [$0], {size};", "l"(ptr addrspace(1) {where})')
                return []
            # LLVM has an intrinsic for it, but only from Hopper on.
            w.line(f'call void asm sideeffect "prefetch.global.L2 [$0];", "l"(ptr addrspace(1) {where})')
            return []
        if op.opcode == "exp2_approx":
            return [self._elementwise(w, op, operands, "llvm.nvvm.ex2.approx.ftz.f32")]
        if op.opcode == "rcp_approx":
            return [self._elementwise(w, op, operands, "llvm.nvvm.rcp.approx.ftz.f")]
        if op.opcode == "tanh_approx":
            # LLVM has no intrinsic for it.
            return [self._elementwise(w, op, operands, 'asm "tanh.approx.f32 $0, $1;", "=f,f"')]
        return None

    def _require(self, op: Op) -> None:
        """Refuse what this version of PTX has no word for: LLVM ends the process."""
        feature = feature_of(op)
        if self.target.ptx < PTX_REQUIRED.get(feature, 0):
            raise TargetLimit.at("TW020", f"{self.target.name} cannot do {op.opcode}: it has no {feature}", op.span)

    def _elementwise(self, w: FunctionWriter, op: Op, operands: Sequence[str], name: str) -> str:
        """A scalar f32 intrinsic, element by element on a vec."""
        type_ = op.operands[0].type
        if dtype_of(type_) is not f32:
            raise CompilerBug.at("TW040", f"{op.opcode} is for f32 only", op.span)

        def one(*values: str) -> str:
            given = [("float", v) for v in values]
            return w.let(f"call float {name}({', '.join(map(' '.join, given))})") if name.startswith("asm") else w.call("float", name, *given)

        if isinstance(type_, Scalar):
            return one(*operands)
        kind, result = llvm_type(type_), "poison"
        for lane in range(type_.width):  # type: ignore[union-attr]
            element = one(*(w.let(f"extractelement {kind} {operand}, i64 {lane}") for operand in operands))
            result = w.let(f"insertelement {kind} {result}, float {element}, i64 {lane}")
        return result

    def _register(self, w: FunctionWriter, name: str, op: Op) -> str:
        axis = op.attrs.get("axis", 0)
        assert isinstance(axis, int)
        if op.attrs.get("fresh"):
            # What is computed of it is computed here, and not kept from the start of a large kernel on.
            value = w.let(f'call i32 asm sideeffect "mov.u32 $0, %{name}.{"xyz"[axis]};", "=r"()')
        else:
            value = w.call("i32", f"llvm.nvvm.read.ptx.sreg.{name}.{'xyz'[axis]}")
        return w.let(f"zext i32 {value} to i64")

    def _fence(self, w: FunctionWriter, op: Op) -> list[str]:
        scope = {"block": ' syncscope("block")', "cluster": ' syncscope("cluster")', "device": ' syncscope("device")', "system": ""}.get(str(op.attrs.get("scope")))
        if scope is not None:
            w.line(f"fence{scope} seq_cst")
        return []

    def _alloc(self, w: FunctionWriter, op: Op) -> str:
        memory = op.results[0].type
        assert isinstance(memory, Tensor)
        array, align = f"[{element_count(memory)} x {memory_type(memory.dtype)}]", alignment(memory)
        if memory.space == "local":
            return w.let(f"alloca {array}, align {align}")
        if memory.space == "shared" and self.needs.shared_bytes:
            # Only local symbols may have dots in their names: LLVM rewrites those, and PTX has none.
            block = f"@{self.entry}_shared"
            if not self.globals:
                self.globals.append(f"{block} = external addrspace(3) global [0 x i8], align 1024")
            return w.let(f"getelementptr i8, ptr addrspace(3) {block}, i64 {self.places[op.results[0]]}")
        name = f"@{self.entry}.{memory.space}{len(self.globals)}"
        if memory.space == "constant":
            self.globals.append(f"{name} = internal addrspace({_SPACES['constant']}) constant {initialiser(op)}, align {align}")
            return name
        self.globals.append(f"{name} = internal addrspace({_SPACES[memory.space]}) global {array} poison, align {align}")
        return name


def nvptx_function(kernel: Kernel, entry: str, target: Target) -> tuple[str, set[str], Needs]:
    """The LLVM text of the kernel, the declarations it needs, and what a launch must bring."""
    dialect = _NvptxDialect(kernel, entry, target)
    writer = FunctionWriter(kernel, dialect)
    params: list[str] = []
    cooperative = nvptx_grid.is_cooperative(kernel)
    for position, param in enumerate(kernel.params):
        name = f"%p{position}"
        writer.names[param] = name
        if isinstance(param.type, Tensor):
            align = f" align {param.type.align}" if param.type.align else ""
            readonly = "" if param in dialect.written else " readonly"
            # What other threads write before a barrier is read after it: LLVM must not think it knows all accesses. Within a block the
            # passes make no such kernels; explicit ones say so.
            shares = cooperative or not kernel.attrs.get("noalias", True)
            noalias = "" if kernel.attrs.get("aliased") or _waits(kernel) or (shares and param in dialect.written) else " noalias"
            params.append(f"ptr addrspace(1){noalias}{readonly}{align} {name}")
        else:
            assert isinstance(param.type, Scalar)
            dtype = param.type.dtype
            if dtype.is_bool:
                params.append(f"i8 {name}.byte")
                writer.lines.append(f"  {name} = icmp ne i8 {name}.byte, 0")
            else:
                params.append(f"{dtype.llvm} {name}")
    values: dict[str, str] = {}
    for position, size in enumerate(kernel.size_names):
        params.append(f"{i64.llvm} %s{position}")
        values[size] = f"%s{position}"
    for position in range(len(dialect.needs.maps)):
        params.append(f'ptr byval([128 x i8]) align 64 "nvvm.grid_constant" %map{position}')
    writer.prepare_sizes(values)
    dialect.watchdog.begin(writer)
    writer.block(kernel.body)
    writer.current = None
    writer.line("ret void")
    subprogram = " !dbg !5" if dialect.source is not None else ""
    text = "\n".join(dialect.globals) + ("\n" if dialect.globals else "")
    text += (
        f"define ptx_kernel void @{entry}({', '.join(params)}) {_attributes(kernel, target)}{subprogram} {{\nentry:\n"
        + "\n".join([*writer.first, *writer.lines])
        + "\n}\n!0 = !{}\n"
        + "\n".join(writer.metadata)
        + "\n"
        + _debug_info(kernel, entry, dialect)
    )
    return text, writer.declarations, dialect.needs


def _attributes(kernel: Kernel, target: Target) -> str:
    """What the assembler should know of the kernel's launches, and how many registers to give it."""
    words = [f'"nvvm.reqntid"="{kernel.threads}"']
    if cluster_of(kernel) > 1:
        words.append(f'"nvvm.cluster_dim"="{cluster_of(kernel)},1,1"')
    for name, attribute in (("min_blocks", "minctasm"), ("max_registers", "maxnreg")):
        if name in kernel.attrs:
            words.append(f'"nvvm.{attribute}"="{kernel.attrs[name]}"')
    return " ".join(words)


def _debug_info(kernel: Kernel, entry: str, dialect: _NvptxDialect) -> str:
    """Line tables only: kinds other than DebugDirectivesOnly make the backend de-optimise."""
    if dialect.source is None:
        return ""
    path = dialect.source.path.replace("\\", "/").replace('"', "'")
    lines = [
        "!llvm.dbg.cu = !{!1}",
        "!llvm.module.flags = !{!2, !3}",
        '!1 = distinct !DICompileUnit(language: DW_LANG_C, file: !4, producer: "tilewright", isOptimized: true, '
        "runtimeVersion: 0, emissionKind: DebugDirectivesOnly)",
        '!2 = !{i32 2, !"Dwarf Version", i32 2}',
        '!3 = !{i32 2, !"Debug Info Version", i32 3}',
        f'!4 = !DIFile(filename: "{path}", directory: "")',
        f'!5 = distinct !DISubprogram(name: "{entry}", scope: !4, file: !4, line: {kernel.span.line}, type: !6, '
        f"scopeLine: {kernel.span.line}, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !1)",
        "!6 = !DISubroutineType(types: !{})",
        f"!7 = !DILocation(line: {kernel.span.line}, column: 1, scope: !5)",
    ]
    for (line, column), number in dialect.locations.items():
        lines.append(f"!{number} = !DILocation(line: {line}, column: {column}, scope: !5)")
    return "\n".join(lines) + "\n"
