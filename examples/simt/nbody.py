"""Accelerations of n bodies that attract each other: a tile of bodies at a time is shared by the threads of a block."""

from __future__ import annotations

import numpy as np

import tilewright as tw

BLOCK = 256
SOFTENING = 1e-3


@tw.gpu
def accelerations(place: tw.Array, out: tw.Array) -> None:
    """`place` has x, y, z and the mass of each body."""
    n = len(place)
    i = tw.gpu_thread_id()
    t = tw.thread.x
    tile = tw.shared((BLOCK, 4), tw.f32)
    mine = min(i, n - 1)
    x, y, z = place[mine, 0], place[mine, 1], place[mine, 2]
    ax, ay, az = 0.0, 0.0, 0.0
    for first in range(0, n, BLOCK):
        k = min(first + t, n - 1)
        tile[t, 0] = place[k, 0]
        tile[t, 1] = place[k, 1]
        tile[t, 2] = place[k, 2]
        # Bodies beyond the last one have no mass.
        tile[t, 3] = place[k, 3] if first + t < n else 0.0
        tw.gpu_sync()
        for other in range(BLOCK):
            dx, dy, dz = tile[other, 0] - x, tile[other, 1] - y, tile[other, 2] - z
            inverse = tw.rsqrt_approx(dx * dx + dy * dy + dz * dz + SOFTENING)
            pull = tile[other, 3] * inverse * inverse * inverse
            ax += dx * pull
            ay += dy * pull
            az += dz * pull
        tw.gpu_sync()
    if i < n:
        out[i, 0], out[i, 1], out[i, 2] = ax, ay, az


def main(n: int = 300, device: str = "auto") -> None:
    rng = np.random.default_rng(4)
    place = np.column_stack([rng.normal(size=(n, 3)), rng.uniform(0.5, 1.5, n)]).astype(np.float32)
    out = np.empty((n, 3), np.float32)
    accelerations[-(-n // BLOCK), BLOCK](place, out, device=device)
    wide = place.astype(np.float64)
    apart = wide[None, :, :3] - wide[:, None, :3]
    pull = wide[None, :, 3] * ((apart**2).sum(2) + SOFTENING) ** -1.5
    np.testing.assert_allclose(out, (apart * pull[:, :, None]).sum(1), rtol=1e-3, atol=1e-2)
    print(f"accelerations: {n} bodies")


if __name__ == "__main__":
    main()
