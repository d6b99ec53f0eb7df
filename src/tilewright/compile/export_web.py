"""A kernel as files for a browser. In: an artifact of WGSL; out: the code, its description in JSON, a JavaScript module with types, a page, and the module that runs it all.

`NAME.wgsl` is the code, `NAME.json` says how to bind and launch it (sizes as lists of terms), `NAME.js` and `NAME.d.ts` are a typed loader,
`NAME.html` runs the kernel on numbers of its own, and compares with `NAME.check.json` where that is there. `tilewright.js` is the same for all kernels.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tilewright.base.artifact import ArrayParam, Artifact, Launch, ScalarParam
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
_BIG = ("i64", "u64")


@cache
def runtime_text() -> bytes:
    """The module that runs exported kernels."""
    return (Path(__file__).parents[1] / "runtime" / "loaders" / "tilewright.js").read_bytes()


def web_files(artifact: Artifact, name: str) -> dict[str, bytes]:
    """The files, each under its name."""
    if artifact.sites:
        site = artifact.sites[0]
        raise UserError.at(
            "TW020", f"an index of '{site.array}' is checked as the kernel runs ({site.place}), which an exported kernel cannot say",
            help="export it with checks off: @unchecked, or indices that are proven",
        )  # fmt: skip
    description = json.dumps(describe(artifact, name))
    return {
        f"{name}.wgsl": artifact.code, f"{name}.json": description.encode(), f"{name}.js": _loader(artifact, name).encode(),
        f"{name}.d.ts": _types(artifact, name).encode(), f"{name}.html": _page(artifact, name).encode(), "tilewright.js": runtime_text(),
    }  # fmt: skip


def size_json(size: Size) -> Json:
    """A size as terms: a factor and atoms, each a name or a call of two sizes."""
    return [[factor, [atom if isinstance(atom, str) else [atom.op, size_json(atom.a), size_json(atom.b)] for atom in atoms]] for atoms, factor in size.terms]


def describe(artifact: Artifact, name: str) -> dict[str, Json]:
    """All that a browser needs to know."""
    scalars = {p.name: p.dtype.name for p in artifact.inputs if isinstance(p, ScalarParam)}

    def param(p: ArrayParam | ScalarParam) -> Json:
        plain: dict[str, Json] = {"name": p.name, "dtype": p.dtype.name}
        if isinstance(p, ArrayParam):
            plain |= {"shape": [size_json(s) for s in p.shape], "strides": [size_json(s) for s in p.strides]}
        return plain

    def launch(one: Launch) -> Json:
        return {
            "entry": one.entry, "threads": one.threads, "grid": [size_json(s) for s in one.grid], "arrays": [a for a in one.args if a not in scalars],
            "numbers": [[a, scalars[a]] for a in one.args if a in scalars], "values": [size_json(s) for s in one.values],
            "narrow": [size_json(s) for s in one.narrow],
        }  # fmt: skip

    return {
        "name": name, "code": f"{name}.wgsl", "inputs": [param(p) for p in artifact.inputs], "outputs": [param(p) for p in artifact.outputs],
        "scratch": [param(p) for p in artifact.scratch], "launches": [launch(one) for one in artifact.launches],
        "bindings": [{"name": b.name, "array": b.array, "axis": b.axis, "stride": b.stride} for b in artifact.bindings],
        "computed": [[n, size_json(s)] for n, s in artifact.computed], "facts": [[n, d] for n, d in artifact.facts],
        "checks": [{"left": size_json(c.left), "relation": c.relation, "right": size_json(c.right), "message": c.message} for c in artifact.checks],
    }  # fmt: skip


def _signature(artifact: Artifact) -> str:
    return ", ".join(f"{p.name}: {'GpuArray' if isinstance(p, ArrayParam) else 'bigint' if p.dtype.name in _BIG else 'number'}" for p in artifact.inputs)


def _result(artifact: Artifact) -> str:
    arrays = ["GpuArray"] * len(artifact.outputs)
    return arrays[0] if len(arrays) == 1 else f"[{', '.join(arrays)}]"


def _loader(artifact: Artifact, name: str) -> str:
    lines = [f" * @param {{{'GpuArray' if isinstance(p, ArrayParam) else 'number'}}} {p.name} {p.dtype}{_shape(p)}" for p in artifact.inputs]
    names = ", ".join(p.name for p in artifact.inputs)
    return "\n".join([
        f"// {artifact.name}, as WGSL. Written by Tilewright.", 'import { Gpu } from "./tilewright.js";', "",
        'export { Gpu, GpuArray } from "./tilewright.js";', "", f"/** `{name}` on a device. */", "export async function load(gpu) {",
        "  gpu = gpu || (await Gpu.open());", f'  const kernel = await gpu.load(new URL("./{name}.json", import.meta.url));', "  /**", *(f"  {line}" for line in lines),
        f"   * @returns {{{_result(artifact)}}}", "   */", f"  return ({names}) => kernel.run({names});", "}", "",
    ])  # fmt: skip


def _shape(p: ArrayParam | ScalarParam) -> str:
    return f"[{', '.join(str(s) for s in p.shape)}]" if isinstance(p, ArrayParam) else ""


def _types(artifact: Artifact, name: str) -> str:
    return "\n".join([
        "export class GpuArray {", "  readonly dtype: string;", "  readonly shape: number[];", "  reshape(...shape: number[]): GpuArray;",
        "  transpose(...order: number[]): GpuArray;", "  slice(axis: number, start: number, end: number): GpuArray;",
        "  contiguous(): Promise<GpuArray>;", "  read(): Promise<ArrayBufferView>;", "}", "export class Gpu {", "  static open(): Promise<Gpu>;",
        "  array(values: ArrayBufferView, shape?: number[], dtype?: string): GpuArray;", "  empty(dtype: string, shape: number[]): GpuArray;", "}",
        f"/** {', '.join(f'{p.name}: {p.dtype}{_shape(p)}' for p in artifact.inputs)} */",
        f"export function load(gpu?: Gpu): Promise<({_signature(artifact)}) => {_result(artifact)}>;", "",
    ])  # fmt: skip


def _page(artifact: Artifact, name: str) -> str:
    return _PAGE.replace("NAME", name)


_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>NAME</title>
<style>body { font: 16px sans-serif; margin: 2em; } td, th { padding: 0.2em 1em; text-align: left; } .bad { color: #b00; }</style>
<h1>NAME</h1>
<p id="state">starting</p>
<table id="table"><tr><th>result</th><th>shape</th><th>largest difference</th><th>first elements</th></tr></table>
<script type="module">
import { Gpu } from "./tilewright.js";
const state = document.getElementById("state"), table = document.getElementById("table");
const decode = (text, Type) => new Type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const TYPES = { f32: Float32Array, i32: Int32Array, u32: Uint32Array, i64: BigInt64Array, u64: BigUint64Array, i16: Int16Array, u16: Uint16Array, f16: Uint16Array,
  bf16: Uint16Array, i8: Int8Array, u8: Uint8Array, bool: Uint8Array, f8e4m3: Uint8Array, f8e5m2: Uint8Array };
try {
  const gpu = await Gpu.open(), kernel = await gpu.load(new URL("./NAME.json", location.href));
  const answer = await fetch("./NAME.check.json");
  if (!answer.ok) throw new Error("the kernel is loaded; NAME.check.json with inputs and results is not there");
  const check = await answer.json(), started = performance.now();
  const given = check.inputs.map((one) => (one.shape ? gpu.array(decode(one.data, TYPES[one.dtype]), one.shape, one.dtype) : one.value));
  const made = kernel.run(...given), results = Array.isArray(made) ? made : [made];
  let worst = 0;
  for (const [k, one] of check.outputs.entries()) {
    const got = await results[k].read(), want = decode(one.data, TYPES[one.dtype]);
    let far = got.length === want.length ? 0 : Infinity;
    for (let n = 0; n < want.length; n++) far = Math.max(far, Number.isNaN(Number(got[n])) !== Number.isNaN(Number(want[n])) ? Infinity : Math.abs(Number(got[n]) - Number(want[n])) || 0);
    worst = Math.max(worst, far / one.scale);
    table.insertAdjacentHTML("beforeend", `<tr><td>${k}</td><td>[${one.shape}]</td><td>${far}</td><td>${Array.from(got.slice(0, 4)).join(", ")}</td></tr>`);
  }
  const right = worst <= check.tolerance;
  state.textContent = `${right ? "right" : "WRONG"}: differs from the CPU by ${worst} of the scale; ${(performance.now() - started).toFixed(1)} ms with copies`;
  state.className = right ? "" : "bad";
  window.outcome = { right, worst };
} catch (error) {
  state.textContent = String(error);
  state.className = "bad";
  window.outcome = { right: false, error: String(error) };
}
</script>
"""
