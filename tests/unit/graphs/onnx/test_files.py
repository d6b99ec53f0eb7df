"""Files: what is read, and what is refused. Nothing here may crash or allocate what a file does not hold."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from bench.onnx_writer import attribute, graph, integer, model, node, of_graph, part, single, tensor, value, varint
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli
from tilewright.graphs.onnx.model import read_model, read_tensor
from tilewright.graphs.onnx.tensors import ExternalFiles, array_of
from tilewright.graphs.onnx.wire import Malformed

X = np.arange(6, dtype=np.float32).reshape(2, 3)
GOOD, _ = single("Add", (X, X))


def refused(data: bytes, *words: str, code: str = "TW007", **keywords: int) -> None:
    with pytest.raises(tw.UserError) as error:
        tw.graph.from_onnx(data, **keywords).run(x0=X, x1=X)
    assert error.value.code == code, str(error.value)
    for word in words:
        assert word in str(error.value)


def test_every_prefix_is_refused() -> None:
    for length in range(len(GOOD) - 1):
        with contextlib.suppress(tw.UserError):
            tw.graph.from_onnx(GOOD[:length])


def test_lengths_beyond_the_end() -> None:
    refused(varint(7 << 3 | 2) + varint(1 << 60) + b"x", "bytes long")
    refused(varint(7 << 3 | 2) + b"\xff" * 11, "longer than")
    refused(b"\x0b", "wire type 3")
    refused(b"")


def test_dims_beyond_the_data() -> None:
    huge = integer(1, 1 << 60) + integer(1, 1 << 60) + integer(2, 1) + part(8, "w") + part(9, b"1234")
    with pytest.raises(Malformed, match="dims"):
        array_of(read_tensor(memoryview(huge)), ExternalFiles(None))
    short = integer(1, 100) + integer(2, 1) + part(9, b"1234")
    with pytest.raises(Malformed, match="takes 400 bytes"):
        array_of(read_tensor(memoryview(short)), ExternalFiles(None))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint64, np.bool_, np.float16])
def test_typed_data(dtype: type) -> None:
    array: np.ndarray = np.array([0, 1, 1, 3], dtype)
    field, number = {"f4": (4, 1), "f8": (10, 11), "i4": (5, 6), "i8": (7, 7), "u8": (11, 13), "b1": (5, 9), "f2": (5, 10)}[array.dtype.str[1:]]
    if array.dtype.kind == "f" and array.itemsize > 2:
        data = part(field, b"".join(struct.pack("<f" if array.itemsize == 4 else "<d", v) for v in array))
    else:
        bits = array.view(np.uint16) if array.itemsize == 2 else array
        data = part(field, b"".join(varint(int(v)) for v in bits))
    found = array_of(read_tensor(memoryview(integer(1, 4) + integer(2, number) + data)), ExternalFiles(None))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_four_bits() -> None:
    data = integer(1, 3) + integer(2, 22) + part(9, bytes([0x8F, 0x07]))
    np.testing.assert_array_equal(array_of(read_tensor(memoryview(data)), ExternalFiles(None)), np.array([-1, -8, 7], np.int8))


def test_external_data_stay_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret.bin").write_bytes(X.tobytes())
    (tmp_path / "inside" / "w.bin").write_bytes(b"1234" + X.tobytes())

    def written(location: str, offset: int = 4) -> Path:
        entries = {"location": location, "offset": str(offset), "length": str(X.nbytes)}
        external = b"".join(part(13, part(1, key) + part(2, text)) for key, text in entries.items())
        weight = integer(1, 2) + integer(1, 3) + integer(2, 1) + part(8, "w") + external + integer(14, 1)
        data = part(1, node("Add", ["x", "w"], ["y"])) + part(5, weight) + part(11, value("x", np.float32, [2, 3])) + part(12, part(1, "y"))
        path = tmp_path / "inside" / "model.onnx"
        path.write_bytes(of_graph(data))
        return path

    np.testing.assert_array_equal(tw.graph.from_onnx(written("w.bin")).run(x=X), X + X)
    for location, offset, word in (("../secret.bin", 0, "not inside"), (str(tmp_path / "secret.bin"), 0, "not inside"), ("none.bin", 0, "no file"), ("w.bin", 8, "which has 28")):
        with pytest.raises(tw.UserError, match=word):
            tw.graph.from_onnx(written(location, offset)).run(x=X)
    link = tmp_path / "inside" / "link.bin"
    link.symlink_to(tmp_path / "secret.bin")
    with pytest.raises(tw.UserError, match="not inside"):
        tw.graph.from_onnx(written("link.bin", 0)).run(x=X)


def test_graphs_too_deep() -> None:
    inner = graph([node("Neg", ["x"], ["y"])], [], ["y"])
    for _ in range(40):
        inner = graph([node("If", ["c"], ["y"], then_branch=inner, else_branch=inner[:0])], [], ["y"])
    refused(of_graph(inner), "nested")


def test_unknown_operators_are_listed_at_once() -> None:
    nodes = [node("Nonsense", ["x0"], ["a"], "first"), node("Add", ["a", "x1"], ["b"]), node("Fancy", ["b"], ["y"], "second", "my.domain")]
    refused(model(nodes, [value("x0"), value("x1")], ["y"]), "2 node(s)", "Nonsense (domain 'ai.onnx', opset 18): node 'first'", "Fancy (domain 'my.domain'", code="TW005")


def test_cycles_and_missing_nodes() -> None:
    nodes = [node("Add", ["x0", "b"], ["a"], "first"), node("Add", ["a", "x1"], ["b"], "second")]
    refused(model(nodes, [value("x0"), value("x1")], ["b"]), "'first'", "'b'", code="TW008")
    refused(model([node("Neg", ["x0"], ["a"])], [value("x0"), value("x1")], ["y"]), "'y'", code="TW008")


def test_wrong_types_name_the_node() -> None:
    refused(model([node("And", ["x0", "x1"], ["y"], "gate")], [value("x0"), value("x1")], ["y"]), "'gate'", "float32", code="TW009")
    refused(model([node("Concat", ["x0", "x1"], ["y"], "join", axis="one")], [value("x0"), value("x1")], ["y"]), "'join'", "axis", code="TW009")
    refused(model([node("Concat", ["x0", "x1"], ["y"], "join", axis=7)], [value("x0"), value("x1")], ["y"]), "axis 7", code="TW003")


def test_results_that_are_too_large() -> None:
    nodes = [node("ConstantOfShape", ["s"], ["big"], "filled"), node("Add", ["big", "x0"], ["y"])]
    refused(model(nodes, [value("x0"), value("x1")], ["y"], {"s": np.array([1 << 40, 1 << 40])}), "'filled'", code="TW031")
    refused(model(nodes, [value("x0"), value("x1")], ["y"], {"s": np.array([1000, 1000])}), "4,000,000 bytes", code="TW031", max_bytes=1000)


def test_other_opsets() -> None:
    refused(single("Add", (X, X), opset=99)[0], "opset 99", code="TW005")
    refused(single("Add", (X, X), opset=6)[0], "opset 6", code="TW005")


def test_inputs_are_checked() -> None:
    found = tw.graph.from_onnx(model([node("Add", ["x", "y"], ["z"])], [value("x", np.float32, ["n", 3]), value("y", np.float32, ["n", 3])], ["z"]))
    for inputs, code in (({"x": X}, "TW008"), ({"x": X, "y": X, "w": X}, "TW008"), ({"x": X, "y": X.astype(int)}, "TW006"), ({"x": X, "y": X[0]}, "TW003"), ({"x": X, "y": X[:1]}, "TW004"), ({"x": X, "y": X[:, :2]}, "TW004")):
        with pytest.raises(tw.UserError) as error:
            found.run(inputs)
        assert error.value.code == code, (code, str(error.value))
    assert repr(found) == "<ONNX model graph: x: float32[n, 3], y: float32[n, 3] -> z>"


def test_functions_of_the_model() -> None:
    attribute_of = part(1, "axis") + part(21, "along") + integer(20, 2)
    inner = part(1, "a") + part(1, "b") + part(2, "c") + part(4, "Concat") + part(5, attribute_of)
    function = part(1, "Join") + part(4, "a") + part(4, "b") + part(5, "c") + part(6, "along") + part(7, inner) + part(10, "mine")
    data = model([node("Join", ["x0", "x1"], ["y"], domain="mine", along=1)], [value("x0"), value("x1")], ["y"]) + part(25, function)
    np.testing.assert_array_equal(tw.graph.from_onnx(data).run(x0=X, x1=X), np.concatenate([X, X], 1))


def test_functions_in_a_circle() -> None:
    inner = part(1, "a") + part(2, "c") + part(4, "Round") + part(7, "mine")
    function = part(1, "Round") + part(4, "a") + part(5, "c") + part(7, inner) + part(10, "mine")
    data = model([node("Round", ["x0"], ["y"], domain="mine")], [value("x0"), value("x1")], ["y"]) + part(25, function)
    refused(data, "circle", "mine.Round", code="TW016")


def test_functions_that_grow_without_end() -> None:
    functions = b""
    for number in range(30):
        op, domain = (f"F{number + 1}", "mine") if number < 29 else ("Neg", "")
        calls = b"".join(part(7, part(1, a) + part(2, b) + part(4, op) + part(7, domain)) for a, b in (("a", "b"), ("b", "c")))
        functions += part(25, part(1, f"F{number}") + part(4, "a") + part(5, "c") + calls + part(10, "mine"))
    refused(model([node("F0", ["x0"], ["y"], domain="mine")], [value("x0"), value("x1")], ["y"]) + functions, "200,000 are the most", code="TW005")


def test_values_are_made_once() -> None:
    nodes = [node("Neg", ["x0"], ["y"], "first"), node("Abs", ["x0"], ["y"], "second")]
    refused(model(nodes, [value("x0"), value("x1")], ["y"]), "'second'", "'y'", code="TW016")


def test_many_inputs() -> None:
    names = [f"n{k}" for k in range(70)]
    nodes = [*(node("Neg", ["x0"], [name]) for name in names), node("Concat", names, ["y"], axis=0)]
    found = tw.graph.from_onnx(model(nodes, [value("x0"), value("x1")], ["y"])).run(x0=X, x1=X, fuse=False)
    np.testing.assert_array_equal(found, np.tile(-X, (70, 1)))
    nodes[-1] = node("Sum", names, ["y"])
    refused(model(nodes, [value("x0"), value("x1")], ["y"]), "70 inputs", code="TW005")


def test_reading_takes_no_copies() -> None:
    big = np.zeros(1 << 20, np.float32)
    data = model([node("Identity", ["w"], ["y"])], [], ["y"], {"w": big})
    record = read_model(memoryview(data)).graph
    assert record is not None
    found = array_of(record.initializers[0], ExternalFiles(None))
    assert not found.flags.owndata or found.ctypes.data % 4 == 0
    assert attribute("a", 1.5)
    assert tensor(X)


def test_command_line(tmp_path: Path) -> None:
    path, x, y = tmp_path / "m.onnx", tmp_path / "x.npy", tmp_path / "y.npy"
    path.write_bytes(GOOD)
    np.save(x, X)
    result = CliRunner().invoke(cli, ["run", str(path), "--in", f"x0={x}", "--in", f"x1={x}", "--out", str(y), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(y), X + X)
    result = CliRunner().invoke(cli, ["run", str(path), "--in", f"x0={x}", "--device", "cpu"])
    assert result.exit_code != 0 and "missing the input 'x1'" in result.output
