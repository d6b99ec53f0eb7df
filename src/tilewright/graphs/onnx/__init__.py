"""ONNX files as tensor graphs: `wire` and `model` read them, `tensors` their data, `translate` makes nodes by the rules in `operators`."""
