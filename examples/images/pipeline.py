"""An image pipeline as kernels: from the mosaic of a sensor to a picture and its edges.

Demosaic, blur, sharpen, tone curve, edge detection, histogram equalisation. `develop` is all of it as one kernel: the compiler decides what is fused
(`tilewright inspect examples/images/pipeline.py --kernel develop --fusion`). The single steps are kernels of their own below it. Pictures are planes:
`picture[channel, row, column]`.
"""

from __future__ import annotations

import tilewright as tw

BINS = 256


@tw.kernel
def demosaic(raw: tw.Array) -> tw.Array:
    """Colours from a mosaic of red, green, green, blue (RGGB): what a pixel does not have is the mean of its neighbours that do."""
    h, w = raw.shape
    out = tw.empty((3, h, w), tw.f32)
    for i, j in tw.grid(h, w):
        up, down = max(i - 1, 0), min(i + 1, h - 1)
        left, right = max(j - 1, 0), min(j + 1, w - 1)
        here = float(raw[i, j]) * (1.0 / 255.0)
        across = (float(raw[i, left]) + float(raw[i, right])) * (0.5 / 255.0)
        along = (float(raw[up, j]) + float(raw[down, j])) * (0.5 / 255.0)
        corners = (float(raw[up, left]) + float(raw[up, right]) + float(raw[down, left]) + float(raw[down, right])) * (0.25 / 255.0)
        around = (across + along) * 0.5
        even_row, even_column = i % 2 == 0, j % 2 == 0
        out[0, i, j] = (here if even_column else across) if even_row else (along if even_column else corners)
        out[1, i, j] = around if even_row == even_column else here
        out[2, i, j] = (corners if even_column else along) if even_row else (across if even_column else here)
    return out


@tw.kernel
def blur(x: tw.Array) -> tw.Array:
    """A Gaussian of five taps along rows and columns: 1 4 6 4 1."""
    c, h, w = x.shape
    rows = tw.empty((c, h, w), x.dtype)
    out = tw.empty((c, h, w), x.dtype)
    for k, i, j in tw.grid(c, h, w):
        far = x[k, max(i - 2, 0), j] + x[k, min(i + 2, h - 1), j]
        near = x[k, max(i - 1, 0), j] + x[k, min(i + 1, h - 1), j]
        rows[k, i, j] = (far + 4.0 * near + 6.0 * x[k, i, j]) * (1.0 / 16.0)
    for k, i, j in tw.grid(c, h, w):
        far = rows[k, i, max(j - 2, 0)] + rows[k, i, min(j + 2, w - 1)]
        near = rows[k, i, max(j - 1, 0)] + rows[k, i, min(j + 1, w - 1)]
        out[k, i, j] = (far + 4.0 * near + 6.0 * rows[k, i, j]) * (1.0 / 16.0)
    return out


@tw.kernel
def sharpen(x: tw.Array, soft: tw.Array, amount: float) -> tw.Array:
    """Unsharp masking: what the blur took away is added."""
    c, h, w = x.shape
    out = tw.empty((c, h, w), x.dtype)
    for k, i, j in tw.grid(c, h, w):
        out[k, i, j] = tw.clamp(x[k, i, j] + amount * (x[k, i, j] - soft[k, i, j]), 0.0, 1.0)
    return out


@tw.kernel
def tone(x: tw.Array) -> tw.Array:
    """A curve with a soft shoulder and toe, as film has."""
    c, h, w = x.shape
    out = tw.empty((c, h, w), x.dtype)
    for k, i, j in tw.grid(c, h, w):
        v = x[k, i, j]
        out[k, i, j] = tw.clamp(v * (2.51 * v + 0.03) / (v * (2.43 * v + 0.59) + 0.14), 0.0, 1.0)
    return out


@tw.kernel
def luminance(x: tw.Array) -> tw.Array:
    _, h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        out[i, j] = 0.299 * x[0, i, j] + 0.587 * x[1, i, j] + 0.114 * x[2, i, j]
    return out


@tw.kernel
def edges(y: tw.Array) -> tw.Array:
    """Sobel's operator: how steep the picture is at each pixel, as u8."""
    h, w = y.shape
    out = tw.empty((h, w), tw.u8)
    for i, j in tw.grid(h, w):
        up, down = max(i - 1, 0), min(i + 1, h - 1)
        left, right = max(j - 1, 0), min(j + 1, w - 1)
        gx = (y[up, right] + 2.0 * y[i, right] + y[down, right]) - (y[up, left] + 2.0 * y[i, left] + y[down, left])
        gy = (y[down, left] + 2.0 * y[down, j] + y[down, right]) - (y[up, left] + 2.0 * y[up, j] + y[up, right])
        out[i, j] = tw.u8(min(tw.sqrt(gx * gx + gy * gy) * 255.0, 255.0))
    return out


@tw.kernel
def histogram(y: tw.Array) -> tw.Array:
    """How many pixels have each of 256 values."""
    h, w = y.shape
    out = tw.zeros((BINS,), tw.i32)
    for i, j in tw.grid(h, w):
        out[int(tw.clamp(y[i, j] * 255.0, 0.0, 255.0))] += 1
    return out


@tw.kernel
def equalise(x: tw.Array, y: tw.Array, counts: tw.Array) -> tw.Array:
    """Every brightness becomes its rank among all pixels, and colours keep their shares. Gives u8."""
    _, h, w = x.shape
    ranks = tw.empty((BINS,), tw.f32)
    for b in tw.grid(BINS):
        below = 0
        for k in range(BINS):
            if k <= b:
                below += int(counts[k])
        ranks[b] = float(below) / (h * w)
    out = tw.empty((3, h, w), tw.u8)
    for i, j in tw.grid(h, w):
        gain = ranks[int(tw.clamp(y[i, j] * 255.0, 0.0, 255.0))] / max(y[i, j], 0.004) * 255.0
        out[0, i, j] = tw.u8(tw.clamp(x[0, i, j] * gain, 0.0, 255.0))
        out[1, i, j] = tw.u8(tw.clamp(x[1, i, j] * gain, 0.0, 255.0))
        out[2, i, j] = tw.u8(tw.clamp(x[2, i, j] * gain, 0.0, 255.0))
    return out


@tw.kernel
def develop(raw: tw.Array, amount: float = 0.8) -> tuple[tw.Array, tw.Array]:
    """The whole pipeline: the picture and its edges."""
    colours = demosaic(raw)
    toned = tone(sharpen(colours, blur(colours), amount))
    y = luminance(toned)
    return equalise(toned, y, histogram(y)), edges(y)
