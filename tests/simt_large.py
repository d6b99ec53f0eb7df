"""Explicit kernels of the size users write: physics, images, matrices, graphs, signals."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from simt_kernels import case, filled, floats, wholes, zeros


@case((2, 4), (32, 4), zeros(16, 64, dtype=np.int32))
def mandelbrot(y: tw.Array):
    j = tw.block.x * 32 + tw.thread.x
    i = tw.block.y * 4 + tw.thread.y
    cr = -2.0 + j * (3.0 / 64)
    ci = -1.0 + i * (2.0 / 16)
    zr = tw.f32(0.0)
    zi = tw.f32(0.0)
    n = 0
    while n < 100 and zr * zr + zi * zi < 4.0:
        zr, zi = zr * zr - zi * zi + cr, 2.0 * zr * zi + ci
        n += 1
    y[i, j] = n


@case(2, 32, floats(64, 4), zeros(64, 3), ulp=0)
def n_body(p: tw.Array, force: tw.Array):
    t = tw.thread.x
    i = tw.gpu_thread_id()
    px = tw.shared(32, tw.f32)
    py = tw.shared(32, tw.f32)
    pz = tw.shared(32, tw.f32)
    mass = tw.shared(32, tw.f32)
    x = p[i, 0]
    y = p[i, 1]
    z = p[i, 2]
    fx = tw.f32(0.0)
    fy = tw.f32(0.0)
    fz = tw.f32(0.0)
    for tile in range(0, p.shape[0], 32):
        px[t] = p[tile + t, 0]
        py[t] = p[tile + t, 1]
        pz[t] = p[tile + t, 2]
        mass[t] = p[tile + t, 3]
        tw.gpu_sync()
        for k in range(32):
            dx = px[k] - x
            dy = py[k] - y
            dz = pz[k] - z
            square = dx * dx + dy * dy + dz * dz + 0.01
            scale = mass[k] / (square * tw.sqrt(square))
            fx += dx * scale
            fy += dy * scale
            fz += dz * scale
        tw.gpu_sync()
    force[i, 0] = fx
    force[i, 1] = fy
    force[i, 2] = fz


@case((2, 2, 2), (8, 4, 2), floats(6, 10, 18), zeros(6, 10, 18))
def seven_points(x: tw.Array, y: tw.Array):
    k = tw.block.x * 8 + tw.thread.x + 1
    j = tw.block.y * 4 + tw.thread.y + 1
    i = tw.block.z * 2 + tw.thread.z + 1
    if i < x.shape[0] - 1 and j < x.shape[1] - 1 and k < x.shape[2] - 1:
        y[i, j, k] = (
            x[i - 1, j, k] + x[i + 1, j, k] + x[i, j - 1, k] + x[i, j + 1, k] + x[i, j, k - 1] + x[i, j, k + 1] - 6.0 * x[i, j, k]
        )


@case((2, 2), (8, 8), lambda rng: (rng.random((16, 16)) < 0.4).astype(np.uint8), zeros(16, 16, dtype=np.uint8))
def game_of_life(x: tw.Array, y: tw.Array):
    j = tw.block.x * 8 + tw.thread.x
    i = tw.block.y * 8 + tw.thread.y
    alive = 0
    for a in range(-1, 2):
        for b in range(-1, 2):
            if a != 0 or b != 0:
                alive += tw.i32(x[(i + a + 16) % 16, (j + b + 16) % 16])
    if alive == 3 or (alive == 2 and x[i, j] == 1):
        y[i, j] = 1


@case(2, 32, lambda rng: np.arange(0, 65, dtype=np.int32) * 3, wholes(192, dtype=np.int32, low=0, high=40), wholes(192), wholes(40), zeros(64))
def sparse_rows(starts, columns, values, v, y):
    row = tw.gpu_thread_id()
    total = 0.0
    for k in range(starts[row], starts[row + 1]):
        total += values[k] * v[columns[k]]
    y[row] = total


@case(2, 32, wholes(64, 10, low=0, high=50), zeros(64, dtype=np.int32), wholes(5, 10, low=0, high=50))
def nearest_centre(x: tw.Array, y: tw.GpuBuffer[tw.i32], centres: tw.Array):
    i = tw.gpu_thread_id()
    best = tw.f32(1e30)
    for c in range(centres.shape[0]):
        distance = tw.f32(0.0)
        for k in range(x.shape[1]):
            d = x[i, k] - centres[c, k]
            distance += d * d
        if distance < best:
            best = distance
            y[i] = c


@case(1, 32, floats(64), zeros(64), zeros(64), ulp=64)
def fourier_transform(x, real, imaginary):
    """Radix 2, in shared memory."""
    t = tw.thread.x
    re = tw.shared(64, tw.f32)
    im = tw.shared(64, tw.f32)
    for half in range(2):
        k = t + half * 32
        turned = 0
        v = k
        for _ in range(6):
            turned = turned * 2 + v % 2
            v //= 2
        re[turned] = x[k]
        im[turned] = 0.0
    tw.gpu_sync()
    span = 1
    while span < 64:
        place = t % span
        a = (t // span) * 2 * span + place
        b = a + span
        angle = -3.14159265 * tw.f32(place) / tw.f32(span)
        wr = tw.cos(angle)
        wi = tw.sin(angle)
        br = re[b] * wr - im[b] * wi
        bi = re[b] * wi + im[b] * wr
        ar = re[a]
        ai = im[a]
        re[a] = ar + br
        im[a] = ai + bi
        re[b] = ar - br
        im[b] = ai - bi
        tw.gpu_sync()
        span *= 2
    for half in range(2):
        real[t + half * 32] = tw.round(re[t + half * 32] * 64.0)
        imaginary[t + half * 32] = tw.round(im[t + half * 32] * 64.0)


@case(4, 32, wholes(4, 32, low=0, high=20), zeros(4, 32), ulp=2)
def softmax_rows(x: tw.Array, y: tw.Array):
    t = tw.thread.x
    v = x[tw.block.x, t]
    largest = v
    for m in (16, 8, 4, 2, 1):
        largest = max(largest, tw.shuffle_xor(largest, m))
    e = tw.exp2(v - largest)
    total = e
    for m in (16, 8, 4, 2, 1):
        total += tw.shuffle_xor(total, m)
    y[tw.block.x, t] = e / total


@case(3, 64, wholes(3, 64), filled(2.0, 64), zeros(3, 64), ulp=2)
def layer_norm(x: tw.Array, gain: tw.GpuBuffer[tw.f32], y: tw.Array):
    t = tw.thread.x
    sums = tw.shared(64, tw.f32)
    squares = tw.shared(64, tw.f32)
    v = x[tw.block.x, t]
    sums[t] = v
    squares[t] = v * v
    tw.gpu_sync()
    step = 32
    while step > 0:
        if t < step:
            sums[t] += sums[t + step]
            squares[t] += squares[t + step]
        tw.gpu_sync()
        step //= 2
    mean = sums[0] / 64
    spread = squares[0] / 64 - mean * mean
    y[tw.block.x, t] = (v - mean) / tw.sqrt(spread + 0.001) * gain[t]


@case((2, 2), (16, 8), floats(16, 32, low=0, high=255), zeros(16, 32))
def edges_of_an_image(x: tw.Array, y: tw.Array):
    j = tw.block.x * 16 + tw.thread.x
    i = tw.block.y * 8 + tw.thread.y
    if i < 1 or j < 1 or i >= x.shape[0] - 1 or j >= x.shape[1] - 1:
        return
    gx = x[i - 1, j + 1] + 2.0 * x[i, j + 1] + x[i + 1, j + 1] - x[i - 1, j - 1] - 2.0 * x[i, j - 1] - x[i + 1, j - 1]
    gy = x[i + 1, j - 1] + 2.0 * x[i + 1, j] + x[i + 1, j + 1] - x[i - 1, j - 1] - 2.0 * x[i - 1, j] - x[i - 1, j + 1]
    y[i, j] = tw.sqrt(gx * gx + gy * gy)


@case((2, 2), (8, 8), wholes(16, 16), wholes(3, 3), zeros(16, 16))
def blurred_with_clamped_borders(x: tw.Array, weights: tw.Array, y: tw.Array):
    j = tw.block.x * 8 + tw.thread.x
    i = tw.block.y * 8 + tw.thread.y
    total = 0.0
    for a in range(3):
        for b in range(3):
            r = min(max(i + a - 1, 0), x.shape[0] - 1)
            c = min(max(j + b - 1, 0), x.shape[1] - 1)
            total += x[r, c] * weights[a, b]
    y[i, j] = total


@case(1, 24, lambda rng: rng.integers(1, 99, (24, 24)).astype(np.int32))
def shortest_paths(d: tw.Array):
    """Floyd and Warshall, one row for each thread."""
    i = tw.thread.x
    for k in range(24):
        for j in range(24):
            through = d[i, k] + d[k, j]
            if i != k and through < d[i, j]:
                d[i, j] = through
        tw.gpu_sync()


@case(1, 32, wholes(30, dtype=np.int32, low=0, high=4), wholes(26, dtype=np.int32, low=0, high=4), zeros(1, dtype=np.int32))
def edit_distance(a, b, out):
    """Diagonal by diagonal."""
    t = tw.thread.x
    rows = tw.shared((3, 32), tw.i32)
    m = 26
    n = 30
    for diagonal in range(m + n + 1):
        now = diagonal % 3
        i = t
        j = diagonal - t
        if i <= m and j >= 0 and j <= n:
            if i == 0:
                rows[now, t] = j
            elif j == 0:
                rows[now, t] = i
            else:
                cost = 0 if b[i - 1] == a[j - 1] else 1
                best = rows[(diagonal + 1) % 3, t - 1] + cost
                best = min(best, rows[(diagonal + 2) % 3, t - 1] + 1)
                best = min(best, rows[(diagonal + 2) % 3, t] + 1)
                rows[now, t] = best
        tw.gpu_sync()
    if t == m:
        out[0] = rows[(m + n) % 3, m]


@case(1, 16, lambda rng: rng.integers(1, 9, (16, 16)).astype(np.float64) + 40 * np.eye(16))
def elimination(a: tw.Array):
    t = tw.thread.x
    for k in range(15):
        if t > k:
            factor = a[t, k] / a[k, k]
            for j in range(k, 16):
                a[t, j] = a[t, j] - factor * a[k, j]
        tw.gpu_sync()


@case(2, 32, wholes(64, dtype=np.uint32, low=1, high=1 << 31), zeros(1, dtype=np.int32))
def points_in_a_circle(seeds, hits):
    i = tw.gpu_thread_id()
    state = seeds[i]
    inside = 0
    for _ in range(16):
        state = state * 1664525 + 1013904223
        x = tw.f32(state >> 8) / 16777216.0
        state = state * 1664525 + 1013904223
        y = tw.f32(state >> 8) / 16777216.0
        if x * x + y * y <= 1.0:
            inside += 1
    tw.atomic_add(hits, 0, inside)


@case(2, 32, wholes(64), zeros(64))
def heat_with_steps_in_shared_memory(x, y):
    t = tw.thread.x
    s = tw.shared(34, tw.f32)
    s[t + 1] = x[tw.gpu_thread_id()]
    if t == 0:
        s[0] = 0.0
        s[33] = 0.0
    tw.gpu_sync()
    for _ in range(5):
        v = s[t + 1] + 0.25 * (s[t] - 2.0 * s[t + 1] + s[t + 2])
        tw.gpu_sync()
        s[t + 1] = v
        tw.gpu_sync()
    y[tw.gpu_thread_id()] = s[t + 1]


@case(1, 64, wholes(64, dtype=np.int32, low=0, high=16), zeros(64, dtype=np.int32))
def radix_sort(x, y):
    """Four passes of one bit, each a split by a scan."""
    t = tw.thread.x
    values = tw.shared(64, tw.i32)
    sums = tw.shared(64, tw.i32)
    values[t] = x[t]
    tw.gpu_sync()
    for bit in range(4):
        v = values[t]
        one = (v >> bit) & 1
        sums[t] = 1 - one
        tw.gpu_sync()
        for k in range(6):
            d = 1 << k
            before = sums[t - d] if t >= d else 0
            tw.gpu_sync()
            sums[t] += before
            tw.gpu_sync()
        zeros_before = sums[t] - (1 - one)
        total = sums[63]
        place = zeros_before if one == 0 else total + t - zeros_before
        values[place] = v
        tw.gpu_sync()
    y[t] = values[t]


@case(1, 32, lambda rng: np.sort(rng.integers(0, 99, 32)).astype(np.int32), lambda rng: np.sort(rng.integers(0, 99, 32)).astype(np.int32), zeros(64, dtype=np.int32))
def merge_by_rank(a, b, out):
    t = tw.thread.x
    low = 0
    high = 32
    while low < high:
        middle = (low + high) // 2
        if b[middle] < a[t]:
            low = middle + 1
        else:
            high = middle
    out[t + low] = a[t]
    low = 0
    high = 32
    while low < high:
        middle = (low + high) // 2
        if a[middle] <= b[t]:
            low = middle + 1
        else:
            high = middle
    out[t + low] = b[t]


@case(2, 32, floats(64, 3), floats(64, 3), zeros(64))
def rays_and_a_sphere(origin: tw.Array, direction: tw.Array, distance: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    a = tw.f32(0.0)
    b = tw.f32(0.0)
    c = tw.f32(-4.0)
    for k in range(3):
        a += direction[i, k] * direction[i, k]
        b += 2.0 * origin[i, k] * direction[i, k]
        c += origin[i, k] * origin[i, k]
    under = b * b - 4.0 * a * c
    if under < 0.0:
        distance[i] = -1.0
    else:
        near = (-b - tw.sqrt(under)) / (2.0 * a)
        distance[i] = near if near > 0.0 else (-b + tw.sqrt(under)) / (2.0 * a)


@case(2, 32, lambda rng: np.array([0] + [99] * 63, np.int32), wholes(64, 3, dtype=np.int32, low=0, high=64), zeros(64, dtype=np.int32))
def one_step_of_a_search(level, neighbours: tw.Array, reached):
    i = tw.gpu_thread_id()
    if level[i] == 0:
        for k in range(3):
            tw.atomic_max(reached, neighbours[i, k], 1)


@case(2, (8, 8), wholes(16, 8), zeros(16, 8), ulp=16)
def cosine_transform(x: tw.Array, y: tw.Array):
    """Of tiles of eight by eight."""
    tx = tw.thread.x
    ty = tw.thread.y
    rows = tw.shared((8, 8), tw.f32)
    tile = tw.shared((8, 8), tw.f32)
    tile[ty, tx] = x[tw.block.x * 8 + ty, tx]
    tw.gpu_sync()
    total = tw.f32(0.0)
    for k in range(8):
        total += tile[ty, k] * tw.cos(3.14159265 / 16.0 * tw.f32((2 * k + 1) * tx))
    rows[ty, tx] = total
    tw.gpu_sync()
    total = tw.f32(0.0)
    for k in range(8):
        total += rows[k, tx] * tw.cos(3.14159265 / 16.0 * tw.f32((2 * k + 1) * ty))
    y[tw.block.x * 8 + ty, tx] = tw.round(total * 16.0)


@case(2, 64, wholes(128, dtype=np.int32, low=0, high=30), zeros(128, dtype=np.int32), zeros(2, dtype=np.int32))
def run_starts(x, starts, count):
    """Where runs of equal numbers begin, counted in each block."""
    t = tw.thread.x
    i = tw.gpu_thread_id()
    total = tw.shared(1, tw.i32)
    if t == 0:
        total[0] = 0
    tw.gpu_sync()
    if i == 0 or x[i] // 3 != x[i - 1] // 3:
        starts[i] = 1
        tw.atomic_add(total, 0, 1)
    tw.gpu_sync()
    if t == 0:
        count[tw.block.x] = total[0]


@case((2, 2), (16, 16), wholes(32, 32), wholes(32, 32), wholes(32, 32), zeros(32, 32))
def matmul_with_an_epilogue(a: tw.Array, b: tw.Array, c: tw.Array, out: tw.Array):
    left = tw.shared((2, 16, 16), tw.f32)
    right = tw.shared((2, 16, 16), tw.f32)
    tx = tw.thread.x
    ty = tw.thread.y
    i = tw.block.y * 16 + ty
    j = tw.block.x * 16 + tx
    left[0, ty, tx] = a[i, tx]
    right[0, ty, tx] = b[ty, j]
    tw.gpu_sync()
    total = tw.f32(0.0)
    for step in range(2):
        now = step % 2
        if step + 1 < 2:
            left[1 - now, ty, tx] = a[i, (step + 1) * 16 + tx]
            right[1 - now, ty, tx] = b[(step + 1) * 16 + ty, j]
        for k in range(16):
            total += left[now, ty, k] * right[now, k, tx]
        tw.gpu_sync()
    out[i, j] = max(total + c[i, j], 0.0)
