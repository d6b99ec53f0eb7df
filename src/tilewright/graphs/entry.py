"""`tw.graph`: records calls as one (`tw.graph(step, x)`), and what there is to say about tensor graphs.

    tw.graph(step, x, 0.5)                      calls of a function, recorded and replayed (execute/graphs.py)
    tw.graph.register("MulMat", kernel=mine)    another kernel for an op, in all graphs
    tw.graph.register("Clip", inputs=("x",), …) a new op
    tw.graph.ops()                              the ops and their records
    tw.graph.from_onnx("model.onnx")            a model of an ONNX file
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import UserError, public_methods
from tilewright.execute import graphs
from tilewright.graphs.ops.table import op_record, op_records
from tilewright.graphs.registry import OpParam, OpRecord, add_op, replace_everywhere

if TYPE_CHECKING:
    from tilewright.graphs.onnx.imported import OnnxGraph


@public_methods("__call__")
class GraphEntry:
    """Call it to record a function; its attributes are about tensor graphs."""

    def __call__(self, function: Callable[..., Any], *args: Any, device: str | None = None, **keywords: Any) -> graphs.Graph:
        """Record what `function(*args, **keywords)` does. Its parameters are the inputs, what it returns is `graph.result`."""
        return graphs.graph(function, *args, device=device, **keywords)

    def ops(self) -> dict[str, OpRecord]:
        """The ops of tensor graphs, by name."""
        return op_records()

    def from_onnx(self, source: str | Path | bytes, *, max_bytes: int = 1 << 34) -> OnnxGraph:
        """The model in an ONNX file, or in its bytes. No tensor that a node makes may take more than `max_bytes`."""
        from tilewright.graphs.onnx.imported import OnnxGraph

        return OnnxGraph(source, max_bytes)

    def onnx_operators(self) -> dict[str, str]:
        """The ONNX operators that `from_onnx` knows, with notes; those of other domains have their domain in front."""
        from tilewright.graphs.onnx.imported import onnx_operators

        return onnx_operators()

    def register(
        self,
        op: str,
        kernel: Callable[..., Any] | None,
        *,
        node: str = "",
        inputs: Sequence[str] | None = None,
        rule: Callable[..., Any] | None = None,
        params: Sequence[OpParam] = (),
        results: int = 1,
        doc: str = "",
    ) -> None:
        """Another kernel for an op in all graphs (for nodes of one name with `node=`; None: the op's own again).

        With `inputs` and `rule` it is a new op: names of its inputs, and a function of the call that gives a `TensorType`.
        """
        if inputs is None and rule is None:
            replace_everywhere(op_record(op), kernel, node)
            return
        if inputs is None or rule is None or kernel is None:
            raise UserError.at("TW016", f"the op '{op}' is declared without its {'inputs' if inputs is None else 'rule' if rule is None else 'kernel'}", help="give inputs=, rule= and kernel=")
        add_op(OpRecord(op, tuple(inputs), rule, kernel, tuple(params), results, doc=doc))


graph = GraphEntry()
"""Tensor graphs: `tw.graph.ops()`, `tw.graph.register(…)`, `tw.graph.from_onnx(…)`. Called with a function, it records one."""
