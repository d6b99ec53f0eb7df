"""A decoder that writes text: `tw.models.load("model.gguf")`.

In: an open model file and a description of its architecture. Out: a `LanguageModel`: text, ids and logits. Nothing is compiled before it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.errors import UserError, public
from tilewright.execute.devices import Device
from tilewright.graphs.tensor import Tensor
from tilewright.models import tokenizers
from tilewright.models.batch import MOST, STOPS, BatchGenerator
from tilewright.models.config import read_shape
from tilewright.models.fields import ModelFields
from tilewright.models.formats.model_file import ModelFile
from tilewright.models.generation import ENGINES, GenerationStats, SamplingSettings, TextGenerator
from tilewright.models.network import Network
from tilewright.models.weights import ModelWeights, checked_cache

Describe = Callable[[Network, Tensor, Tensor], Tensor]
LONGEST = 4096
"""The context where none is asked for, if the model has as much."""


class LanguageModel:
    """A decoder on a device."""

    def __init__(self, file: ModelFile, fields: ModelFields, weights: ModelWeights, describe: Describe, place: Device, context: int | None = None, cache: Any = None, activations: str | None = None) -> None:
        start = time.perf_counter()
        self.file, self.fields, self.weights, self.place = file, fields, weights, place
        self.architecture, self.device = fields.name, place.id
        self.shape = read_shape(fields)
        self.context = self._context(context)
        self.cache_dtype = checked_cache(cache, place)
        if activations not in (None, "exact", "q8"):
            raise UserError.at("TW016", f"activations={activations!r}", help='give "q8" or "exact"')
        self.activations = activations or ("q8" if place.kind == "cpu" else "exact")
        """`q8`: what packed weights are multiplied with is rounded to eight bits, block by block."""
        self.words = self._words()
        self.generator = TextGenerator(self._network, describe, place, self.context, self.cache_dtype)
        self._batches: dict[int, BatchGenerator] = {}
        """By how many texts are made at once."""
        describe_once(self._network(1), describe)  # missing weights and wrong shapes are errors of the load
        self.load_seconds = time.perf_counter() - start

    def _context(self, context: int | None) -> int:
        most = self.shape.context
        if context is None:
            return min(most, LONGEST)
        if isinstance(context, bool) or not isinstance(context, int) or context < 1:
            raise UserError.at("TW009", f"context is {context!r}", help="give the number of tokens that a text may have")
        if context > most:
            raise UserError.at("TW013", f"context is {context}, and the model knows {most} positions", help=f"give at most {most}")
        return context

    def _words(self) -> int:
        entry = self.weights("token_embd.weight")
        if entry is None:
            raise UserError.at("TW008", f"{self.fields.where}: the tensor 'token_embd.weight' is missing")
        return int(entry.shape[0])

    def _network(self, tokens: int) -> Network:
        return Network(self.architecture, self.fields, self.shape, self.weights, tokens, self.cache_dtype, "q8" if self.activations == "q8" else "", self.place.kind == "cpu")

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.from_model(self.file)

    @property
    def stats(self) -> GenerationStats:
        """Of the latest generation."""
        return self.generator.stats

    # -- what users call ----------------------------------------------------------------------------------------

    @public
    def generate(self, prompt: str | Sequence[int], tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, special: bool = False, engine: str = "graph") -> Iterator[str]:
        """Pieces of the text that follows a prompt, as they are made; it ends with the model's own end, or after so many tokens.

        The prompt is text, or ids of tokens. `special=True`: texts of control tokens in the prompt stand for these. Without a temperature the best token is chosen
        each time; with one it is drawn: from the `top_k` best, and of those from the likeliest that have `top_p` of the probability.
        `engine` runs the steps: `graph` as a captured graph, `mega` as one persistent kernel (on a CPU as tasks on threads), `auto` as whichever is faster here.
        """
        ids = self.generate_ids(prompt, tokens, temperature, top_k, top_p, seed, special, engine)
        return (piece for piece in self.tokenizer.pieces(ids) if piece)

    @public
    def generate_ids(self, prompt: str | Sequence[int], tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, special: bool = False, engine: str = "graph") -> Iterator[int]:
        """The same, as ids of tokens; the end token is not among them."""
        settings = SamplingSettings(temperature, min(top_k, self.words) if isinstance(top_k, int) else top_k, top_p, seed)
        settings.check()
        if engine not in ENGINES:
            raise UserError.at("TW016", f"engine={engine!r}", help=f"give {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
        ids = self._prompt(prompt, tokens, special)
        return self._until_end(self.generator.tokens(ids, min(tokens, self.context - len(ids) + 1), settings, engine), not isinstance(prompt, str))

    def _prompt(self, prompt: str | Sequence[int], tokens: int, special: bool) -> list[int]:
        """The ids of a prompt that is to be followed by so many tokens."""
        ids = self.tokenizer.encode(prompt, special=special) if isinstance(prompt, str) else list(self.checked(prompt))
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise UserError.at("TW009", f"tokens is {tokens!r}", help="give how many tokens to make, at most")
        if not ids:
            raise UserError.at("TW009", "the prompt is empty", help="give a text, or ids of tokens")
        if len(ids) > self.context:
            raise UserError.at("TW013", f"the prompt has {len(ids)} tokens, and the context {self.context}", help=f"load the model with context={len(ids) + tokens}" if len(ids) <= self.shape.context else f"the model knows {self.shape.context} positions: give a shorter prompt")
        return ids

    @public
    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], tokens: int | Sequence[int] = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, special: bool = False,
        engine: str = "graph",
    ) -> list[str]:  # fmt: skip
        """The texts that follow up to eight prompts, made side by side: a step reads the weights once for all of them. Text n is what `generate` gives for prompt n with the seed `seed + n`.

        `tokens` is how many tokens each text has at most, or a number for each. The other settings are those of `generate`; so is `engine`: `auto` measures steps of so many sequences.
        """
        found = self.generate_batch_ids(prompts, tokens, temperature, top_k, top_p, seed, special, engine)
        return ["".join(piece for piece in self.tokenizer.pieces(iter(ids)) if piece) for ids in found]

    def generate_batch_ids(
        self, prompts: Sequence[str | Sequence[int]], tokens: int | Sequence[int] = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, special: bool = False,
        engine: str = "graph",
    ) -> list[list[int]]:  # fmt: skip
        """The same, as ids of tokens; end tokens are not among them."""
        if isinstance(prompts, str) or not 1 <= len(prompts) <= MOST:
            raise UserError.at("TW009", f"{'a text' if isinstance(prompts, str) else f'{len(prompts)} prompts'} for a batch", help=f"give a list of 1 to {MOST} prompts")
        if engine not in ENGINES:
            raise UserError.at("TW016", f"engine={engine!r} for a batch", help=f"give {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
        wanted = [tokens] * len(prompts) if isinstance(tokens, int) else list(tokens)
        if len(wanted) != len(prompts):
            raise UserError.at("TW009", f"tokens has {len(wanted)} numbers, for {len(prompts)} prompts", help="give one number, or one for each prompt")
        settings = SamplingSettings(temperature, min(top_k, self.words) if isinstance(top_k, int) else top_k, top_p, seed)
        settings.check()
        ids = [self._prompt(prompt, count, special) for prompt, count in zip(prompts, wanted, strict=True)]
        counts = [min(count, self.context - len(own) + 1) for count, own in zip(wanted, ids, strict=True)]
        stops = self._ends(not any(isinstance(prompt, str) for prompt in prompts))
        if len(stops) > STOPS:
            raise UserError.at("TW020", f"the model has {len(stops)} tokens that end a text, and a batch knows {STOPS}", help="generate one text at a time")
        batch = self._batches.setdefault(len(prompts), BatchGenerator(self.generator, len(prompts)))
        found = batch.run(ids, counts, settings, stops, engine)
        self.generator.stats = batch.stats
        return [own[:-1] if own and own[-1] in stops else own for own in found]

    def _ends(self, is_raw: bool) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset() if is_raw and not self.has_tokenizer else frozenset(self.tokenizer.eot)

    def _until_end(self, ids: Iterator[int], is_raw: bool) -> Iterator[int]:
        ends = self._ends(is_raw)
        for token in ids:
            if token in ends:
                return
            yield token

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.model" in self.file.metadata if self.file.kind == "gguf" else (self.file.path / "tokenizer.json").exists()

    def checked(self, ids: Iterable[int]) -> list[int]:
        """Ids that the model has."""
        found: list[int] = []
        for number, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise UserError.at("TW009", f"token {number} is {token!r}", help="ids are whole numbers")
            if not 0 <= int(token) < self.words:
                raise UserError.at("TW013", f"token {number} is {int(token)}, and the model has ids up to {self.words - 1}")
            found.append(int(token))
        return found

    @public
    def logits(self, tokens: str | Sequence[int]) -> np.ndarray:
        """What the model expects after each token: [token, word], f32, on the host."""
        ids = self.tokenizer.encode(tokens) if isinstance(tokens, str) else self.checked(tokens)
        if len(ids) > self.context:
            raise UserError.at("TW013", f"{len(ids)} tokens, and the context is {self.context}", help=f"load the model with context={len(ids)}")
        return self.generator.scores(ids, self.words)

    @public
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        raise UserError.at("TW005", f"a model of the architecture '{self.architecture}' writes text, and embeds none", help="embed with an encoder: bert")

    def __repr__(self) -> str:
        return f"<{self.architecture} of {self.file.path.name}: {self.shape.layers} layers, {self.shape.width} wide, context {self.context}, on {self.device}>"


def describe_once(net: Network, describe: Describe) -> None:
    """Build the network without running it."""
    from tilewright.base.dtypes import i32

    describe(net, net.graph.input("ids", (net.tokens,), i32), net.graph.input("position", (1,), i32))
