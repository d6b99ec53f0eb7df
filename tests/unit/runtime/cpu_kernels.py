"""Hand-written CPU kernels in LLVM text, with their artifacts: what the runtime's tests run."""

from __future__ import annotations

from dataclasses import replace

from tilewright.base import abi, dtypes
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck, Launch, ScalarParam, SizeBinding
from tilewright.base.sizes import Size, ceildiv, contiguous_strides
from tilewright.base.target import host_cpu
from tilewright.codegen.host.entries import host_object
from tilewright.codegen.host.pool import pool_object, starter_object
from tilewright.codegen.host.spare_memory import spare_memory_object
from tilewright.codegen.llvm.native import compile_object
from tilewright.runtime.core import machine_code
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.runtime.cpu import program as cpu

BLOCK = 4096
N, M = Size.of("n"), Size.of("m")

cpu_pool.provide_code(lambda: pool_object(host_cpu()), lambda: starter_object(host_cpu()))
machine_code.provide("spare memory", lambda: spare_memory_object(host_cpu()))


def slots(*kinds: str) -> str:
    """Loads of the argument block into %p0, %p1…"""
    lines = []
    for index, kind in enumerate(kinds):
        lines.append(f"  %at{index} = getelementptr i64, ptr %slots, i64 {index}")
        lines.append(f"  %p{index} = load {kind}, ptr %at{index}")
    return "\n".join(lines)


ADD = f"""
declare i64 @llvm.smin.i64(i64, i64)
define void @add(ptr %slots, i64 %begin, i64 %end) {{
head:
{slots("ptr", "ptr", "ptr", "i64")}
  %first = mul i64 %begin, {BLOCK}
  %limit = mul i64 %end, {BLOCK}
  %last = call i64 @llvm.smin.i64(i64 %limit, i64 %p3)
  %count = sub i64 %last, %first
  %whole = and i64 %count, -8
  %edge = add i64 %first, %whole
  %wide = icmp slt i64 %first, %edge
  br i1 %wide, label %vector, label %rest
vector:
  %i = phi i64 [ %first, %head ], [ %i.next, %vector ]
  %a.at = getelementptr float, ptr %p0, i64 %i
  %b.at = getelementptr float, ptr %p1, i64 %i
  %c.at = getelementptr float, ptr %p2, i64 %i
  %a = load <8 x float>, ptr %a.at, align 4
  %b = load <8 x float>, ptr %b.at, align 4
  %c = fadd <8 x float> %a, %b
  store <8 x float> %c, ptr %c.at, align 4
  %i.next = add i64 %i, 8
  %more = icmp slt i64 %i.next, %edge
  br i1 %more, label %vector, label %rest
rest:
  %some = icmp slt i64 %edge, %last
  br i1 %some, label %scalar, label %done
scalar:
  %j = phi i64 [ %edge, %rest ], [ %j.next, %scalar ]
  %x.at = getelementptr float, ptr %p0, i64 %j
  %y.at = getelementptr float, ptr %p1, i64 %j
  %z.at = getelementptr float, ptr %p2, i64 %j
  %x = load float, ptr %x.at
  %y = load float, ptr %y.at
  %z = fadd float %x, %y
  store float %z, ptr %z.at
  %j.next = add i64 %j, 1
  %again = icmp slt i64 %j.next, %last
  br i1 %again, label %scalar, label %done
done:
  ret void
}}
"""

# One row per block: out[r, :] = a[r, :] + scale, rows and columns at any stride.
STRIDED = f"""
define void @strided(ptr %slots, i64 %begin, i64 %end) {{
head:
{slots("ptr", "float", "ptr", "i64", "i64", "i64", "i64", "i64")}
  %any = icmp slt i64 %begin, %end
  %columns = icmp sgt i64 %p3, 0
  %go = and i1 %any, %columns
  br i1 %go, label %row, label %done
row:
  %r = phi i64 [ %begin, %head ], [ %r.next, %next ]
  %ar = mul i64 %r, %p4
  %or = mul i64 %r, %p6
  br label %column
column:
  %c = phi i64 [ 0, %row ], [ %c.next, %column ]
  %ac = mul i64 %c, %p5
  %oc = mul i64 %c, %p7
  %ai = add i64 %ar, %ac
  %oi = add i64 %or, %oc
  %a.at = getelementptr float, ptr %p0, i64 %ai
  %o.at = getelementptr float, ptr %p2, i64 %oi
  %a = load float, ptr %a.at
  %sum = fadd float %a, %p1
  store float %sum, ptr %o.at
  %c.next = add i64 %c, 1
  %c.more = icmp slt i64 %c.next, %p3
  br i1 %c.more, label %column, label %next
next:
  %r.next = add i64 %r, 1
  %r.more = icmp slt i64 %r.next, %end
  br i1 %r.more, label %row, label %done
done:
  ret void
}}
"""

# Partial sums of blocks of the input into scratch, then their sum.
TOTAL = f"""
declare i64 @llvm.smin.i64(i64, i64)
define void @partial(ptr %slots, i64 %begin, i64 %end) {{
head:
{slots("ptr", "ptr", "i64")}
  br label %block
block:
  %b = phi i64 [ %begin, %head ], [ %b.next, %next ]
  %first = mul i64 %b, {BLOCK}
  %limit = add i64 %first, {BLOCK}
  %last = call i64 @llvm.smin.i64(i64 %limit, i64 %p2)
  br label %loop
loop:
  %i = phi i64 [ %first, %block ], [ %i.next, %loop ]
  %sum = phi double [ 0.0, %block ], [ %sum.next, %loop ]
  %x.at = getelementptr double, ptr %p0, i64 %i
  %x = load double, ptr %x.at
  %sum.next = fadd double %sum, %x
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %last
  br i1 %more, label %loop, label %next
next:
  %to = getelementptr double, ptr %p1, i64 %b
  store double %sum.next, ptr %to
  %b.next = add i64 %b, 1
  %b.more = icmp slt i64 %b.next, %end
  br i1 %b.more, label %block, label %done
done:
  ret void
}}
define void @finish(ptr %slots, i64 %begin, i64 %end) {{
head:
{slots("ptr", "ptr", "i64")}
  %up = add i64 %p2, {BLOCK - 1}
  %count = sdiv i64 %up, {BLOCK}
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [ 0, %head ], [ %i.next, %loop ]
  %sum = phi double [ 0.0, %head ], [ %sum.next, %loop ]
  %x.at = getelementptr double, ptr %p0, i64 %i
  %x = load double, ptr %x.at
  %sum.next = fadd double %sum, %x
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %count
  br i1 %more, label %loop, label %done
done:
  %result = phi double [ 0.0, %head ], [ %sum.next, %loop ]
  store double %result, ptr %p1
  ret void
}}
"""

# Stores the words of its scalar slots, so that conversions can be seen from outside.
SCALARS = f"""
define void @scalars(ptr %slots, i64 %begin, i64 %end) {{
{slots("ptr", "i64", "i64", "i64", "i64", "i64")}
  %o1 = getelementptr i64, ptr %p0, i64 1
  %o2 = getelementptr i64, ptr %p0, i64 2
  %o3 = getelementptr i64, ptr %p0, i64 3
  %o4 = getelementptr i64, ptr %p0, i64 4
  %f32 = and i64 %p1, 4294967295
  store i64 %f32, ptr %p0
  store i64 %p2, ptr %o1
  store i64 %p3, ptr %o2
  store i64 %p4, ptr %o3
  store i64 %p5, ptr %o4
  ret void
}}
"""

# a + b and a - b of contiguous f32 vectors, one element at a time.
BOTH = f"""
define void @both(ptr %slots, i64 %begin, i64 %end) {{
head:
{slots("ptr", "ptr", "ptr", "ptr")}
  br label %loop
loop:
  %i = phi i64 [ %begin, %head ], [ %next, %loop ]
  %a.at = getelementptr float, ptr %p0, i64 %i
  %b.at = getelementptr float, ptr %p1, i64 %i
  %c.at = getelementptr float, ptr %p2, i64 %i
  %d.at = getelementptr float, ptr %p3, i64 %i
  %a = load float, ptr %a.at
  %b = load float, ptr %b.at
  %c = fadd float %a, %b
  %d = fsub float %a, %b
  store float %c, ptr %c.at
  store float %d, ptr %d.at
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


def array(name: str, shape: tuple[Size, ...], role: str = "input", dtype: dtypes.DType = dtypes.f32) -> ArrayParam:
    return ArrayParam(name, dtype, shape, contiguous_strides(shape), role)


def make(text: str, artifact: Artifact) -> cpu.CpuProgram:
    """Compile the kernel and the stub, and load both."""
    return cpu.load(compiled(text, artifact))


def compiled(text: str, artifact: Artifact) -> Artifact:
    target = host_cpu()
    return replace(artifact, code=compile_object(text, target), host=host_object(artifact, target))


def artifact(
    name: str,
    inputs: tuple[ArrayParam | ScalarParam, ...],
    outputs: tuple[ArrayParam, ...],
    launches: tuple[Launch, ...],
    bindings: tuple[SizeBinding, ...],
    scratch: tuple[ArrayParam, ...] = (),
    checks: tuple[CallCheck, ...] = (),
    facts: tuple[tuple[str, int], ...] = (),
    alias_safe: bool = False,
) -> Artifact:
    return Artifact(
        name=name, target=host_cpu().name, kind="object", code=b"", inputs=inputs, outputs=outputs, scratch=scratch,
        launches=launches, bindings=bindings, checks=checks, facts=facts, alias_safe=alias_safe,
    )  # fmt: skip


def add_artifact(alias_safe: bool = True, facts: tuple[tuple[str, int], ...] = (), align: int = 0) -> Artifact:
    launch = Launch("add", ("a", "b", "out"), ("n",), (ceildiv(N, BLOCK),), work=Size.of(BLOCK))
    a, b, out = array("a", (N,)), array("b", (N,)), array("out", (N,), "output")
    inputs = tuple(replace(p, align=align) for p in (a, b))
    bindings = (SizeBinding("n", "a", 0),)
    return artifact("add", inputs, (replace(out, align=align),), (launch,), bindings, facts=facts, alias_safe=alias_safe)


def strided_artifact(alias_safe: bool = True) -> Artifact:
    names = ("a0", "a1", "o0", "o1")
    a = ArrayParam("a", dtypes.f32, (N, M), (Size.of("a0"), Size.of("a1")), "input")
    out = ArrayParam("out", dtypes.f32, (N, M), (Size.of("o0"), Size.of("o1")), "output")
    launch = Launch("strided", ("a", "scale", "out"), ("m", *names), (N,), work=M)
    bindings = (
        SizeBinding("n", "a", 0), SizeBinding("m", "a", 1), SizeBinding("a0", "a", 0, True), SizeBinding("a1", "a", 1, True),
        SizeBinding("o0", "out", 0, True), SizeBinding("o1", "out", 1, True),
    )  # fmt: skip
    inputs = (a, ScalarParam("scale", dtypes.f32))
    return artifact("strided", inputs, (out,), (launch,), bindings, alias_safe=alias_safe)


def total_artifact() -> Artifact:
    blocks = ceildiv(N, BLOCK)
    return artifact(
        "total",
        (array("x", (N,), dtype=dtypes.f64),),
        (array("out", (), "output", dtypes.f64),),
        (
            Launch("partial", ("x", "parts"), ("n",), (blocks,), work=Size.of(BLOCK)),
            Launch("finish", ("parts", "out"), ("n",), (Size.of(1),), work=blocks),
        ),
        (SizeBinding("n", "x", 0),),
        scratch=(array("parts", (blocks,), "scratch", dtypes.f64),),
    )


def scalars_artifact() -> Artifact:
    inputs = tuple(
        ScalarParam(n, d)
        for n, d in (("f", dtypes.f32), ("d", dtypes.f64), ("i", dtypes.i32), ("u", dtypes.u8), ("flag", dtypes.bool_))
    )
    launch = Launch("scalars", ("out", "f", "d", "i", "u", "flag"), (), (Size.of(1),))
    return artifact("scalars", inputs, (array("out", (Size.of(5),), "output", dtypes.i64),), (launch,), ())


def both_artifact() -> Artifact:
    outputs = (array("sum", (N,), "output"), array("difference", (N,), "output"))
    launch = Launch("both", ("a", "b", "sum", "difference"), (), (N,))
    bindings = (SizeBinding("n", "a", 0),)
    check = (CallCheck(N, "le", Size.of(1000), "too long"),)
    return artifact("both", (array("a", (N,)), array("b", (N,))), outputs, (launch,), bindings, checks=check)

# a[i] += 1, and a report in the fourth slot where it is longer than the third says: no memory for arrays of its own.
GROW = f"""
define void @grow(ptr %slots, i64 %begin, i64 %end) {{
head:
{slots("ptr", "i64", "ptr")}
  %any = icmp slt i64 %begin, %end
  %some = icmp sgt i64 %p1, 0
  %go = and i1 %any, %some
  br i1 %go, label %loop, label %done
loop:
  %i = phi i64 [ 0, %head ], [ %i.next, %loop ]
  %at = getelementptr double, ptr %p0, i64 %i
  %a = load double, ptr %at
  %b = fadd double %a, 1.0
  store double %b, ptr %at
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %p1
  br i1 %more, label %loop, label %look
look:
  %large = icmp sgt i64 %p1, 100
  br i1 %large, label %fail, label %done
fail:
  store i64 {abi.ASSERT_MARK - (1 << 64)}, ptr %p2
  br label %done
done:
  ret void
}}
"""


def grow_artifact(times: int) -> Artifact:
    """In place, several times. The last launch says that it has no memory where the array has more than 100 elements."""
    a = array("a", (N,), "inout", dtypes.f64)
    failing = (("grow.py:3:5", f"{abi.LOCAL_MEMORY}640"),)
    launches = tuple(Launch("grow", ("a",), ("n",), (Size.of(1),), asserts=failing, place=f"{k}") for k in range(times))
    return artifact("grow", (a,), (), launches, (SizeBinding("n", "a", 0),))
