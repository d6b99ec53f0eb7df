"""Matrix units, asynchronous copies and their barriers -> LLVM text for NVIDIA GPUs.

In: one op of `ir.ops_matrix`, the names of its operands and the writer of the function. Out: the names of its results; the
instructions are appended to the writer. `HANDLERS` has a function for each op but `tensor_map`, which is a parameter of the
kernel and no instruction; `ir.needs` has the feature a target must have for it.

What LLVM has no intrinsic for is inline assembly: `wgmma` whole (fence, every step, commit, so that nothing can come between)
and the wait that hands the accumulators out, which passes them through so that no reader can move ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType, f8e4m3, f8e5m2, f16, f32, f64, i8, u8
from tilewright.base.errors import CompilerBug
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type, memory_type
from tilewright.codegen.nvptx.cache import copy_with_hints
from tilewright.codegen.nvptx.grid import turn_until
from tilewright.ir.nodes import Op, Value
from tilewright.ir.ops_matrix import accumulator_dtype, mma_shape
from tilewright.ir.types import CopyMap, Tensor, dtype_of

Handler = Callable[[FunctionWriter, Op, Sequence[str]], Sequence[str]]
SHARED, CLUSTER = "ptr addrspace(3)", "ptr addrspace(7)"


# -- operands ---------------------------------------------------------------------------------------------------------


def _integer(op: Op, name: str, default: int = 0) -> int:
    value = op.attrs.get(name, default)
    assert isinstance(value, int)
    return value


def _word(w: FunctionWriter, value: Value, name: str, bits: int = 32) -> str:
    """An integer operand as one of that many bits."""
    dtype = dtype_of(value.type)
    if dtype.bits == bits:
        return name
    kind = "trunc" if dtype.bits > bits else "sext" if dtype.kind == "i" else "zext"
    return w.let(f"{kind} {dtype.llvm} {name} to i{bits}")


def _words(w: FunctionWriter, values: Sequence[Value], names: Sequence[str]) -> list[tuple[str, str]]:
    return [("i32", _word(w, value, name)) for value, name in zip(values, names, strict=True)]


def _place(w: FunctionWriter, op: Op, operands: Sequence[str], first: int) -> str:
    """The address of a shared tensor's element: operand `first` is the tensor, the next one the offset."""
    memory = op.operands[first].type
    assert isinstance(memory, Tensor)
    index = f"{llvm_type(op.operands[first + 1].type)} {operands[first + 1]}"
    return w.let(f"getelementptr inbounds {memory_type(memory.dtype)}, {SHARED} {operands[first]}, {index}")


def _parts(w: FunctionWriter, kind: str, value: str, count: int) -> list[str]:
    """The members of a structure."""
    return [w.let(f"extractvalue {kind} {value}, {k}") for k in range(count)]


def _plain(name: str) -> Handler:
    """An intrinsic without operands and results."""

    def handler(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
        w.call("void", name)
        return []

    return handler


# -- copies -----------------------------------------------------------------------------------------------------------


def _prefetch_map(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    w.call("void", "llvm.nvvm.prefetch.tensormap.p0", ("ptr", operands[0]))
    return []


def _coordinates(w: FunctionWriter, op: Op, operands: Sequence[str], first: int) -> list[tuple[str, str]]:
    """Where the box is, innermost axis first as the hardware wants it."""
    map_type = op.operands[2].type
    assert isinstance(map_type, CopyMap)
    last = first + len(map_type.box)
    return _words(w, op.operands[first:last], operands[first:last])[::-1]


def _tma_load(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    barrier = _place(w, op, operands, 3)
    target = w.let(f"addrspacecast {SHARED} {_place(w, op, operands, 0)} to {CLUSTER}")
    where = _coordinates(w, op, operands, 5)
    map_type = op.operands[2].type
    assert isinstance(map_type, CopyMap)
    mode, offsets = "tile", list[tuple[str, str]]()
    if map_type.pixels:
        mode = "im2col"
        first = 5 + len(where)
        offsets = [("i16", _word(w, op.operands[k], operands[k], 16)) for k in reversed(range(first, first + len(where) - 2))]
    many = bool(op.attrs.get("multicast"))
    mask = _word(w, op.operands[-1], operands[-1], 16) if many else "0"
    w.call(
        "void", f"llvm.nvvm.cp.async.bulk.tensor.g2s.{mode}.{len(where)}d", (CLUSTER, target), (SHARED, barrier),
        ("ptr", operands[2]), *where, *offsets, ("i16", mask), ("i64", "0"), ("i1", str(many).lower()), ("i1", "false"), ("i32", "0"),
    )  # fmt: skip
    return []


def _tma_store(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    source = _place(w, op, operands, 0)
    where = _coordinates(w, op, operands, 3)
    name = f"llvm.nvvm.cp.async.bulk.tensor.s2g.tile.{len(where)}d"
    w.call("void", name, (SHARED, source), ("ptr", operands[2]), *where, ("i64", "0"), ("i1", "false"))
    return []


def _tma_wait(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    name = "llvm.nvvm.cp.async.bulk.wait.group" + (".read" if op.attrs.get("read") else "")
    w.call("void", name, ("i32", str(_integer(op, "pending"))))
    return []


def _copy_async(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    source, bytes_ = op.operands[2], _integer(op, "bytes")
    assert isinstance(source.type, Tensor)
    target = _place(w, op, operands, 0)
    origin = w.element_pointer(source, operands[3 : 3 + source.type.rank])
    if "cache" in op.attrs or op.attrs.get("prefetch"):
        copy_with_hints(w, op, target, origin, operands[-1] if op.attrs.get("masked") else "")
        return []
    # Sixteen bytes at a time need not go through the first-level cache; fewer must.
    name = f"llvm.nvvm.cp.async.{'cg' if bytes_ == 16 else 'ca'}.shared.global.{bytes_}"
    arguments = [(SHARED, target), (w.dialect.pointer(source.type.space), origin)]
    if op.attrs.get("masked"):
        name += ".s"
        arguments.append(("i32", w.let(f"select i1 {operands[-1]}, i32 {bytes_}, i32 0")))
    w.call("void", name, *arguments)
    return []


def _copy_wait(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    w.call("void", "llvm.nvvm.cp.async.wait.group", ("i32", str(_integer(op, "pending"))))
    return []


def _copy_remote(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    # LLVM's intrinsic takes an mbarrier of this block only.
    places = [w.let(f"ptrtoint {SHARED} {_place(w, op, operands, first)} to i32") for first in (0, 2, 4)]
    size = _integer(op, "count") * _element(op.operands[2]).itemsize
    text = (
        "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, $0, $3; mapa.shared::cluster.u32 bar, $2, $3; "
        f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [$1], {size}, [bar]; }}"
    )
    arguments = ", ".join(f"i32 {x}" for x in (*places, _word(w, op.operands[6], operands[6])))
    w.line(f'call void asm sideeffect "{text}", "r,r,r,r,~{{memory}}"({arguments})')
    return []


# -- barriers ---------------------------------------------------------------------------------------------------------


def _mbarrier_init(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    w.call("void", "llvm.nvvm.mbarrier.init.shared", (SHARED, _place(w, op, operands, 0)), ("i32", str(_integer(op, "count"))))
    return []


def _mbarrier_arrive(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    barrier = _place(w, op, operands, 0)
    if not op.attrs.get("remote"):
        w.call("i64", "llvm.nvvm.mbarrier.arrive.scope.cta.space.cta", (SHARED, barrier), ("i32", "1"))
        return []
    rank = _word(w, op.operands[2], operands[2])
    there = w.call(CLUSTER, "llvm.nvvm.mapa.shared.cluster", (SHARED, barrier), ("i32", rank))
    # The scope of the cluster would cost a fence of the whole GPU; the arrival itself is all the other block waits for.
    w.call("void", "llvm.nvvm.mbarrier.arrive.scope.cta.space.cluster", (CLUSTER, there), ("i32", "1"))
    return []


def _load_remote(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    rank = _word(w, op.operands[2], operands[2])
    there = w.call(CLUSTER, "llvm.nvvm.mapa.shared.cluster", (SHARED, _place(w, op, operands, 0)), ("i32", rank))
    return [w.let(f"load {llvm_type(op.result.type)}, {CLUSTER} {there}")]


def _mbarrier_expect(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    barrier, bytes_ = _place(w, op, operands, 0), str(_integer(op, "bytes"))
    w.call("i64", "llvm.nvvm.mbarrier.arrive.expect.tx.scope.cta.space.cta", (SHARED, barrier), ("i32", bytes_))
    return []


def _mbarrier_wait(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    barrier = _place(w, op, operands, 0)
    parity = _word(w, op.operands[2], operands[2])
    again, done = w.new_label("wait"), w.new_label("waited")
    w.line(f"br label %{again}")
    w.open_label(again)
    ended = w.call("i1", "llvm.nvvm.mbarrier.try.wait.parity.scope.cta.space.cta", (SHARED, barrier), ("i32", parity))
    turn_until(w, op, ended, done, again)
    return []


def _named_barrier(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    word = "arrive" if op.attrs.get("arrive") else "sync"
    number = _word(w, op.operands[0], operands[0])
    w.call("void", f"llvm.nvvm.barrier.cta.{word}.aligned.count", ("i32", number), ("i32", str(_integer(op, "threads"))))
    return []


def _cluster_rank(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    return [w.call("i32", "llvm.nvvm.read.ptx.sreg.cluster.ctarank")]


def _cluster_sync(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    if not op.attrs.get("arrived"):
        w.call("void", "llvm.nvvm.barrier.cluster.arrive")
    w.call("void", "llvm.nvvm.barrier.cluster.wait")
    return []


def _raise_flag(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    where = w.element_pointer(op.operands[0], operands[1:])
    # The fence makes what others of the block wrote, and handed on by a barrier, part of what is released.
    text = "fence.acq_rel.gpu; st.release.gpu.global.u32 [$0], 1;"
    w.line(f'call void asm sideeffect "{text}", "l,~{{memory}}"(ptr addrspace(1) {where})')
    return []


def _await_flag(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    where = w.element_pointer(op.operands[0], operands[1:])
    again, done = w.new_label("wait"), w.new_label("waited")
    w.line(f"br label %{again}")
    w.open_label(again)
    text = "ld.acquire.gpu.global.u32 $0, [$1];"
    found = w.let(f'call i32 asm sideeffect "{text}", "=r,l,~{{memory}}"(ptr addrspace(1) {where})')
    raised = w.let(f"icmp ne i32 {found}, 0")
    turn_until(w, op, raised, done, again)
    return []


def _set_registers(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    way = "inc" if op.attrs.get("increase") else "dec"
    w.call("void", f"llvm.nvvm.setmaxnreg.{way}.sync.aligned.u32", ("i32", str(_integer(op, "count"))))
    return []


def _elect(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    both = w.call("{ i32, i1 }", "llvm.nvvm.elect.sync", ("i32", "-1"))
    return [w.let(f"extractvalue {{ i32, i1 }} {both}, 1")]


# -- matrix units -----------------------------------------------------------------------------------------------------

_WGMMA_NAMES: dict[DType, str] = {f32: "tf32", f8e4m3: "e4m3", f8e5m2: "e5m2", i8: "s8", u8: "u8"}
_SWIZZLE_128 = 1 << 62
_GROUP_BYTES = 1024
"""Eight rows of 128 bytes: the pattern of a swizzle, and the distance of one such group from the next."""


def _tied(
    w: FunctionWriter, op: Op, text: str, names: Sequence[str], extra: Sequence[str] = (), words: Sequence[str] = ()
) -> list[str]:
    """Inline assembly that changes the op's last operands in place: they come first, then `extra` as i64, then `words` as i32."""
    letters = {"float": "f", "double": "d", "i32": "r", "i64": "l"}
    kinds = [llvm_type(v.type) for v in op.results]
    tied = [] if op.attrs.get("fresh") else kinds
    if not letters.keys() >= set(kinds):
        raise CompilerBug.at("TW040", f"no registers for accumulators of type {', '.join(sorted(set(kinds)))}", op.span)
    constraints = ",".join(
        [*(f"={letters[k]}" for k in kinds), *map(str, range(len(tied))), *("l" for _ in extra), *("r" for _ in words), "~{memory}"]
    )
    result = kinds[0] if len(kinds) == 1 else "{ " + ", ".join(kinds) + " }"
    given = [*(f"{k} {n}" for k, n in zip(tied, names, strict=True)), *(f"i64 {e}" for e in extra), *(f"i32 {x}" for x in words)]
    arguments = ", ".join(given)
    value = w.let(f'call {result} asm sideeffect "{text}", "{constraints}"({arguments}) convergent')
    return [value] if len(kinds) == 1 else _parts(w, result, value, len(kinds))


def _element(value: Value) -> DType:
    """The dtype of a tensor's elements."""
    assert isinstance(value.type, Tensor)
    return value.type.dtype


def _descriptor(w: FunctionWriter, op: Op, operands: Sequence[str], first: int, major: str, block: int) -> str:
    """How the matrix unit finds a swizzled tile in shared memory: operand `first` is the tensor, the next one the offset.

    Bits 0-13: the address; 16-29: from one block of 64 along m or n to the next (nothing to say for rows along k); 32-45: from
    one group of eight rows to the next; all in units of 16 bytes. The offset is added last, so that the rest can leave a loop.
    """
    itemsize = _element(op.operands[first]).itemsize
    leading = block * itemsize if major == "mn" else 16
    rest = _SWIZZLE_128 | (_GROUP_BYTES >> 4) << 32 | (leading >> 4) << 16
    address = w.let(f"ptrtoint {SHARED} {operands[first]} to i32")
    units = w.let(f"and i32 {w.let(f'lshr i32 {address}, 4')}, {0x3FFF}")
    base = w.let(f"or i64 {w.let(f'zext i32 {units} to i64')}, {rest}")
    offset = _word(w, op.operands[first + 1], operands[first + 1])
    moved = w.let(f"lshr i32 {offset}, {(16 // itemsize).bit_length() - 1}")
    return w.let(f"add i64 {base}, {w.let(f'zext i32 {moved} to i64')}")


def _form(op: Op, dtype: DType, majors: Sequence[str]) -> tuple[str, str]:
    """The shape and types of a matrix instruction, and what follows its operands: the scale of the accumulator, signs of a and b (floats),
    transposition of what comes from shared memory (16 bits)."""
    kind = _WGMMA_NAMES.get(dtype, dtype.name)
    tail = "1" if dtype.is_int else "1, 1, 1"
    if dtype.itemsize == 2:
        tail += "".join(f", {int(m == 'mn')}" for m in majors)
    return f"m64n{_integer(op, 'n')}k{_integer(op, 'k')}.{'s32' if dtype.is_int else 'f32'}.{kind}.{kind}", tail


def _scaled(tail: str, fresh: bool) -> str:
    """What follows the operands of an instruction that may be the first to write its accumulators."""
    return "0" + tail[1:] if fresh else tail


def _wgmma_registers(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    words, n, count = _integer(op, "words"), _integer(op, "n"), len(op.results)
    dtype, major = _element(op.operands[words]), str(op.attrs.get("b_major", "k"))
    b = _descriptor(w, op, operands, words, major, _integer(op, "b_block"))
    shape, tail = _form(op, dtype, [major])
    lines = ["wgmma.fence.sync.aligned;"]
    steps = op.attrs["steps"]
    assert isinstance(steps, tuple)
    fresh = bool(op.attrs.get("fresh"))
    before = count if fresh else 2 * count
    for number, step in enumerate(steps):
        assert isinstance(step, tuple)
        word, move, start = (int(x) for x in step if isinstance(x, int))
        registers = ", ".join(f"${start + r}" for r in range(n // 2))
        a = ", ".join(f"${before + 1 + word + r}" for r in range(4))
        lines.append(f"{{ .reg .b64 db; add.s64 db, ${before}, {move * dtype.itemsize >> 4};")
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {{{a}}}, db, {_scaled(tail, fresh and not number)}; }}")
    lines.append("wgmma.commit_group.sync.aligned;")
    return _tied(w, op, "\\0A\\09".join(lines), operands[words + 2 :], (b,), operands[:words])


def _wgmma(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    dtype = _element(op.operands[0])
    majors = [str(op.attrs.get(name, "k")) for name in ("a_major", "b_major")]
    a = _descriptor(w, op, operands, 0, majors[0], _integer(op, "a_block"))
    b = _descriptor(w, op, operands, 2, majors[1], _integer(op, "b_block"))
    n, count = _integer(op, "n"), len(op.results)
    shape, tail = _form(op, dtype, majors)
    lines = ["wgmma.fence.sync.aligned;"]
    steps = op.attrs["steps"]
    assert isinstance(steps, tuple)
    fresh = bool(op.attrs.get("fresh"))
    for number, step in enumerate(steps):
        assert isinstance(step, tuple)
        move_a, move_b, start = (int(x) for x in step if isinstance(x, int))
        registers = ", ".join(f"${start + r}" for r in range(n // 2))
        moves = [
            f"add.s64 d{side}, ${(1 if fresh else 2) * count + which}, {move * dtype.itemsize >> 4};"
            for which, (side, move) in enumerate((("a", move_a), ("b", move_b)))
        ]
        lines.append(f"{{ .reg .b64 da, db; {' '.join(moves)}")
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, da, db, {_scaled(tail, fresh and not number)}; }}")
    lines.append("wgmma.commit_group.sync.aligned;")
    return _tied(w, op, "\\0A\\09".join(lines), operands[4:], (a, b))


def _wgmma_wait(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    pending = _integer(op, "pending")
    if pending and not op.attrs.get("finished"):
        # The accumulators of the groups still running must stay where they are: nothing may look like a use of them.
        w.call("void", "llvm.nvvm.wgmma.wait_group.sync.aligned", ("i64", str(pending)))
        return operands
    return _tied(w, op, f"wgmma.wait_group.sync.aligned {pending};", operands)


_MMA_NAMES = {"bf16": "bf16", "f16": "f32.f32", "f32": "tf32", "i8": "s8", "u8": "u8", "f64": "f64", "f8e4m3": "f32.e4m3.e4m3.f32",
              "f8e5m2": "f32.e5m2.e5m2.f32"}  # fmt: skip


def _mma(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    dtype = op.attrs["dtype"]
    assert isinstance(dtype, DType)
    (m, n, k), a, b, c = mma_shape(op.attrs)
    kind = "<2 x half>" if dtype is f16 else "double" if dtype is f64 else "i32"
    result = accumulator_dtype(dtype).llvm
    inputs = [w.let(f"bitcast i32 {x} to {kind}") if dtype is f16 else x for x in operands[: a + b]]
    arguments = [*((kind, x) for x in inputs), *((result, x) for x in operands[a + b :])]
    both = "{ " + ", ".join([result] * c) + " }"
    return _parts(w, both, w.call(both, f"llvm.nvvm.mma.m{m}n{n}k{k}.row.col.{_MMA_NAMES[dtype.name]}", *arguments), c)


def _matrix_name(op: Op, count: int) -> str:
    return f"llvm.nvvm.{op.opcode}.sync.aligned.m8n8.x{count}{'.trans' if op.attrs.get('trans') else ''}.b16.p3"


def _ldmatrix(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    count = _integer(op, "count")
    result = "i32" if count == 1 else "{ " + ", ".join(["i32"] * count) + " }"
    value = w.call(result, _matrix_name(op, count), (SHARED, _place(w, op, operands, 0)))
    return [value] if count == 1 else _parts(w, result, value, count)


def _stmatrix(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    values = operands[2:]
    w.call("void", _matrix_name(op, len(values)), (SHARED, _place(w, op, operands, 0)), *(("i32", v) for v in values))
    return []


def _bits(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    return [w.let(f"bitcast {llvm_type(op.operands[0].type)} {operands[0]} to {llvm_type(op.results[0].type)}")]


def _wait_previous(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    # LLVM's intrinsic says that it touches no memory, so that loads could move across it.
    w.line('call void asm sideeffect "griddepcontrol.wait;", "~{memory}"()')
    return []


HANDLERS: dict[str, Handler] = {
    "prefetch_map": _prefetch_map, "tma_load": _tma_load, "tma_store": _tma_store, "tma_wait": _tma_wait,
    "tma_commit": _plain("llvm.nvvm.cp.async.bulk.commit.group"), "fence_async": _plain("llvm.nvvm.fence.proxy.async.shared_cta"),
    "copy_async": _copy_async, "copy_commit": _plain("llvm.nvvm.cp.async.commit.group"), "copy_wait": _copy_wait,
    "copy_remote": _copy_remote,
    "mbarrier_init": _mbarrier_init, "fence_init": _plain("llvm.nvvm.fence.mbarrier_init.release.cluster"),
    "mbarrier_arrive": _mbarrier_arrive, "mbarrier_expect": _mbarrier_expect, "mbarrier_wait": _mbarrier_wait,
    "named_barrier": _named_barrier, "cluster_rank": _cluster_rank, "load_remote": _load_remote, "cluster_sync": _cluster_sync,
    "cluster_arrive": _plain("llvm.nvvm.barrier.cluster.arrive"),
    "wait_previous": _wait_previous,
    "release_next": _plain("llvm.nvvm.griddepcontrol.launch.dependents"),
    "raise_flag": _raise_flag, "await_flag": _await_flag,
    "set_registers": _set_registers, "elect": _elect, "wgmma": _wgmma, "wgmma_registers": _wgmma_registers, "wgmma_wait": _wgmma_wait, "mma": _mma,
    "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "to_bits": _bits, "from_bits": _bits,
}  # fmt: skip
