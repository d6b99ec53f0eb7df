"""The transformer block captured as one graph: on the CPU, and with the launches of a GPU on the null driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTS = Path(__file__).parents[1]

ON_NULL_GPU = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(EXAMPLES)!r}]
import numpy as np
import tilewright as tw
from null_cuda.install import install
driver = install(mode="random")
from transformer import make_weights, reference
from transformer_graph import captured

rng = np.random.default_rng(0)
weights = make_weights(rng, 32, 64)
inputs = [rng.standard_normal((16, 32)).astype(np.float32) for _ in range(3)]
there = {{name: tw.to_device(value, "cuda") for name, value in weights.items()}}
graph = captured(tw.to_device(inputs[0], "cuda"), there, 2, 2)
for values in inputs:
    found = np.asarray(graph.replay(x=tw.to_device(values, "cuda")))
    print(np.abs(found - reference(values, weights, 2, 2)).max())
print(graph.nodes, graph.instantiations, len(driver.calls("cuGraphLaunch")))
"""


def run(*command: str) -> list[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_runs() -> None:
    lines = run(str(EXAMPLES / "transformer_graph.py"))
    errors = [float(line.rpartition(" ")[2]) for line in lines if "largest error" in line]
    assert len(errors) == 4
    assert max(errors) < 1e-5
    assert lines[0].startswith("Graph(")


def test_the_block_is_one_launch_on_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "on_null_gpu.py"
    script.write_text(ON_NULL_GPU, encoding="utf-8")
    *errors, counts = run(str(script))
    assert np.max([float(line) for line in errors]) < 1e-5
    nodes, instantiations, launches = map(int, counts.split())
    assert nodes >= 5
    assert (instantiations, launches) == (1, 3)
