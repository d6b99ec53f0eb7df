"""GPU code as data of a host object. In: an `Artifact` for NVIDIA's GPUs, its cubin; out: LLVM text with one symbol, and the C types that say what it holds.

`NAME_program` is a table: the PTX and the cubin, parameters, scratch arrays, names of sizes, and for each launch its entry, threads, shared memory,
arguments in their order, tensor maps, and a function that fills its grid. Sizes are one array of int64: those that the caller gives, then those that
`check` computes from them. `check` returns 0, the number of the check that failed, or a code of `c_entry.py`. Nothing here calls a driver: the caller
loads it, and launches in the order of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, Launch, MapParam, ScalarParam
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import Size, number_name, product
from tilewright.codegen.host.c_entry import NEGATIVE, TOO_LARGE, CheckedLines, call_checks, size_names, whole_numbers
from tilewright.codegen.llvm.sizes import CHECKED_STEPS, DECLARATIONS

ROLES = ("input", "output", "inout", "number")
POINTER, NUMBER, SCRATCH_POINTER, SIZE, MAP = range(5)
_RELATIONS = {"eq": "eq", "le": "sle", "lt": "slt"}
_MOST_AXES = 5
_TYPES = (
    "%parameter = type { ptr, ptr, i32, i32, ptr, i32 }",
    "%scratch = type { ptr, ptr, i32 }",
    "%argument = type { i32, i32 }",
    f"%map = type {{ %argument, ptr, i32, i32, [{_MOST_AXES} x i32], i32, ptr }}",
    "%launch = type { ptr, i32, i32, i32, i32, i32, i32, i32, ptr, ptr, ptr }",
    "%program = type { ptr, ptr, ptr, i64, ptr, i64, i32, i32, i32, i32, i32, ptr, ptr, ptr, ptr, ptr }",
)
C_TYPES = f"""#ifndef TW_PROGRAM
#define TW_PROGRAM
enum {{ TW_INPUT, TW_OUTPUT, TW_IN_PLACE, TW_VALUE }};
/* What a caller gives: an array (its shape as text, its address a multiple of align), or a number. */
typedef struct {{ const char *name, *dtype; int32_t role, rank; const char *shape; int32_t align; }} tilewright_parameter;
/* An array of the caller's that the kernels use between them; zeroed: all bytes must be 0 before the first launch. */
typedef struct {{ const char *name; int64_t (*bytes)(const int64_t *sizes); int32_t zeroed; }} tilewright_scratch;
enum {{ TW_POINTER, TW_NUMBER, TW_SCRATCH_POINTER, TW_SIZE, TW_MAP }};
/* One argument of a kernel: the address or the number of parameters[index], the address of scratch[index], sizes[index] as int64_t, or a
   CUtensorMap of maps[index] by value. */
typedef struct {{ int32_t kind, index; }} tilewright_argument;
/* What a CUtensorMap is made of, outermost axis first; strides in elements. swizzle: bytes, 0 for none. rounds: f32 becomes tf32 on its way. */
typedef struct {{
    tilewright_argument array; const char *dtype; int32_t rank, swizzle, box[{_MOST_AXES}], rounds;
    int32_t (*extents)(const int64_t *sizes, int64_t *shape, int64_t *strides);
}} tilewright_map;
/* cluster: blocks of a cluster, along x. cooperative: its blocks wait for each other, launch it with cuLaunchCooperativeKernel. persistent: the grid may have
   fewer blocks, and must not have more than run at once. grid fills three extents and returns 0, or a code where a GPU has no such grid. */
typedef struct {{
    const char *entry; int32_t threads, shared_bytes, cluster, cooperative, persistent, argument_count, map_count;
    const tilewright_argument *arguments; const tilewright_map *maps; int32_t (*grid)(const int64_t *sizes, uint32_t *grid);
}} tilewright_launch;
/* sizes names size_count numbers: the caller fills the first given_count, check tests them and fills the rest. The PTX ends with a 0 that
   ptx_bytes does not count; cubin is NULL where there is none. */
typedef struct {{
    const char *name, *target;
    const unsigned char *ptx; int64_t ptx_bytes; const unsigned char *cubin; int64_t cubin_bytes;
    int32_t parameter_count, scratch_count, size_count, given_count, launch_count;
    const tilewright_parameter *parameters; const tilewright_scratch *scratch; const char *const *sizes; const tilewright_launch *launches;
    int32_t (*check)(int64_t *sizes);
}} tilewright_program;
#endif"""


def embedded_text(artifact: Artifact, name: str, cubin: bytes | None, shown: Callable[[Size], str]) -> str:
    """LLVM text that defines `NAME_program`. `shown` writes a size as callers read it."""
    return _TableWriter(artifact, name, shown).text(artifact.code.rstrip(b"\0"), cubin)


def given_sizes(artifact: Artifact) -> tuple[str, ...]:
    """The sizes that a caller fills in: those of arrays, then whole numbers among the parameters."""
    return tuple(dict.fromkeys((*size_names(artifact), *(p.name for p in whole_numbers(artifact)))))


class _TableWriter:
    def __init__(self, artifact: Artifact, name: str, shown: Callable[[Size], str]) -> None:
        self.artifact, self.name, self.shown = artifact, name, shown
        self.globals: list[str] = []
        self.functions: list[str] = []
        self.given = given_sizes(artifact)
        self.sizes = (*self.given, *(n for n, _ in artifact.computed))
        self.parameters = (*artifact.inputs, *artifact.outputs)
        for launch in artifact.launches:
            if launch.values or any(m.pixels for m in launch.maps):
                what = "a tensor map of images" if not launch.values else "sizes that the host computes for it"
                raise TargetLimit.at(
                    "TW020",
                    f"kernel {launch.entry} takes {what}, which a launch table does not describe",
                    help="leave out --embed: the header and the loader describe it",
                )

    def text(self, ptx: bytes, cubin: bytes | None) -> str:
        artifact = self.artifact
        launches = self._table("launches", "%launch", [self._launch(launch) for launch in artifact.launches])
        parameters = self._table("parameters", "%parameter", [self._parameter(p) for p in self.parameters])
        scratch = self._table("scratch", "%scratch", [self._scratch(array) for array in artifact.scratch])
        names = self._table("sizes", "ptr", [f"ptr {self._string(self.shown(Size.of(n)))}" for n in self.sizes])
        fields = (
            f"ptr {self._string(artifact.name)}", f"ptr {self._string(artifact.target)}", f"ptr {self._bytes(ptx + bytes(1))}", f"i64 {len(ptx)}",
            f"ptr {self._bytes(cubin) if cubin else 'null'}", f"i64 {len(cubin or b'')}", f"i32 {len(self.parameters)}", f"i32 {len(artifact.scratch)}",
            f"i32 {len(self.sizes)}", f"i32 {len(self.given)}", f"i32 {len(artifact.launches)}", f"ptr {parameters}", f"ptr {scratch}", f"ptr {names}",
            f"ptr {launches}", f"ptr {self._check()}",
        )  # fmt: skip
        whole = f"@{self.name}_program = constant %program {{ {', '.join(fields)} }}"
        return "\n".join((*_TYPES, *DECLARATIONS, *CHECKED_STEPS, *self.globals, whole, *self.functions, ""))

    # -- data -------------------------------------------------------------------------------------------------------

    def _bytes(self, data: bytes) -> str:
        """A global of these bytes. The driver reads a cubin where it lies: it begins at a multiple of 16."""
        name = f"@data.{len(self.globals)}"
        written = "".join(chr(b) if 32 <= b < 127 and b not in (34, 92) else f"\\{b:02X}" for b in data)
        self.globals.append(f'{name} = private constant [{len(data)} x i8] c"{written}", align 16')
        return name

    def _string(self, text: str) -> str:
        return self._bytes(text.encode() + bytes(1))

    def _table(self, name: str, kind: str, rows: Sequence[str]) -> str:
        if not rows:
            return "null"
        made = f"@table.{name}.{len(self.globals)}"
        items = ", ".join(row if kind == "ptr" else f"{kind} {{ {row} }}" for row in rows)
        self.globals.append(f"{made} = private constant [{len(rows)} x {kind}] [ {items} ]")
        return made

    def _parameter(self, p: ArrayParam | ScalarParam) -> str:
        dtype = self._string(p.dtype.name)
        if isinstance(p, ScalarParam):
            return f"ptr {self._string(p.name)}, ptr {dtype}, i32 {ROLES.index('number')}, i32 0, ptr {self._string('')}, i32 {p.dtype.itemsize}"
        shape = self._string(", ".join(map(self.shown, p.shape)))
        return f"ptr {self._string(p.name)}, ptr {dtype}, i32 {ROLES.index(p.role)}, i32 {len(p.shape)}, ptr {shape}, i32 {max(1, p.align)}"

    def _scratch(self, array: ArrayParam) -> str:
        writer = _SizeFunction(self, f"bytes.{len(self.functions)}", "i64", "")
        count = writer.value(product(array.shape) // array.dtype.block * array.dtype.itemsize)
        function = writer.done(count)
        return f"ptr {self._string(array.name)}, ptr {function}, i32 {int(array.name == FAILURE)}"

    def _argument(self, name: str) -> str:
        for index, array in enumerate(self.artifact.scratch):
            if array.name == name:
                return f"i32 {SCRATCH_POINTER}, i32 {index}"
        index, param = next((i, p) for i, p in enumerate(self.parameters) if p.name == name)
        return f"i32 {NUMBER if isinstance(param, ScalarParam) else POINTER}, i32 {index}"

    def _launch(self, launch: Launch) -> str:
        rows = [self._argument(name) for name in launch.args]
        rows += [f"i32 {SIZE}, i32 {self.sizes.index(name)}" for name in launch.sizes]
        rows += [f"i32 {MAP}, i32 {index}" for index in range(len(launch.maps))]
        arguments = self._table("arguments", "%argument", rows)
        maps = self._table("maps", "%map", [self._map(m) for m in launch.maps])
        numbers = (
            launch.threads,
            launch.shared_bytes,
            launch.cluster,
            int(launch.cooperative),
            int(launch.persistent),
            len(rows),
            len(launch.maps),
        )
        return f"ptr {self._string(launch.entry)}, {', '.join(f'i32 {n}' for n in numbers)}, ptr {arguments}, ptr {maps}, ptr {self._grid(launch)}"

    def _map(self, m: MapParam) -> str:
        writer = _SizeFunction(self, f"extents.{len(self.functions)}", "i32", ", ptr %shape, ptr %strides")
        for table, sizes in (("%shape", m.shape), ("%strides", m.strides)):
            writer.store([writer.value(size) for size in sizes], table, "i64")
        function = writer.done("0")
        box = ", ".join(f"i32 {n}" for n in (*m.box, *(1,) * _MOST_AXES)[:_MOST_AXES])
        array = f"%argument {{ {self._argument(m.array)} }}"
        return f"{array}, ptr {self._string(m.dtype.name)}, i32 {len(m.shape)}, i32 {m.swizzle}, [{_MOST_AXES} x i32] [ {box} ], i32 {int(m.rounds)}, ptr {function}"

    # -- functions --------------------------------------------------------------------------------------------------

    def _grid(self, launch: Launch) -> str:
        writer = _SizeFunction(self, f"grid.{len(self.functions)}", "i32", ", ptr %grid")
        extents = [writer.value(size) for size in launch.grid]
        for extent, most in zip(extents, ((1 << 31) - 1, 65535, 65535), strict=False):
            writer.unless(writer.new(f"icmp ule i64 {extent}, {most}"), TOO_LARGE)
        writer.store(
            [writer.new(f"trunc i64 {extent} to i32") for extent in (*extents, "1", "1", "1")[:3]], "%grid", "i32"
        )
        return writer.done("0")

    def _check(self) -> str:
        """Tests the sizes that are given, and fills in those that are computed."""
        writer = _SizeFunction(self, "check", "i32", "", len(self.given))
        extents = {b.name for b in self.artifact.bindings if not b.stride}
        for name in self.given:
            if name in extents:
                writer.unless(writer.new(f"icmp sge i64 {writer.sizes.values[name]}, 0"), NEGATIVE)
        for index, (name, size) in enumerate(self.artifact.computed, len(self.given)):
            value = writer.value(size)
            writer.bind(name, value)
            writer.line(f"store i64 {value}, ptr {writer.new(f'getelementptr i64, ptr %sizes, i64 {index}')}")
        for number, check in enumerate(call_checks(self.artifact), 1):
            left, right = writer.value(check.left), writer.value(check.right)
            writer.unless(writer.new(f"icmp {_RELATIONS[check.relation]} i64 {left}, {right}"), number)
        return writer.done("0")


class _SizeFunction(CheckedLines):
    """A function of the sizes: `kind NAME(ptr %sizes…)`."""

    def __init__(self, owner: _TableWriter, name: str, kind: str, more: str, known: int | None = None) -> None:
        super().__init__(kind)
        self.owner = owner
        self.head = f"define internal {kind} @{name}(ptr %sizes{more}) nounwind {{"
        self.name = f"@{name}"
        for index, size in enumerate(owner.sizes[:known]):
            self.bind(size, self.new(f"load i64, ptr {self.new(f'getelementptr i64, ptr %sizes, i64 {index}')}"))

    def bind(self, name: str, operand: str) -> None:
        self.sizes.bind(name, operand)
        self.sizes.bind(number_name(name), operand)

    def value(self, size: Size) -> str:
        """A size, after a test that 64 bits hold it."""
        found = self.sizes.value(size)
        self.unless_overflow(TOO_LARGE)
        return found

    def store(self, values: Sequence[str], table: str, kind: str) -> None:
        for index, value in enumerate(values):
            self.line(f"store {kind} {value}, ptr {self.new(f'getelementptr {kind}, ptr {table}, i64 {index}')}")

    def done(self, result: str) -> str:
        self.line(f"ret {self.kind} {result}")
        self.owner.functions.append("\n".join((self.head, "entry:", *self.lines, "}")))
        return self.name
