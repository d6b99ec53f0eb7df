"""Exported kernels in headless Chromium: softmax, a product, and a transformer block, compared in the page with the CPU."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw

pytestmark = pytest.mark.requires("browser")
sys.path.append(str(Path(__file__).parents[2] / "examples"))
FLAGS = (
    "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip

BLOCK = """<!doctype html><meta charset="utf-8"><title>transformer block</title><h1>transformer block</h1><p id="state">starting</p>
<script type="module">
import { Gpu } from "./tilewright.js";
const decode = (one) => new Float32Array(Uint8Array.from(atob(one.data), (c) => c.charCodeAt(0)).buffer);
try {
  const gpu = await Gpu.open(), data = await (await fetch("./block.json")).json(), load = (name) => gpu.load(new URL(`./${name}.json`, location.href));
  const [project, attend, norm1, gelu, norm2] = await Promise.all(["project", "attend", "norm1", "project_gelu", "norm2"].map(load));
  const w = Object.fromEntries(Object.entries(data.arrays).map(([name, one]) => [name, gpu.array(decode(one), one.shape)]));
  const { rows, features, batch, heads } = data, depth = features / heads;
  const qkv = project.run(w.x, w.qkv, w.qkv_bias).reshape(batch, rows / batch, 3, heads, depth).transpose(2, 0, 3, 1, 4);
  const part = (k) => { const one = qkv.slice(0, k, k + 1); one.shape = one.shape.slice(1); one.strides = one.strides.slice(1); return one.contiguous(); };
  const mixed = attend.run(await part(0), await part(1), await part(2), depth ** -0.5).reshape(rows, features);
  const seen = norm1.run(mixed, w.out, w.out_bias, w.x, w.gain1, w.shift1);
  const hidden = gelu.run(seen, w.up, w.up_bias);
  const got = await norm2.run(hidden, w.down, w.down_bias, seen, w.gain2, w.shift2).read(), want = decode(data.want);
  let worst = 0;
  for (let n = 0; n < want.length; n++) worst = Math.max(worst, Number.isNaN(got[n]) ? Infinity : Math.abs(got[n] - want[n]));
  window.outcome = { right: worst < 1e-4, worst };
} catch (error) { window.outcome = { right: false, error: String(error) }; }
document.getElementById("state").textContent = JSON.stringify(window.outcome);
</script>
"""


def encoded(array: np.ndarray) -> dict[str, object]:
    return {"dtype": "f32", "shape": list(array.shape), "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
        yield made
        made.close()


def outcome(browser: Any, folder: Path, page: str) -> dict[str, Any]:
    """What a page of a folder says of its results; a screenshot goes to `TILEWRIGHT_SCREENSHOTS` where that is set."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tab = browser.new_page()
    try:
        tab.goto(f"http://127.0.0.1:{server.server_port}/{page}")
        tab.wait_for_function("window.outcome !== undefined", timeout=300_000)
        if os.environ.get("TILEWRIGHT_SCREENSHOTS"):
            tab.screenshot(path=str(Path(os.environ["TILEWRIGHT_SCREENSHOTS"]) / f"{page}.png"))
        found: dict[str, Any] = tab.evaluate("window.outcome")
        return found
    finally:
        tab.close()
        server.shutdown()


def check_page(browser: Any, folder: Path, kernel: Any, *arguments: np.ndarray) -> None:
    """Export a kernel with inputs and the CPU's results, and look at what its page says."""
    name = kernel.__name__
    tw.export(kernel, *arguments, target="wgsl", folder=folder)
    want = kernel(*arguments, device="cpu")
    check = {
        "inputs": [encoded(a) for a in arguments], "outputs": [{**encoded(want), "scale": float(np.abs(want).max())}], "tolerance": 1e-5,
    }  # fmt: skip
    (folder / f"{name}.check.json").write_text(json.dumps(check))
    assert outcome(browser, folder, f"{name}.html")["right"]


def test_softmax(browser: Any, tmp_path: Path) -> None:
    import layers

    check_page(browser, tmp_path, layers.softmax, np.random.default_rng(0).standard_normal((37, 101)).astype(np.float32))


def test_product(browser: Any, tmp_path: Path) -> None:
    import matmul

    random = np.random.default_rng(1)
    check_page(browser, tmp_path, matmul.matmul, random.standard_normal((45, 67)).astype(np.float32), random.standard_normal((67, 51)).astype(np.float32))


def test_transformer_block(browser: Any, tmp_path: Path) -> None:
    import transformer as t

    random, rows, features, hidden, batch, heads = np.random.default_rng(2), 26, 32, 72, 2, 4
    x = random.standard_normal((rows, features)).astype(np.float32)
    w = t.make_weights(random, features, hidden)
    qkv = t.project(x, w["qkv"], w["qkv_bias"], device="cpu")
    parts = qkv.reshape(batch, rows // batch, 3, heads, features // heads).transpose(2, 0, 3, 1, 4)
    mixed = t.attend(*parts, (features // heads) ** -0.5, device="cpu").reshape(rows, features)
    seen = t.project_add_norm(mixed, w["out"], w["out_bias"], x, w["gain1"], w["shift1"], device="cpu")
    wide = t.project_gelu(seen, w["up"], w["up_bias"], device="cpu")
    last = (wide, w["down"], w["down_bias"], seen, w["gain2"], w["shift2"])
    to_web = functools.partial(tw.export, target="wgsl", folder=tmp_path)
    to_web(t.project, x, w["qkv"], w["qkv_bias"])
    to_web(t.attend, *parts, (features // heads) ** -0.5)
    to_web(t.project_add_norm, mixed, w["out"], w["out_bias"], x, w["gain1"], w["shift1"], name="norm1")
    to_web(t.project_gelu, seen, w["up"], w["up_bias"])
    to_web(t.project_add_norm, *last, name="norm2")
    want = t.project_add_norm(*last, device="cpu")
    np.testing.assert_allclose(want, t.reference(x, w, batch, heads), atol=1e-4)
    data = {"rows": rows, "features": features, "batch": batch, "heads": heads, "arrays": {n: encoded(a) for n, a in {"x": x, **w}.items()}, "want": encoded(want)}
    (tmp_path / "block.json").write_text(json.dumps(data))
    (tmp_path / "block.html").write_text(BLOCK)
    assert outcome(browser, tmp_path, "block.html")["right"]
