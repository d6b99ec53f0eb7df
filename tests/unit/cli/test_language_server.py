"""The language server, spoken to as an editor does: JSON-RPC over the pipes of a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

pytest.importorskip("pygls")
ROOT = Path(__file__).parents[3]
PROGRAM = """\
// é and 𝄞: columns are UTF-16
fn twice(v):
    let doubled = v * 2
    return doubled

let product = compute(a, b) {
    @kernel matmul
    for i in 0..M, j in 0..N:
        var sum = 0.0
        for k in 0..K:
            sum += a[i, k] * b[k, j]
        out[i, j] = sum
}
let y = twice(product)
"""


class Client:
    """A language client that waits for what it asks for."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.cli.main", "lsp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ.copy()
        )
        self._inbox: Queue[dict[str, Any]] = Queue()
        self._number = 0
        self.notes: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while True:
            length = 0
            while (line := self.process.stdout.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if not length:
                return
            self._inbox.put(json.loads(self.process.stdout.read(length)))

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def notify(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def request(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._inbox.get(timeout=600)
            if message.get("id") == self._number and "method" not in message:
                assert "error" not in message, message
                return message["result"]
            self.notes.append(message)

    def diagnostics(self, uri: str, version: int | None = None) -> list[dict[str, Any]]:
        """The next messages about a document (those of that version)."""
        while True:
            for position, message in enumerate(self.notes):
                params = message.get("params", {})
                if (
                    message.get("method") == "textDocument/publishDiagnostics" and params["uri"] == uri
                    and version in (None, params.get("version"))
                ):  # fmt: skip
                    del self.notes[: position + 1]
                    found: list[dict[str, Any]] = params["diagnostics"]
                    return found
            self.notes.append(self._inbox.get(timeout=600))

    def silent(self, seconds: float) -> bool:
        try:
            self.notes.append(self._inbox.get(timeout=seconds))
        except Empty:
            return True
        return False

    def open(self, uri: str, text: str) -> list[dict[str, Any]]:
        self.notify("textDocument/didOpen", textDocument={"uri": uri, "languageId": "zyn", "version": 1, "text": text})
        return self.diagnostics(uri, 1)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    one = Client()
    try:
        answer = one.request("initialize", processId=os.getpid(), rootUri=None, capabilities={})
        assert answer["capabilities"]["hoverProvider"]
        one.notify("initialized")
        yield one
        one.request("shutdown")
        one.notify("exit")
        assert one.process.wait(timeout=20) == 0
    finally:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="module")
def uri(client: Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lsp") / "program.zyn"
    path.write_text(PROGRAM, encoding="utf-8")
    assert client.open(path.as_uri(), PROGRAM) == []
    return path.as_uri()


def at(text: str, needle: str, nth: int = 0) -> dict[str, int]:
    """The place of the nth occurrence of a piece of text."""
    start = -1
    for _ in range(nth + 1):
        start = text.index(needle, start + 1)
    line = text.count("\n", 0, start)
    column = start - (text.rfind("\n", 0, start) + 1)
    return {"line": line, "character": column}


def hover(client: Client, uri: str, needle: str, nth: int = 0) -> str:
    found = client.request("textDocument/hover", textDocument={"uri": uri}, position=at(PROGRAM, needle, nth))
    assert found is not None
    return str(found["contents"]["value"]).removeprefix("```zyn\n").removesuffix("\n```")


@pytest.mark.parametrize(
    ("needle", "nth", "text"),
    [
        ("a[i, k]", 0, "input a: f32[M, K]"),
        ("b[k, j]", 0, "input b: f32[K, N]"),
        ("sum +=", 0, "var sum: f32"),
        ("* b[k", 0, "a[i, k] * b[k, j]: f32"),
        ("out[i", 0, "output out: f32[M, N]"),
        ("k in", 0, "index k: index in 0..K - 1"),
        ("product", 0, "let product: f32[M, N]"),
        ("twice(v", 0, "fn twice(v)"),
        ("K:", 0, "size K"),
    ],
)
def test_hover(client: Client, uri: str, needle: str, nth: int, text: str) -> None:
    assert hover(client, uri, needle, nth) == text


def test_nothing_to_hover_over(client: Client, uri: str) -> None:
    assert client.request("textDocument/hover", textDocument={"uri": uri}, position={"line": 0, "character": 3}) is None


@pytest.mark.parametrize(
    ("use", "nth", "declared", "declared_nth"),
    [
        ("sum\n}", 0, "sum = 0.0", 0),
        ("k] *", 0, "k in", 0),
        ("i, k]", 0, "i in", 0),
        ("doubled", 1, "doubled =", 0),
        ("v * 2", 0, "v):", 0),
        ("twice(product", 0, "twice(v", 0),
        ("product)", 0, "product =", 0),
        ("a[i, k]", 0, "a, b)", 0),
    ],
)
def test_definition(client: Client, uri: str, use: str, nth: int, declared: str, declared_nth: int) -> None:
    found = client.request("textDocument/definition", textDocument={"uri": uri}, position=at(PROGRAM, use, nth))
    assert (found["uri"], found["range"]["start"]) == (uri, at(PROGRAM, declared, declared_nth))


def test_definition_in_an_imported_file(client: Client, tmp_path: Path) -> None:
    (tmp_path / "layers.zyn").write_text("// layers\nfn norm(x):\n    return x\n", encoding="utf-8")
    text = 'import "layers.zyn" as layers\nlet y = layers.norm(x)\n'
    main = (tmp_path / "main.zyn").as_uri()
    client.open(main, text)
    there = client.request("textDocument/definition", textDocument={"uri": main}, position=at(text, "norm"))
    assert there["uri"] == (tmp_path / "layers.zyn").as_uri()
    assert there["range"]["start"] == {"line": 1, "character": 3}
    there = client.request("textDocument/definition", textDocument={"uri": main}, position=at(text, "layers.norm"))
    assert (there["uri"], there["range"]["start"]["line"]) == ((tmp_path / "layers.zyn").as_uri(), 0)


def test_symbols(client: Client, uri: str) -> None:
    found = client.request("textDocument/documentSymbol", textDocument={"uri": uri})
    assert [s["name"] for s in found] == ["twice", "product", "y"]
    assert [s["name"] for s in found[0]["children"]] == ["doubled"]
    assert found[1]["selectionRange"]["start"] == at(PROGRAM, "product =")


def test_completion(client: Client, uri: str) -> None:
    def labels(**position: int) -> set[str]:
        return {i["label"] for i in client.request("textDocument/completion", textDocument={"uri": uri}, position=position)}

    attributes = labels(**{**at(PROGRAM, "@kernel"), "character": at(PROGRAM, "@kernel")["character"] + 1})
    assert {"kernel", "workgroup", "precision", "strict"} <= attributes
    kinds = labels(**{**at(PROGRAM, "matmul"), "character": at(PROGRAM, "matmul")["character"] + 2})
    assert {"matmul", "reduce", "elementwise"} <= kinds
    inside = labels(**at(PROGRAM, "a[i, k]"))
    assert {"sum", "i", "j", "k", "a", "twice", "exp", "f32", "for"} <= inside
    assert "doubled" not in inside
    assert "sum" not in labels(**at(PROGRAM, "product)"))


def test_members_of_random(client: Client, tmp_path: Path) -> None:
    uri = (tmp_path / "draws.zyn").as_uri()
    text = "let y = compute(x) {\n    for i in 0..n: out[i] = random.uniform(7, i) + x[i]\n}\n"
    assert client.open(uri, text) == []
    place = {"line": 1, "character": text.splitlines()[1].index("random.") + len("random.")}
    found = {i["label"] for i in client.request("textDocument/completion", textDocument={"uri": uri}, position=place)}
    assert found == {"uniform", "normal", "randint", "bits"}


def test_messages_come_and_go_with_the_text(client: Client, tmp_path: Path) -> None:
    uri = (tmp_path / "edit.zyn").as_uri()
    right = "let y = compute(x) {\n    for i in 0..n: out[i] = x[i]\n}\n"
    assert client.open(uri, right) == []
    wrong = right + 'let s = "é𝄞" + nope(y)\n'
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 2}, contentChanges=[{"text": wrong}])
    (message,) = client.diagnostics(uri, 2)
    assert message["code"] == "TW002"
    assert message["severity"] == 1
    assert message["source"] == "tilewright"
    assert message["message"].startswith("unknown function 'nope'")
    assert message["range"] == {"start": {"line": 3, "character": 16}, "end": {"line": 3, "character": 20}}  # 𝄞 counts twice
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 3}, contentChanges=[{"text": right}])
    assert client.diagnostics(uri, 3) == []


def test_fast_typing_is_checked_once(client: Client, tmp_path: Path) -> None:
    uri = (tmp_path / "fast.zyn").as_uri()
    client.open(uri, "let y = 1\n")
    for version in range(2, 12):
        client.notify("textDocument/didChange", textDocument={"uri": uri, "version": version}, contentChanges=[{"text": f"let y = {version} +\n"}])
    (message,) = client.diagnostics(uri)
    assert message["code"] == "TW001"
    assert client.silent(0.5)


def test_hover_goes_on_while_the_text_is_broken(client: Client, tmp_path: Path) -> None:
    uri = (tmp_path / "broken.zyn").as_uri()
    client.open(uri, PROGRAM)
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 2}, contentChanges=[{"text": PROGRAM + "let z = (\n"}])
    assert [m["code"] for m in client.diagnostics(uri, 2)] == ["TW001"]
    assert hover(client, uri, "sum +=") == "var sum: f32"


def test_unused_results_are_warnings(client: Client, tmp_path: Path) -> None:
    (message,) = client.open((tmp_path / "unused.zyn").as_uri(), "fn f(x):\n    let a = x\n    return x\nlet y = f(x)\n")
    assert (message["code"], message["severity"]) == ("TW019", 2)


def test_formatting(client: Client, tmp_path: Path) -> None:
    uri = (tmp_path / "style.zyn").as_uri()
    client.open(uri, "let   y=1+2\n")
    options = {"tabSize": 4, "insertSpaces": True}
    (edit,) = client.request("textDocument/formatting", textDocument={"uri": uri}, options=options)
    assert edit["newText"] == "let y = 1 + 2\n"
    assert edit["range"]["start"] == {"line": 0, "character": 0}
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 2}, contentChanges=[{"text": "let y = 1 + 2\n"}])
    assert client.request("textDocument/formatting", textDocument={"uri": uri}, options=options) == []


def test_kernels_in_python_files(client: Client, tmp_path: Path) -> None:
    uri = (tmp_path / "kernels.py").as_uri()
    text = "import tilewright as tw\n\n@tw.kernel\ndef k(x: tw.Array) -> tw.Array:\n    return tw.expp(x)\n"
    (message,) = client.open(uri, text)
    assert message["code"] == "TW002"
    assert message["range"]["start"]["line"] == 4


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples/zyn").glob("*.zyn")))
def test_examples_have_no_messages(client: Client, name: str) -> None:
    path = ROOT / "examples/zyn" / name
    assert client.open(path.as_uri(), path.read_text(encoding="utf-8")) == []
