"""The words of kernels, declared once: attributes (`@tile`), kinds (`@kernel conv2d`) and the parameters of kinds.

Each row says where a word may stand, what it does, and its fate: it *acts*, it is *refused* with a reason, or it is a *hint*, of which
`tilewright inspect` says what became of it. Readers (`tree/metadata.py`), checks and documents take all they know of words from here.
"""

from __future__ import annotations

from tilewright.base.record import record

ACTS, HINT, REFUSED = "acts", "hint", "refused"
BLOCK, FUNCTION = "compute", "function"
"""Where an attribute may stand: on a compute block (or a Python kernel), before `fn` and `pipeline`."""

Value = int | float | bool


@record
class AttributeWord:
    """One attribute."""

    name: str
    form: str
    """How it is written."""
    effect: str
    fate: str = ACTS
    places: tuple[str, ...] = (BLOCK,)
    several: bool = False
    """Whether it may be given more than once."""
    reason: str = ""
    """Why it is refused, and what to write instead."""


_IN_PYTHON = "latency-critical code is written as a Python function under @tw.critical, with the marks @tw.no_allocation and @tw.no_syscalls"

ATTRIBUTES: tuple[AttributeWord, ...] = (
    AttributeWord("kernel", "@kernel kind(parameters)", "says what the block is: the body is held to it, and its parameters are names in the body"),
    AttributeWord("device", '@device("cuda:0")', "where it runs: a device, or the first of a list that is present", places=(BLOCK, FUNCTION)),
    AttributeWord(
        "workgroup", "@workgroup(x, y, z)",
        "threads of one block on a GPU; a CPU has no such threads", HINT,
    ),
    AttributeWord("shared", "@shared(bytes)", "the most shared memory that one block may take on a GPU; more than any device has is an error", HINT),
    AttributeWord(
        "tile", "@tile(m, n, k), @tile(block_q=64, block_kv=64)",
        "results of one block: along m and n (k: terms of one step) of a contraction, along queries and keys of attention, along the loops of other nests",
        HINT,
    ),
    AttributeWord("broadcast", "@broadcast(v, axis=1)", "an input lies along that axis of the results; checked", several=True),
    AttributeWord("parallel", "@parallel(data)", "splits its batch (`data`) or its steps (`model`) over the devices of @device([…])"),
    AttributeWord("strict", "@strict", "its hints bind: one that cannot be followed is an error"),
    AttributeWord("precision", "@precision(tf32)", "how f32 is multiplied in sums of products: `auto` (the fastest that errs no more than `ieee`), `ieee`, `tf32`, `3xtf32`"),
    AttributeWord("optimize", "@optimize(O1)", "how much work goes into machine code: `O0`, `O1`, `O2` (the default), `O3`, `Os`, `Olatency`, or `tiered`", HINT),
    AttributeWord("async", "@async", "its value is a future"),
    AttributeWord("device_function", "@device_function", "the function must be able to stand in kernels, or it is refused", places=(FUNCTION,)),
    AttributeWord("gpu_compute", "@gpu_compute", "refuses to run on a CPU"),
    AttributeWord("max_registers", "@max_registers(n)", "the most registers that a thread may take on a GPU (`.maxnreg`)", HINT),
    AttributeWord("tensor_cores", "@tensor_cores", "takes a schedule with matrix instructions", HINT),
    AttributeWord("vectorizable", "@vectorizable", "promises that no loop carries a value and nothing is shared; checked"),
    AttributeWord("vector", "@vector(n)", "elements that one thread loads and stores at once", HINT),
    AttributeWord("unroll", "@unroll(n)", "how often the loops that stay loops are unrolled; 1: not at all", HINT),
    AttributeWord("async_copy", "@async_copy", "takes a schedule that copies operands asynchronously (`cp.async`, the copy engine)", HINT),
    AttributeWord("unchecked", "@unchecked", "leaves out the checks of indices that come from data"),
    AttributeWord("deterministic", "@deterministic", "scatters (`out[k[i]] += w[i]`) give the same bits on every run and for any number of threads"),
    AttributeWord("activations", "@activations(q8)", "numbers that packed weights are multiplied with are rounded to eight bits, block by block"),
    AttributeWord("critical_path", "@critical_path", "low-latency code", REFUSED, reason=_IN_PYTHON),
    AttributeWord("no_allocation", "@no_allocation", "code that allocates no memory", REFUSED, reason=_IN_PYTHON),
    AttributeWord("no_syscalls", "@no_syscalls", "code that makes no system calls", REFUSED, reason=_IN_PYTHON),
    AttributeWord("inline_always", "@inline_always", "inlining of a function", REFUSED, reason="functions that stand in kernels are always inlined: write @device_function"),
    AttributeWord("cpu_affinity", "@cpu_affinity(core)", "the core that code runs on", REFUSED, reason=_IN_PYTHON),
)  # fmt: skip
"""All attributes, in the order of the documents."""

ATTRIBUTE = {word.name: word for word in ATTRIBUTES}


@record
class KindParameter:
    """One parameter of a kind of kernel."""

    name: str
    default: Value | None
    """None: it has to be given, or is not there."""
    meaning: str
    type: str = "int"
    """`int`, `number` or `bool`."""
    least: int | None = None
    in_body: bool = False
    """Whether it is a name in the body: then values of that name in the program, and inputs of the block, bind it too."""

    @property
    def form(self) -> str:
        """What may be given."""
        if self.type == "bool":
            return "true or false"
        whole = "a whole number" if self.type == "int" else "a number"
        return f"{whole} from {self.least} on" if self.least is not None else whole

    def wrong(self, value: object) -> bool:
        """Whether a value is none that it takes."""
        if self.type == "bool":
            return not isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, int if self.type == "int" else int | float):
            return True
        return self.least is not None and value < self.least


@record
class KindWord:
    """One kind of kernel."""

    name: str
    promise: str
    """What the body has to be."""
    parameters: tuple[KindParameter, ...] = ()
    operation: str = ""
    """What stands first in the parentheses, without a name: `op`, or `[op]` where it may be left out."""
    sizes: tuple[str, ...] = ()
    """Names of sizes that the kind binds."""

    def parameter(self, name: str) -> KindParameter | None:
        return next((p for p in self.parameters if p.name == name), None)

    @property
    def form(self) -> str:
        inside = [self.operation] if self.operation else []
        inside += [f"{p.name}={'…' if p.default is None else str(p.default).lower()}" for p in self.parameters]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


_WINDOW = (
    KindParameter("stride", 1, "pixels from one window to the next", least=1, in_body=True),
    KindParameter("padding", 0, "rows and columns of zeros around the image", least=0, in_body=True),
    KindParameter("dilation", 1, "pixels from one element of a window to the next", least=1, in_body=True),
)
_IMAGE = ("batch", "in_h", "in_w", "kernel_h", "kernel_w", "out_h", "out_w")
_AXIS = KindParameter("axis", None, "the loop along which, counted from 0; the last one otherwise")

KINDS: tuple[KindWord, ...] = (
    KindWord("elementwise", "no loop carries a value"),
    KindWord(
        "reduce", "values are yielded, and combined by the operation",
        (KindParameter("axis", None, "the loops that are reduced, a number or a list; all otherwise"),), "op",
    ),
    KindWord(
        "scan", "one value is yielded for each index: results are the values up to there, combined",
        (
            _AXIS, KindParameter("exclusive", False, "whether a value itself is left out", "bool"),
            KindParameter("reverse", False, "whether it runs from the last value to the first", "bool"),
            KindParameter("init", None, "what everything begins with", "number"),
        ), "op",
    ),
    KindWord(
        "sort", "a key, or a key and a value, is yielded for each index: results are in the order of keys, which is stable",
        (_AXIS, KindParameter("descending", False, "whether the largest comes first", "bool")),
    ),
    KindWord("filter", "values are yielded under an if: results are those values, in order"),
    KindWord(
        "histogram", "a value, or a value and a weight, is yielded for each index: results count those in each bin, or add up their weights",
        (
            KindParameter("axis", None, "the loop along which, counted from 0; otherwise all values are counted together"),
            KindParameter("bins", 256, "equal parts of the range", least=1),
            KindParameter("low", None, "where the first bin begins", "number"), KindParameter("high", None, "where the last one ends", "number"),
        ),
    ),
    KindWord("matmul", "sums of products"),
    KindWord("batched_matmul", "sums of products, with a batch axis"),
    KindWord(
        "conv2d", "sums of products of an image [batch, in_channels, in_h, in_w] and windows [out_channels, in_channels / groups, kernel_h, kernel_w]",
        (*_WINDOW, KindParameter("groups", 1, "parts of the channels that are convolved apart", least=1, in_body=True)),
        sizes=(*_IMAGE, "in_channels", "out_channels"),
    ),
    KindWord("conv2d_depthwise", "sums over windows [channels, kernel_h, kernel_w] of an image [batch, channels, in_h, in_w]", _WINDOW, sizes=(*_IMAGE, "channels")),
    KindWord("attention", "sums weighed by exponentials"),
    KindWord("flash_attention", "sums weighed by exponentials"),
    KindWord("fused", "nothing"),
    KindWord("custom", "nothing"),
)  # fmt: skip
"""All kinds. A word that is like none of them is the author's own: its parameters are numbers that the body names."""

KIND = {word.name: word for word in KINDS}
ALIASES = {"depthwise_conv2d": "conv2d_depthwise"}
"""Other ways to write a kind."""

