"""The untyped tree both front ends build: ZynML text and Python functions meet here.

It holds the whole language, host part and kernel bodies alike. Names are unresolved, nothing is typed; `kernel.py` turns a
kernel into the typed tree. Every node has a span. Nodes are immutable.
"""

from __future__ import annotations

from dataclasses import field

from tilewright.base.record import record
from tilewright.base.source import NOWHERE, Span
from tilewright.tree.structs.layout import StructLayout


@record(kw_only=True)
class Node:
    span: Span = field(default=NOWHERE, compare=False, repr=False)


# -- expressions --------------------------------------------------------------------------------------------------


@record
class Number(Node):
    """`1`, `2.5`, `2j`, `inf`; with a unit suffix (`1GB`, `1000ms`) the value is scaled and `unit` kept."""

    value: int | float | complex
    unit: str = ""
    given: bool = field(default=False, compare=False, repr=False)
    """Whether a call gives it: a whole number that has the dtype of an argument, not of a literal."""


@record
class Bool(Node):
    value: bool


@record
class String(Node):
    value: str


@record
class Nothing(Node):
    """`None`: what an optional parameter is where a call leaves it out."""


@record
class IsNone(Node):
    """`value is None`, or `value is not None`: known when the kernel is compiled."""

    value: Expr
    negated: bool = False


@record
class Name(Node):
    id: str


@record
class Attribute(Node):
    """`value.name`"""

    value: Expr
    name: str


@record
class Index(Node):
    """`value[i, j]`; an index may be a `Slice`."""

    value: Expr
    indices: tuple[Expr, ...]


@record
class Slice(Node):
    """`lo:hi:step` inside an index; each may be missing."""

    lo: Expr | None
    hi: Expr | None
    step: Expr | None = None


@record
class Rest(Node):
    """`...` inside an index: all of the axes that no other index speaks of."""


@record
class Argument(Node):
    """A call argument, with its keyword or None."""

    value: Expr
    keyword: str | None = None
    in_place: bool = False
    """ZynML: `inout x` among the inputs of a compute."""


@record
class Call(Node):
    function: Expr
    args: tuple[Argument, ...]


@record
class Callee(Node):
    """The function of a call: another kernel, whose body `inline.py` puts where the call is."""

    function: Function


@record
class StructType(Node):
    """A class or dtype of structs, which a kernel names: as a dtype, or called to make one."""

    layout: StructLayout


@record
class Unary(Node):
    """op: `-`, `not`, `~`"""

    op: str
    operand: Expr


@record
class Binary(Node):
    """op: `+ - * / // % ** @ & | ^ << >> and or == != < <= > >=`; `/` is true division in Python and floor on integers in ZynML:
    the front end says which by using `/` or `zdiv`."""

    op: str
    left: Expr
    right: Expr
    valued: bool = field(default=False, compare=False, repr=False)
    """`and` and `or` in Python, where the value counts and not only its truth: it is that of an operand."""


@record
class IfExpr(Node):
    """`a if cond else b`"""

    cond: Expr
    then: Expr
    otherwise: Expr


@record
class Tuple(Node):
    items: tuple[Expr, ...]


@record
class List(Node):
    items: tuple[Expr, ...]


@record
class Record(Node):
    """`{a: 1, b: 2}`"""

    fields: tuple[tuple[str, Expr], ...]


@record
class Pipe(Node):
    """`value |> f(args)`: `f(value, args)`."""

    value: Expr
    call: Call


@record
class ReduceExpr(Node):
    """`reduce(op, x[, axis])` in a body, or `tw.sum(x, axis=…)`: a reduction of a whole array. `op` is an IR reduction kind, or one of `mean`, `var`, `std` and
    `norm`, which are made of sums. `keep`: the axes stay, with extent 1."""

    op: str
    value: Expr
    axis: Expr | None = None
    keep: bool = False


@record
class Await(Node):
    """`await e`, `await all(es)`, `await any(es)`, with `timeout t else v`. mode: one, all, any."""

    mode: str
    value: Expr
    timeout: Expr | None = None
    otherwise: Expr | None = None


@record
class Compute(Node):
    """`compute(inputs…) [@attr…] { [@attr…] body }`"""

    inputs: tuple[Expr, ...]
    attributes: tuple[KernelAttribute, ...]
    body: tuple[Stmt, ...]
    in_place: tuple[str, ...] = ()
    """Inputs that the block writes where they lie: `inout x`."""


@record
class KernelAttribute(Node):
    """`@name(args)`; for `@kernel reduce(+, axis=1)` name is `kernel`, the first argument the kind as Call or Name."""

    name: str
    args: tuple[Argument, ...]


@record
class Broken(Node):
    """Something that a front end could not read and has reported: what uses it is not looked at further."""


Expr = (
    Number | Bool | String | Nothing | IsNone | Name | Attribute | Index | Slice | Rest | Call | Unary | Binary | IfExpr | Tuple | List | Record
    | Pipe | ReduceExpr | Await | Compute | Callee | StructType | Broken
)  # fmt: skip


# -- statements ---------------------------------------------------------------------------------------------------


@record
class Let(Node):
    """`let x = e` (mutable False), `var x = e` (True), `let (a, b) = e`, a Python assignment to a new name.
    `type` is an optional annotation expression; `shared` marks `shared var x[n]` (value None, `extents` given)."""

    targets: tuple[str, ...]
    value: Expr | None
    mutable: bool = False
    type: Expr | None = None
    shared: bool = False
    extents: tuple[Expr, ...] = ()
    destructure: bool = False
    """Written with a tuple on the left (also for one name)."""


@record
class Assign(Node):
    """`target op= value`; op is `=` or `+= -= *= /= …` without the `=`: '' '+' '-' '*' '/' …. In Python every `name = e` is a Let
    the first time a scope sees the name and an Assign later; the front end decides."""

    target: Expr
    value: Expr
    op: str = ""


@record
class RangeExpr(Node):
    """`lo..hi`, `lo..=hi` (inclusive), `step s`."""

    lo: Expr
    hi: Expr
    step: Expr | None = None
    inclusive: bool = False


@record
class For(Node):
    """`for i in r, j in r: body`. `parallel`: 'yes' (tw.grid), 'no' (an ordered Python `range`), 'auto' (ZynML: decided by use)."""

    vars: tuple[str, ...]
    ranges: tuple[RangeExpr, ...]
    body: tuple[Stmt, ...]
    parallel: str = "auto"
    over: Expr | None = None
    """Host loops `for x in list`: the thing iterated, with no ranges."""
    until: str = ""
    """The flag that ends the loop before its next iteration, once `jumps.py` has made one of each `break`."""


@record
class While(Node):
    cond: Expr
    body: tuple[Stmt, ...]


@record
class If(Node):
    cond: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@record
class Break(Node):
    """Leaves the innermost loop."""


@record
class Continue(Node):
    """Goes on with the next iteration of the innermost loop."""


@record
class Print(Node):
    """`print(…)` in a kernel: a text with places (`{}`, `{:.3f}`), and the numbers for them."""

    text: str
    values: tuple[Expr, ...]


@record
class Assert(Node):
    """`assert cond, "text"` in a kernel."""

    cond: Expr
    text: str = ""


@record
class Yield(Node):
    value: Expr


@record
class Return(Node):
    value: Expr | None


@record
class Expect(Node):
    """What the parameter `name` of a kernel that was put where it is called says of its argument: `type` is the annotation, over names
    of this body. Sizes it names are declared."""

    name: str
    value: Expr
    type: Expr | None
    optional: bool = False
    """The argument may be None."""
    call: Span = field(default=NOWHERE, compare=False, repr=False)


@record
class Made(Node):
    """Arrays that exist by being written to, as `out` does in ZynML, between blocks that were put into one kernel: stands before the
    block that writes them, and, `done`, behind it."""

    names: tuple[str, ...]
    done: bool = False


@record
class ReduceNest(Node):
    """The loops of a reduce kernel that was put into another: what they yield is combined by `op` along `axes` (None: all) into `name`."""

    name: str
    op: str
    axes: tuple[int, ...] | None
    loop: For


@record
class ExprStmt(Node):
    value: Expr


@record
class Param(Node):
    """A parameter with an optional annotation expression (`tensor[batch, seq]`, `int`…)."""

    name: str
    type: Expr | None = None
    default: Expr | None = None
    optional: bool = False
    """It may be None: `type | None`."""
    keyword_only: bool = False
    in_place: bool = False
    """An array that the kernel writes where it lies: `tw.InOut`, `inout x`."""


OUTPUT_ORDER = "output_order"
"""The option of a function made of a call: the names of its outputs, in the order of the results."""


@record
class Function(Node):
    """A ZynML `pipeline`/`fn`, or a Python kernel function. kind: pipeline, function, kernel."""

    name: str
    params: tuple[Param, ...]
    result: Expr | None
    body: tuple[Stmt, ...]
    kind: str = "kernel"
    attributes: tuple[KernelAttribute, ...] = ()
    sizes: tuple[str, ...] = ()
    """ZynML: names of a function to be called in kernels that nothing in it declares: sizes, each call's own."""
    options: tuple[tuple[str, object], ...] = ()
    """Python, read from a file: options of its decorator that are about calls and compilations."""

    def option(self, name: str) -> object:
        """The value of one of its options; None where it is not given."""
        return dict(self.options).get(name)


@record
class Config(Node):
    """`config { key: value }`"""

    fields: tuple[tuple[str, Expr], ...]


@record
class Import(Node):
    """`import "other.zyn"` or `import "other.zyn" as name`"""

    path: str
    alias: str = ""


Stmt = Let | Assign | For | While | If | Break | Continue | Print | Assert | Yield | Return | Expect | Made | ReduceNest | ExprStmt | Function | Config | Import


@record
class Module(Node):
    """One ZynML file: top-level statements in order."""

    body: tuple[Stmt, ...]
