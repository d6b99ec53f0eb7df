"""Rules of ONNX operators, by family. Importing this package registers all of them."""

from tilewright.graphs.onnx.operators import (
    convolutions,
    elementwise,
    indexing,
    matrices,
    movement,
    normalisations,
    pooling,
    quantisation,
    recurrent,
    reductions,
    resizing,
    shapes,
)  # fmt: skip

FAMILIES = (
    convolutions, elementwise, indexing, matrices, movement, normalisations, pooling, quantisation, recurrent, reductions, resizing, shapes,
)  # fmt: skip
"""The modules with rules."""
