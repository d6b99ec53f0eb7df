"""An encoder of sentences: `tw.models.load(folder).embed(["a text", …])`.

In: an open model file of the architecture bert. Out: a `SentenceEncoder`: one vector for each text. Sentences of a call are filled up to a common length; what is filled up is
not looked at. Vectors are the mean of the last hidden rows, or the first of them, as the file says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.dtypes import f32, i32
from tilewright.base.errors import UserError
from tilewright.execute.devices import Device
from tilewright.execute.kernel import kernel
from tilewright.frontend import words as tw
from tilewright.graphs.captured import CapturedStep
from tilewright.graphs.registry import OpRecord, TensorType, add_op
from tilewright.models import tokenizers
from tilewright.models.architectures.bert import bert
from tilewright.models.config import read_shape
from tilewright.models.fields import ModelFields
from tilewright.models.formats.model_file import ModelFile
from tilewright.models.network import Network
from tilewright.models.weights import ModelWeights, checked_cache

BATCH = 32
"""Texts that are computed at once."""
STEP = 16
"""Lengths are rounded up to multiples of it, so that few programs serve all texts."""


@kernel
def pool_mean(x: tw.Array, lengths: tw.Array) -> tw.Array:
    """The mean of the rows that count."""
    sentences, tokens, width = x.shape
    out = tw.empty((sentences, width), x.dtype)
    for s, d in tw.grid(sentences, width):
        total = 0.0
        for t in range(tokens):
            if t < lengths[s]:
                total += x[s, t, d]
        out[s, d] = total / tw.cast(lengths[s], f32)
    return out


@kernel
def unit_rows(x: tw.Array) -> tw.Array:
    """Rows divided by their length."""
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(columns):
            total += x[i, j] * x[i, j]
        length = tw.sqrt(total)
        for j in range(columns):
            out[i, j] = x[i, j] / max(length, 1e-12)
    return out


add_op(OpRecord("PoolMean", ("x", "lengths"), lambda call: TensorType((call["x"].sizes[0], call["x"].sizes[2]), call["x"].dtype), pool_mean, doc="the mean of the rows of each sentence that count"))
add_op(OpRecord("UnitRows", ("x",), lambda call: TensorType(call["x"].sizes, call["x"].dtype), unit_rows, doc="rows divided by their length"))


class SentenceEncoder:
    """An encoder on a device."""

    def __init__(self, file: ModelFile, fields: ModelFields, weights: ModelWeights, place: Device, cache: Any = None) -> None:
        start = time.perf_counter()
        self.file, self.fields, self.weights, self.place = file, fields, weights, place
        self.architecture, self.device = fields.name, place.id
        self.shape = read_shape(fields)
        self.cache_dtype = checked_cache(f32 if cache is None else cache, place)
        """What queries, keys and values are rounded to."""
        self.pooling = self._pooling()
        net = self._network()
        self.words = net.rows("token_embd.weight")
        self.context = min(self.shape.context, net.rows("position_embd.weight"))
        self._build(net, 1, 1)
        self._steps: dict[tuple[int, int, bool], CapturedStep] = {}
        self.load_seconds = time.perf_counter() - start

    def _pooling(self) -> str:
        if self.file.kind == "gguf":
            kind = self.fields.whole("pooling_type", 1, least=0)
            known = {0: "mean", 1: "mean", 2: "cls"}
            if kind not in known:
                raise UserError.at("TW005", f"{self.fields.where}: '{self.fields.shown('pooling_type')}' is {kind}", help="1 (mean) and 2 (cls) are known")
            return known[kind]
        path = self.file.path / "1_Pooling" / "config.json"
        if not path.is_file():
            return "mean"
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise UserError.at("TW007", f"'{path}' cannot be read: {error}") from None
        if said.get("pooling_mode_cls_token"):
            return "cls"
        if said.get("pooling_mode_mean_tokens", True):
            return "mean"
        raise UserError.at("TW005", f"'{path}' asks for a pooling other than the mean and the first token")

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.from_model(self.file)

    def _network(self) -> Network:
        return Network(self.architecture, self.fields, self.shape, self.weights, "tokens", self.cache_dtype)

    def _build(self, net: Network, sentences: int, tokens: int, normalise: bool = True) -> Network:
        g = net.graph
        ids, lengths = g.input("ids", (sentences, tokens), i32), g.input("lengths", (sentences,), i32)
        rows = bert(net, ids, net.constant("places", np.arange(tokens, dtype=np.int32)), lengths)
        pooled = g.op("PoolMean", rows, lengths) if self.pooling == "mean" else rows[:, 0]
        g.output("vectors", g.op("UnitRows", pooled) if normalise else pooled if self.pooling == "mean" else g.op("Copy", pooled))
        return net

    def step(self, sentences: int, tokens: int, normalise: bool) -> CapturedStep:
        key = sentences, tokens, normalise
        if key not in self._steps:
            g = self._build(self._network(), *key).graph
            inputs: dict[str, Any] = {"ids": np.zeros((sentences, tokens), np.int32), "lengths": np.ones(sentences, np.int32)}
            self._steps[key] = g.capture(self.place.id, **inputs)
        return self._steps[key]

    def embed(self, texts: str | Sequence[str] | Sequence[Sequence[int]], normalize: bool = True) -> np.ndarray:
        """A vector for each text: [text, feature], f32, on the host; of length 1 unless told otherwise. Ids of tokens may stand for texts."""
        given: Any = [texts] if isinstance(texts, str) else list(texts)
        ids = [self.tokenizer.encode(text) if isinstance(text, str) else self._checked(text, number) for number, text in enumerate(given)]
        for number, own in enumerate(ids):
            if not own:
                raise UserError.at("TW009", f"text {number} is empty", help="give at least one token")
            if len(own) > self.context:
                raise UserError.at("TW013", f"text {number} has {len(own)} tokens, and the model knows {self.context} positions", help="give a shorter text, or cut it")
        out = np.empty((len(ids), self.shape.width), np.float32)
        for places in self._batches(ids):
            longest = max(len(ids[p]) for p in places)
            tokens = min(-(-longest // STEP) * STEP, self.context)
            padded, lengths = np.zeros((len(places), tokens), np.int32), np.empty(len(places), np.int32)
            for row, place in enumerate(places):
                padded[row, : len(ids[place])], lengths[row] = ids[place], len(ids[place])
            made = self.step(len(places), tokens, normalize)(ids=padded, lengths=lengths)
            out[places] = np.asarray(made if isinstance(made, np.ndarray) else made.to_host())
        return out

    def _checked(self, ids: Sequence[int], number: int) -> list[int]:
        bad = [t for t in ids if isinstance(t, bool) or not hasattr(t, "__index__") or not 0 <= int(t) < self.words]
        if bad:
            raise UserError.at("TW013", f"text {number} has the token {bad[0]!r}, and the model has ids up to {self.words - 1}")
        return [int(t) for t in ids]

    @staticmethod
    def _batches(ids: list[list[int]]) -> Iterator[list[int]]:
        """Texts of like lengths together."""
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        for start in range(0, len(order), BATCH):
            yield order[start : start + BATCH]

    def generate(self, prompt: str, **settings: Any) -> Any:
        raise UserError.at("TW005", f"a model of the architecture '{self.architecture}' embeds texts, and writes none", help=".embed(texts) gives vectors")

    def __repr__(self) -> str:
        return f"<{self.architecture} of {self.file.path.name}: {self.shape.layers} layers, {self.shape.width} wide, on {self.device}>"
