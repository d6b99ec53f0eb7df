"""`python -m tests.fuzz.fuzz_model_files [--kind gguf|folder] [--seconds N] [--start STEP]`: model files under rough treatment.

In: small files with tokenizers, and a random stream. Each step changes fields before a file is written, or bytes of it, then opens it, reads all metadata and
tensors, and encodes a text with the tokenizer it may hold. A `UserError` is right, and so is a result. Anything else is a failure, as is memory or time
that the file does not justify; it is printed with the step, which gives the same file again.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import tempfile
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from tilewright.base import dtypes
from tilewright.models import tokenizers
from tilewright.models.formats import model_file
from tilewright.models.formats.gguf import open_gguf
from tilewright.models.formats.model_file import ModelFile
from tilewright.models.formats.safetensors import open_folder

EDGES = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)
TEXT = "héllo wörld's 123\n\n  <s>日本 <|im_end|>\t"
MOST_SECONDS = 5.0
"""Of processor time, for one file."""


def text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def wide(value: int, width: int) -> bytes:
    return (value % (1 << 8 * width)).to_bytes(width, "little")


# -- GGUF -------------------------------------------------------------------------------------------------------------


def array(kind: int, values: list[Any]) -> tuple[int, bytes]:
    codes = {0: "B", 1: "b", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 12: "d"}
    body = b"".join(text(v) if kind == 8 else struct.pack("<" + codes[kind], v) for v in values)
    return 9, struct.pack("<IQ", kind, len(values)) + body


def keys(rng: random.Random) -> dict[str, tuple[int, bytes]]:
    """Metadata with a tokenizer of one of the kinds."""
    found = {"general.architecture": (8, text("llama")), "a.number": (4, struct.pack("<I", 7)), "a.numbers": array(6, [1.0, 2.0]), "general.alignment": (4, struct.pack("<I", 32))}
    words = ["<unk>", "<s>", "</s>", "<|im_end|>", "h", "▁", "e", "he", "Ġ", "l", "▁hel", "<0xC3>", "é", "", "日"]
    kind = rng.choice(["llama", "gpt2", "bert"])
    found["tokenizer.ggml.model"] = (8, text(kind))
    found["tokenizer.ggml.pre"] = (8, text(rng.choice(["default", "llama-bpe", "qwen2"])))
    found["tokenizer.ggml.tokens"] = array(8, words)
    found["tokenizer.ggml.scores"] = array(6, [rng.choice([0.0, -1.0, 5.0, float("nan"), float("inf")]) for _ in words])
    found["tokenizer.ggml.token_type"] = array(5, [rng.choice([1, 1, 2, 3, 4, 5, 6, 99, -1]) for _ in words])
    found["tokenizer.ggml.merges"] = array(8, ["h e", "l l", "", " ", "Ġ h", "h e"])
    found["tokenizer.ggml.bos_token_id"] = (4, struct.pack("<I", 1))
    found["tokenizer.ggml.unknown_token_id"] = (4, struct.pack("<I", 0))
    found["tokenizer.ggml.add_bos_token"] = (7, b"\1")
    return found


def gguf(rng: random.Random) -> bytes:
    """A file, more or less right."""

    def edge(value: int, chance: float = 0.02) -> int:
        return rng.choice(EDGES) if rng.random() < chance else value

    listed = list(keys(rng).items())
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(len(listed))
        name, (kind, body) = listed[at]
        listed[at] = rng.choice([(name, (rng.randrange(14), body)), (name, (kind, body[: rng.randrange(len(body) + 1)])), listed[rng.randrange(len(listed))], (name, (kind, mutated(body, rng)))])
    tensors, offset, data = [], 0, b""
    kinds = {0: (4, 1), 1: (2, 1), 2: (18, 32), 8: (34, 32), 12: (144, 256), 30: (2, 1), 27: (8, 1)}
    for number in range(rng.randrange(5)):
        kind = rng.choice(list(kinds))
        size, block = kinds[kind]
        dims = [block * rng.randrange(1, 3), *(rng.randrange(4) for _ in range(rng.randrange(3)))]
        nbytes = int(np.prod(dims)) // block * size
        dims = [edge(extent) for extent in dims]
        name: str | bytes = f"t{number}" if rng.random() < 0.97 else rng.choice(["t0", "", b"\xff", "x" * 70000])
        tensors.append(text(name) + wide(edge(len(dims)), 4) + b"".join(wide(d, 8) for d in dims) + wide(edge(kind), 4) + wide(edge(offset), 8))
        data += rng.randbytes(nbytes) + bytes(-nbytes % 32)
        offset += nbytes + -nbytes % 32
    head = rng.choice([b"GGUF"] * 60 + [b"FUGG", b"\0\0\0\0"]) + wide(edge(rng.choice([2, 3])), 4) + wide(edge(len(tensors)), 8) + wide(edge(len(listed)), 8)
    head += b"".join(text(name) + wide(edge(kind), 4) + body for name, (kind, body) in listed) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed, repeated or replaced by numbers at the edges."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(max(1, len(found)))
        kind = rng.randrange(7)
        if kind <= 1 and found:
            found[at] = rng.randrange(256)
        elif kind == 2 and found:
            found[at] = (found[at] + rng.choice([1, -1, 0x7F, 0x80])) % 256
        elif kind == 3:
            del found[at : at + rng.randrange(1, 9)]
        elif kind == 4:
            found[at:at] = found[at : at + rng.randrange(1, 33)]
        elif kind == 5:
            found[at : at + 8] = wide(rng.choice(EDGES), 8)
        else:
            found = found[:at]
    return bytes(found)


# -- folders ----------------------------------------------------------------------------------------------------------


def strange(rng: random.Random) -> Any:
    """A value of JSON that nobody expects."""
    return rng.choice([None, True, -1, 0, 1.5, 1 << 62, 1 << 64, "", "F32", "\0", "../x.safetensors", [], [1], {}, {"a": 1}, [[0]], "model.safetensors", 1e999])


def changed(value: Any, rng: random.Random) -> Any:
    """A value with one part replaced somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: changed(value[key], rng)} if rng.random() < 0.9 else {**value, rng.choice(["", "w0", "x"]): value[key]}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    return rng.choice(EDGES) if isinstance(value, int) and rng.random() < 0.7 else strange(rng)


def shard(arrays: dict[str, np.ndarray], rng: random.Random) -> bytes:
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int64): "I64", np.dtype(np.bool_): "BOOL"}
    header: Any = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in arrays.items():
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    if rng.random() < 0.4:
        header = changed(header, rng)
    raw = json.dumps(header).encode()
    length = rng.choice(EDGES) if rng.random() < 0.02 else len(raw)
    return wide(length, 8) + raw + data


def folder(place: Path, rng: random.Random) -> None:
    """A folder, more or less right."""
    files: dict[str, bytes] = {}
    count = rng.randrange(1, 4)
    weights: dict[str, Any] = {}
    for number in range(count):
        name = "model.safetensors" if count == 1 else f"model-{number}.safetensors"
        arrays = {f"w{number}{k}": np.ones([rng.randrange(4) for _ in range(rng.randrange(3))], rng.choice([np.float32, np.float16, np.int64, np.bool_])) for k in range(rng.randrange(3))}
        files[name] = shard(arrays, rng)
        weights |= dict.fromkeys(arrays, name)
    config: Any = {"model_type": "llama", "num_hidden_layers": 2, "rope_scaling": {"type": "linear", "factor": 2.0}}
    files["config.json"] = json.dumps(changed(config, rng) if rng.random() < 0.2 else config).encode()
    if count > 1 and rng.random() < 0.8:
        index: Any = {"metadata": {"total_size": 8}, "weight_map": weights}
        files["model.safetensors.index.json"] = json.dumps(changed(index, rng) if rng.random() < 0.4 else index).encode()
    if rng.random() < 0.4:
        name = rng.choice(list(files))
        files[name] = mutated(files[name], rng)
    if rng.random() < 0.05:
        del files[rng.choice(list(files))]
    for old in place.iterdir():
        old.unlink()
    for name, data in files.items():
        (place / name).write_bytes(data)


# -- steps ------------------------------------------------------------------------------------------------------------


def use(found: ModelFile) -> str:
    """Everything that a file offers."""
    for name, entry in found.tensors.items():
        value = found.array(name)
        assert tuple(value.shape) == entry.shape and value.nbytes == entry.nbytes
        np.asarray(value.blocks if isinstance(value, tw.PackedArray) else value).tobytes()
        assert entry.dtype in dtypes.ALL
    _ = dict(found.metadata)
    if found.kind == "gguf":
        tokenizer = tokenizers.from_gguf(found.metadata)
        for special in (False, True):
            ids = tokenizer.encode(TEXT, special=special)
            tokenizer.decode(ids, special=special)
            list(tokenizer.pieces(ids))
        for id in range(tokenizer.vocabulary_size):
            tokenizer.piece(id)
    return "read"


def attempt(kind: str, step: int, place: Path) -> str:
    """One step: what came of it, or a failure."""
    rng = random.Random(f"{kind} {step}")
    if kind == "gguf":
        data = gguf(rng)
        data = mutated(data, rng) if rng.random() < 0.4 else data
        path = place / "m.gguf"
        path.write_bytes(data)
        size = len(data)
    else:
        path = place
        folder(place, rng)
        size = sum(file.stat().st_size for file in place.iterdir())
    # Files are mapped in half of the steps.
    model_file.MAPPED_FROM = rng.choice([0, 1 << 26])
    is_traced = step % 8 == 0
    if is_traced:
        tracemalloc.start()
    began = time.process_time()
    try:
        outcome = use(open_gguf(path) if kind == "gguf" else open_folder(path))
    except tw.UserError as error:
        outcome = f"refused {error.code}" if str(error).isprintable() or "\n" in str(error) else f"FAILED a message that is not printable: {error!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = "FAILED " + traceback.format_exc()
    seconds = time.process_time() - began
    if is_traced:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if peak > 64 * size + (8 << 20):
            outcome = f"FAILED used {peak:,} bytes for a file of {size:,}"
    return f"FAILED took {seconds:.1f} s" if seconds > MOST_SECONDS and not outcome.startswith("FAILED") else outcome


def fuzz(kind: str, seconds: float, steps: int, start: int = 0) -> tuple[dict[str, int], list[str], int]:
    """Counts of what happened, failures, and the next step."""
    counts: dict[str, int] = {}
    failures: list[str] = []
    before = model_file.MAPPED_FROM
    end, step = time.monotonic() + seconds, start
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() < end and step < start + steps:
            outcome = attempt(kind, step, Path(scratch))
            key = outcome.split()[0] if outcome.startswith("FAILED") else outcome
            counts[key] = counts.get(key, 0) + 1
            if key == "FAILED":
                failures.append(f"{kind}, step {step}: {outcome}")
                print(failures[-1], flush=True)
            step += 1
    model_file.MAPPED_FROM = before
    return counts, failures, step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["gguf", "folder"], action="append")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    failed = False
    for kind in options.kind or ["gguf", "folder"]:
        counts, failures, step = fuzz(kind, options.seconds, 1 << 60, options.start)
        print(f"{kind}: steps {options.start} to {step}: " + ", ".join(f"{key} {count}" for key, count in sorted(counts.items())), flush=True)
        failed |= bool(failures)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
