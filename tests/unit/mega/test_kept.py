"""Plans and steps in the cache: a second process plans nothing, and what differs is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.execute.devices import find_device
from tilewright.graphs.lower import Lowering
from tilewright.mega.engine import MegaStep
from tilewright.mega.persistent import collect, kept
from tilewright.mega.persistent.entry import PersistentStep
from tilewright.mega.planning import TapePlan

SCRIPT = """
import json
import sys
import numpy as np
import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.execute.devices import find_device
from tilewright.graphs.lower import Lowering
from tilewright.mega.persistent import entry

made = []
run, plan_step = Lowering.run, entry.plan_step
Lowering.run = lambda self: (made.append("plan"), run(self))[1]
entry.plan_step = lambda *args: (made.append("step"), plan_step(*args))[1]
tape = tw.mega.Tape("kept")
x = tape.input("x", (1, 40))
h = tape.emit("MatMul", x, tape.frozen("w", shape=(40, 24)))
h = tape.emit(sys.argv[1], h)
tape.kv_cache(1, 4, 1, 24)
tape.emit("KVCacheAppendK", tape.emit("Reshape", h, shape=[1, 1, 24]))
tape.output("y", tape.emit("MulScalar", h, scalar=0.5))
kernel = tw.mega.plan(tape).compile("emulator")
with kernel.load() as runner:
    runner.set_weights([np.eye(40, 24, dtype=np.float32)])
    y = runner.launch(np.arange(40, dtype=np.float32)[None] / 40, 2)
    cache = runner.cache("keys_0")[2, 0]
print(json.dumps([made, kernel.from_cache, y[0].tolist(), cache.tolist(), runner.layout.nbytes]))
"""


@pytest.fixture(autouse=True)
def own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where nobody has registered ops: other tests have."""
    monkeypatch.setattr(kept, "changes", lambda: 0)


def process(op: str, folder: Path) -> tuple[list[str], bool, np.ndarray, np.ndarray, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, op], env={**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made, cached, y, cache, nbytes = json.loads(done.stdout)
    return made, cached, np.array(y), np.array(cache), nbytes


def test_a_second_process_plans_nothing(tmp_path: Path) -> None:
    want = np.tanh(np.arange(24) / 40)
    first, second = process("Tanh", tmp_path), process("Tanh", tmp_path)
    assert "plan" in first[0] and "step" in first[0] and not first[1]
    assert second[0] == [] and second[1] and second[4] == first[4]
    for found in (first, second):
        assert np.abs(found[2] - 0.5 * want).max() < 1e-6 and np.abs(found[3] - want).max() < 1e-6
    changed = process("Exp", tmp_path)
    assert "plan" in changed[0] and not changed[1]
    assert np.abs(changed[3] - np.exp(np.arange(24) / 40)).max() < 1e-5


def graph(scale: float = 1.0, epsilon: float = 1e-6) -> tw.TensorGraph:
    g = tw.TensorGraph("small")
    x = g.input("x", (1, 16), tw.f32)
    h = g.op("RmsNorm", x, gamma=g.weight("gamma", np.ones(16, np.float32)), epsilon=epsilon)
    g.output("y", g.op("MulMat", h, weight=g.weight("w", scale * np.eye(16, dtype=np.float32))))
    return g


def test_keys_are_those_of_what_decides_the_code() -> None:
    key = kept.graph_key(graph(), {})
    assert key and kept.graph_key(graph(scale=2.0), {}) == key  # numbers of weights are no part of the code
    assert kept.graph_key(graph(epsilon=1e-5), {}) != key and kept.graph_key(graph(), {"n": 2}) != key
    own = graph()
    own.replace("MulMat", lambda x, weight: x @ weight.T)
    assert kept.graph_key(own, {}) == ""


def test_a_step_of_a_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    place = find_device("emulator")
    x = np.arange(16, dtype=np.float32)[None] + 1
    want = x / np.sqrt((x * x).mean())
    MegaStep(graph(), place, {"x": x}, steps=2).close()
    planned: list[str] = []
    for owner, name in ((Lowering, "run"), (collect, "collect")):
        monkeypatch.setattr(owner, name, lambda *args, name=name: planned.append(name))
    step = MegaStep(graph(scale=3.0), place, {"x": x}, steps=2)
    assert step.from_cache and not planned
    step(2)
    assert np.abs(step.outputs["y"] - 3 * want).max() < 1e-4
    step.close()


def test_a_step_of_a_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that only takes launches: the second step loads the code of the first."""
    with installed(NullCuda()):
        place = find_device("cuda")
        x = np.ones((1, 16), np.float32)
        first = MegaStep(graph(), place, {"x": x}, steps=3)
        first(4)
        monkeypatch.setattr(Lowering, "run", lambda self: pytest.fail("it is planned again"))
        second = MegaStep(graph(), place, {"x": x}, steps=3)
        assert second.from_cache and isinstance(second.step, PersistentStep) and isinstance(first.step, PersistentStep)
        assert second.step.artifact is not None and first.step.artifact is not None and second.step.artifact.code == first.step.artifact.code
        assert second.step.blocks == first.step.blocks and second.step.waits == first.step.waits and second.step.tasks == first.step.tasks
        second(4)
        first.close()
        second.close()


def test_a_layout_survives_the_cache(tmp_path: Path) -> None:
    tape = tw.mega.Tape("layout")
    x = tape.input("x", (3, 5))
    tape.output("y", tape.emit("Exp", tape.emit("Neg", x)))
    first, second = TapePlan(tape, False), TapePlan(tape, False)
    assert second.known is not None and first.workspace == second.workspace and str(first.workspace) == str(second.workspace)
    assert [task.after for task in second.tasks] == [(), (0,)]
