"""Parameters of kernel kinds in ZynML: bound from literals, names, inputs and calls alike, checked, and never without effect."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tilewright as tw

_BODY = """
    for b in 0..batch, oc in 0..out_channels, oh in 0..out_h, ow in 0..out_w:
        var sum = 0.0
        for ic in 0..in_channels{per_group}, kh in 0..kernel_h, kw in 0..kernel_w:
            let ih = oh * stride + kh * dilation - padding
            let iw = ow * stride + kw * dilation - padding
            if ih >= 0 and ih < in_h and iw >= 0 and iw < in_w:
                sum += image[b, {channel}, ih, iw] * weights[oc, ic, kh, kw]
        out[b, oc, oh, ow] = sum
}}
"""


def program(inputs: str, kind: str, before: str = "", grouped: bool = False) -> str:
    parts = {"per_group": " / groups", "channel": "oc / (out_channels / groups) * (in_channels / groups) + ic"} if grouped else {"per_group": "", "channel": "ic"}
    return f"{before}let y = compute({inputs}) {{\n    @kernel {kind}{_BODY.format(**parts)}"


def convolved(image: np.ndarray, weights: np.ndarray, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> np.ndarray:
    """The convolution in f64, window element by window element."""
    x, w = np.pad(image.astype(np.float64), ((0, 0), (0, 0), (padding, padding), (padding, padding))), weights.astype(np.float64)
    filters, deep, kernel_h, kernel_w = w.shape
    rows = (x.shape[2] - dilation * (kernel_h - 1) - 1) // stride + 1
    columns = (x.shape[3] - dilation * (kernel_w - 1) - 1) // stride + 1
    out = np.zeros((x.shape[0], filters, rows, columns))
    for f, c, i, j in itertools.product(range(filters), range(deep), range(kernel_h), range(kernel_w)):
        channel = f // (filters // groups) * deep + c
        part = x[:, channel, i * dilation :, j * dilation :][:, : (rows - 1) * stride + 1 : stride, : (columns - 1) * stride + 1 : stride]
        out[:, f] += part * w[f, c, i, j]
    return out


RNG = np.random.default_rng(3)
IMAGE = RNG.standard_normal((2, 4, 9, 11)).astype(np.float32)
WEIGHTS = RNG.standard_normal((6, 4, 3, 2)).astype(np.float32)
GIVEN = {"image": IMAGE, "weights": WEIGHTS}


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(2, 1, 1), (1, 2, 2), (3, 0, 1), (2, 2, 2)])
def test_a_parameter_binds_wherever_it_comes_from(stride: int, padding: int, dilation: int) -> None:
    numbers = {"stride": stride, "padding": padding, "dilation": dilation}
    want = convolved(IMAGE, WEIGHTS, **numbers)
    written = ", ".join(f"{name}={value}" for name, value in numbers.items())
    declared = "".join(f"let {name} = {value}\n" for name, value in numbers.items())
    for text, given in (
        (program("image, weights", f"conv2d({written})"), {}),
        (program("image, weights", "conv2d", declared), {}),
        (program("image, weights", "conv2d"), numbers),
        (program("image, weights, stride, padding, dilation", "conv2d"), {**numbers, "padding": np.int64(padding)}),
        (program("image, weights", "conv2d(stride=s, padding=p - 1, dilation=dilation)", f"let s = {stride}\n"), {"p": padding + 1, "dilation": dilation}),
    ):
        found = tw.load(text).run(**GIVEN, **given, device="cpu")["y"]
        assert found.shape == want.shape, text
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_numbers_of_one_call_do_not_stay_for_the_next() -> None:
    module = tw.load(program("image, weights", "conv2d"))
    function = tw.load("pipeline f(image, weights, stride):\n" + program("image, weights", "conv2d").replace("let y =", "return").replace("\n", "\n    ").join(("    ", "")))
    for stride in (1, 2, 2, 2, 3, 1):
        want = convolved(IMAGE, WEIGHTS, stride)
        np.testing.assert_allclose(module.run(**GIVEN, stride=stride, device="cpu")["y"], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(function.call("f", (IMAGE, WEIGHTS, stride), {}, "cpu"), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_groups_and_dilation(device: str) -> None:
    weights = WEIGHTS[:, :2]
    found = tw.load(program("image, weights", "conv2d(stride=2, padding=1, dilation=2, groups=2)", grouped=True)).run(image=IMAGE, weights=weights, device=device)["y"]
    np.testing.assert_allclose(found, convolved(IMAGE, weights, 2, 1, 2, 2), rtol=1e-4, atol=1e-4)


def test_windows_of_single_channels() -> None:
    text = """
    let y = compute(image, windows) {
        @kernel conv2d_depthwise(stride=2, padding=1, dilation=d)
        for b in 0..batch, c in 0..channels, oh in 0..out_h, ow in 0..out_w:
            var sum = 0.0
            for kh in 0..kernel_h, kw in 0..kernel_w:
                let ih = oh * stride + kh * dilation - padding
                let iw = ow * stride + kw * dilation - padding
                if ih >= 0 and ih < in_h and iw >= 0 and iw < in_w:
                    sum += image[b, c, ih, iw] * windows[c, kh, kw]
            out[b, c, oh, ow] = sum
    }
    """
    windows = RNG.standard_normal((4, 3, 2)).astype(np.float32)
    found = tw.load(text).run(image=IMAGE, windows=windows, d=2, device="cpu")["y"]
    np.testing.assert_allclose(found, convolved(IMAGE, windows[:, None], 2, 1, 2, groups=4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("conv2d(strde=2)", {}, "@kernel conv2d has no parameter 'strde'"),
        ("conv2d", {"stride": 0}, "'stride' of @kernel conv2d is 0, and must be a whole number from 1 on"),
        ("conv2d", {"stride": 2.0}, "'stride' of @kernel conv2d is 2.0, and must be"),
        ("conv2d", {"stride": "2"}, "'stride' of @kernel conv2d is \"2\", and must be"),
        ("conv2d", {"padding": np.ones(2)}, "'padding' of @kernel conv2d is [1., 1.], and must be"),
        ("conv2d", {"padding": -1}, "'padding' of @kernel conv2d is -1, and must be a whole number from 0 on"),
        ("conv2d(stride=[2, 1])", {}, "'stride' of @kernel conv2d must be a whole number from 1 on"),
        ("conv2d(groups=2)", {}, "@kernel conv2d(groups=2), but nothing in the block uses 'groups'"),
        ("conv2d(dilation=5)", {}, "windows reach over 11 elements of in_h, which has 9 with its padding"),
    ],
)
def test_wrong_parameters(kind: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(tw.UserError) as caught:
        tw.load(program("image, weights", kind)).run(**GIVEN, **given, device="cpu")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "deep", "message"),
    [
        (3, 1, "groups=3 does not divide in_channels: 3 of 4 would be computed"),
        (4, 1, "groups=4 does not divide out_channels: 4 of 6 would be computed"),
        (2, 4, "axis 1 of 'weights' is 4, but floordiv(in_channels, 2) is 2"),
    ],
)
def test_groups_that_do_not_fit(groups: int, deep: int, message: str) -> None:
    with pytest.raises(tw.UserError) as caught:
        tw.load(program("image, weights", f"conv2d(groups={groups})", grouped=True)).run(image=IMAGE, weights=WEIGHTS[:, :deep], device="cpu")
    assert message in str(caught.value)


def test_parameters_of_own_kinds_are_names_of_the_body() -> None:
    x = np.arange(3, dtype=np.float32)
    body = "for i in 0..n: out[i] = x[i] * depth"
    assert tw.load(f"let y = compute(x) {{\n @kernel mine(depth=k + 0.5)\n {body}\n}}").run(x=x, k=2, device="cpu")["y"].tolist() == [0.0, 2.5, 5.0]
    with pytest.raises(tw.UserError, match="but nothing in the block uses 'deep'"):
        tw.load(f"let y = compute(x) {{\n @kernel mine(deep=3)\n {body}\n}}").run(x=x, depth=2, device="cpu")
    with pytest.raises(tw.UserError, match="@kernel elementwise has no parameter 'depth'"):
        tw.load(f"let y = compute(x) {{\n @kernel elementwise(depth=3)\n {body}\n}}").run(x=x, device="cpu")
