"""`tilewright generate`, `chat` and `embed`: text and vectors from model files. Text goes to stdout as it is made, all else to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from tilewright import models
from tilewright.base.errors import UserError
from tilewright.models.chat import chat_form, chat_prompt
from tilewright.models.encoder import SentenceEncoder
from tilewright.models.language_model import LanguageModel

Options = dict[str, Any]


@contextmanager
def _loading(path: str) -> Iterator[Any]:
    """A bar while weights go to the device, on a terminal."""
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {Path(path).name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _decoder(path: str, device: str, context: int | None, activations: str | None, cache: str | None) -> LanguageModel:
    with _loading(path) as progress:
        model = models.load(path, device, context=context, activations=activations, cache=cache, progress=progress)
    if not isinstance(model, LanguageModel):
        raise UserError.at("TW016", f"{Path(path).name} is an encoder (architecture '{model.architecture}'): it writes no text", help="tilewright embed gives vectors")
    return model


def generate(path: str, prompt: str, tokens: int, stats: bool, load: Options, sampling: Options) -> None:
    """Print what follows the prompt."""
    start = time.perf_counter()
    model = _decoder(path, **load)
    loaded = time.perf_counter() - start
    for piece in model.generate(sys.stdin.read() if prompt == "-" else prompt, tokens, **sampling):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
    _say(model, loaded, stats)


def chat(path: str, tokens: int, stats: bool, load: Options, sampling: Options) -> None:
    """A conversation; an empty line or the end of the input ends it."""
    start = time.perf_counter()
    model = _decoder(path, **load)
    loaded = time.perf_counter() - start
    chat_form(model.tokenizer)
    turns: list[tuple[str, str]] = []
    while True:
        click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line.strip():
            break
        turns.append(("user", line.strip()))
        said: list[str] = []
        for piece in model.generate(chat_prompt(model.tokenizer, turns), tokens, special=True, **sampling):
            click.echo(piece, nl=False)
            sys.stdout.flush()
            said.append(piece)
        click.echo()
        turns.append(("model", "".join(said).strip()))
        _say(model, loaded, stats)


def _say(model: LanguageModel, loaded: float, more: bool) -> None:
    s = model.stats
    click.echo(f"prompt: {s.prompt_tokens} tokens, {s.prompt_rate:.1f} a second; text: {s.tokens} tokens, {s.rate:.1f} a second", err=True)
    if not more:
        return
    rounded = "rounded to eight bits for packed weights (--activations exact does not)" if model.activations == "q8" else "exact (f32)"
    click.echo(f"{model.architecture}, {model.shape.layers} layers on {model.device}; context {model.context}; activations {rounded}; caches {model.cache_dtype}, {model.generator.cache_bytes(model.generator.room):,} bytes; weights {model.file.nbytes:,} bytes", err=True)
    measured = f" (measured: {', '.join(f'{name} {seconds * 1e3:.3f} ms' for name, seconds in s.measured.items())} a step)" if s.measured else ""
    click.echo(f"steps by the engine '{s.engine}'{measured}", err=True)
    click.echo(f"loaded in {loaded:.2f} s; first token {s.first_token_seconds:.2f} s after the prompt was given; {s.reused_tokens} tokens of the prompt were in the caches", err=True)


def embed(path: str, texts: tuple[str, ...], device: str, out: str | None, stats: bool) -> None:
    """Print a vector for each text, or keep them as .npy."""
    start = time.perf_counter()
    with _loading(path) as progress:
        model = models.load(path, device, progress=progress)
    if not isinstance(model, SentenceEncoder):
        raise UserError.at("TW016", f"{Path(path).name} is a decoder (architecture '{model.architecture}'): it embeds nothing", help="tilewright generate writes text")
    loaded = time.perf_counter()
    vectors = model.embed(texts)
    done = time.perf_counter()
    if out is not None:
        np.save(out, vectors)
        click.echo(f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]}", err=True)
    else:
        for vector in vectors:
            click.echo(" ".join(f"{value:.6g}" for value in vector))
    if stats:
        click.echo(f"{model.architecture}, {model.shape.layers} layers on {model.device}, pooling {model.pooling}; loaded in {loaded - start:.2f} s, embedded in {done - loaded:.2f} s", err=True)
