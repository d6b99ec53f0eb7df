"""The same kernels in CUDA C++, built with nvcc where it is there (else with NVRTC), for the benchmarks of explicit kernels.

In: nothing. Out: CuPy functions by name. The algorithms are those of `examples/simt`, with `int` indices and `__restrict__`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = r"""
extern "C" __global__ void transpose(const float* __restrict__ x, float* __restrict__ out, int rows, int columns) {
    __shared__ float tile[32][33];
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
    #pragma unroll
    for (int k = 0; k < 32; k += 8)
        if (row + k < rows && column < columns) tile[threadIdx.y + k][threadIdx.x] = x[(long long)(row + k) * columns + column];
    __syncthreads();
    column = blockIdx.y * 32 + threadIdx.x; row = blockIdx.x * 32 + threadIdx.y;
    #pragma unroll
    for (int k = 0; k < 32; k += 8)
        if (row + k < columns && column < rows) out[(long long)(row + k) * rows + column] = tile[threadIdx.x][threadIdx.y + k];
}

extern "C" __global__ void heat(const float* __restrict__ t, float* __restrict__ out, float rate, int depth, int rows, int columns) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x >= columns || y >= rows || z >= depth) return;
    long long plane = (long long)rows * columns, at = z * plane + (long long)y * columns + x;
    float here = t[at];
    if (x == 0 || y == 0 || z == 0 || x == columns - 1 || y == rows - 1 || z == depth - 1) { out[at] = here; return; }
    float around = t[at - 1] + t[at + 1] + t[at - columns] + t[at + columns] + t[at - plane] + t[at + plane];
    out[at] = here + rate * (around - 6 * here);
}

extern "C" __global__ void accelerations(const float4* __restrict__ place, float* __restrict__ out, int n) {
    __shared__ float4 tile[256];
    int i = blockIdx.x * 256 + threadIdx.x, t = threadIdx.x;
    float4 mine = place[min(i, n - 1)];
    float ax = 0, ay = 0, az = 0;
    for (int first = 0; first < n; first += 256) {
        float4 other = place[min(first + t, n - 1)];
        if (first + t >= n) other.w = 0;
        tile[t] = other;
        __syncthreads();
        for (int k = 0; k < 256; k++) {
            float dx = tile[k].x - mine.x, dy = tile[k].y - mine.y, dz = tile[k].z - mine.z;
            float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + 1e-3f);
            float pull = tile[k].w * inverse * inverse * inverse;
            ax += dx * pull; ay += dy * pull; az += dz * pull;
        }
        __syncthreads();
    }
    if (i < n) { out[3 * i] = ax; out[3 * i + 1] = ay; out[3 * i + 2] = az; }
}

extern "C" __global__ void mandelbrot(int* __restrict__ out, int rows, int columns, float left, float top, float step, int limit) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column >= columns || row >= rows) return;
    float cx = left + step * column, cy = top + step * row, x = 0, y = 0;
    int count = 0;
    while (count < limit && x * x + y * y <= 4.0f) {
        float next = x * x - y * y + cx;
        y = 2.0f * x * y + cy;
        x = next;
        count++;
    }
    out[(long long)row * columns + column] = count;
}

extern "C" __global__ void matmul(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ out,
                                  int rows, int depth, int columns) {
    __shared__ float left[32][32], right[32][32];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * 32 + ty, column = blockIdx.x * 32 + tx;
    float total = 0;
    for (int first = 0; first < depth; first += 32) {
        left[ty][tx] = row < rows && first + tx < depth ? a[(long long)row * depth + first + tx] : 0.0f;
        right[ty][tx] = first + ty < depth && column < columns ? b[(long long)(first + ty) * columns + column] : 0.0f;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < 32; k++) total += left[ty][k] * right[k][tx];
        __syncthreads();
    }
    if (row < rows && column < columns) out[(long long)row * columns + column] = total;
}
"""


def nvcc() -> str | None:
    """NVIDIA's compiler: on the path, where CUDA is installed, or in a wheel."""
    found = shutil.which("nvcc")
    places = [*sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)]
    places += [path for folder in sys.path for path in Path(folder or ".").glob("nvidia/*/bin/nvcc")]
    return found or next((str(path) for path in places), None)


def cubin(arch: str = "sm_90a") -> bytes | None:
    """All kernels as nvcc -O3 makes them; None where there is no nvcc, or no host compiler for it."""
    compiler = nvcc()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        source.write_text(SOURCE)
        command = [compiler, f"-arch={arch}", "-O3", "-cubin", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return made.read_bytes() if done.returncode == 0 else None


@cache
def module(arch: str = "sm_90a") -> tuple[str, Any]:
    """How the kernels were built, and the CuPy module that has them."""
    import cupy

    made = cubin(arch)
    if made is None:
        return "nvrtc", cupy.RawModule(code=SOURCE, options=("-std=c++17",), backend="nvrtc")
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(made)
    return "nvcc", cupy.RawModule(path=file.name)
