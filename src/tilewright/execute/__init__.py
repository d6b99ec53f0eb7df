"""Calls. In: a kernel and the arguments of a call. Out: results, on any device, through one protocol.

`calls/` is one call of a kernel, `simt/` one launch of an explicit kernel. The files here are what stands around calls: kernels, arrays,
devices and their kinds, streams, graphs, transfers, tuning.
"""
