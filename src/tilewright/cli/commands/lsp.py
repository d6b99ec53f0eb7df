"""`tilewright lsp`: a language server for ZynML (and messages for kernels in Python files) on stdin and stdout.

It speaks the Language Server Protocol by way of pygls (`pip install tilewright[lsp]`). What it answers comes from `language_facts`;
here are only positions, debouncing and the documents' last good analyses. Checking runs in a thread: typing is never held up.
"""

from __future__ import annotations

import asyncio
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import Diagnostic, UserError
from tilewright.base.source import Span
from tilewright.cli import language_facts
from tilewright.cli.language_facts import Analysis, Symbol
from tilewright.frontend.zyn.format import format_text

if TYPE_CHECKING:
    from lsprotocol import types
    from pygls.lsp.server import LanguageServer
    from pygls.workspace import TextDocument

DEBOUNCE_S = 0.15
"""How long a text must stay unchanged before it is checked."""


def lsp() -> None:
    """Serve one client until it says exit."""
    try:
        import pygls.lsp.server  # noqa: F401
    except ImportError:
        raise UserError.at("TW007", "the language server needs pygls, which is not installed", help="pip install 'tilewright[lsp]'") from None
    make_server().start_io()


def make_server() -> LanguageServer:
    """The server with all it can do."""
    from lsprotocol import types
    from pygls.lsp.server import LanguageServer

    server = LanguageServer("tilewright", metadata.version("tilewright"))
    state = _ServerState(server)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: types.DidOpenTextDocumentParams) -> None:
        await state.check(params.text_document.uri, 0.0)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: types.DidChangeTextDocumentParams) -> None:
        await state.check(params.text_document.uri, DEBOUNCE_S)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: types.DidSaveTextDocumentParams) -> None:
        await state.check(params.text_document.uri, 0.0)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        state.forget(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    async def hover(params: types.HoverParams) -> types.Hover | None:
        document, analysis = await state.of(params.text_document.uri)
        found = language_facts.hover(analysis, *state.place(document, params.position))
        if found is None:
            return None
        text, span = found
        content = types.MarkupContent(types.MarkupKind.Markdown, f"```zyn\n{text}\n```")
        return types.Hover(content, state.range(document, span))

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    async def definition(params: types.DefinitionParams) -> types.Location | None:
        document, analysis = await state.of(params.text_document.uri)
        span = language_facts.definition(analysis, *state.place(document, params.position))
        if span is None:
            return None
        own = span.path == analysis.path
        target = document if own else server.workspace.get_text_document(Path(span.path).resolve().as_uri())
        return types.Location(target.uri, state.range(target, span))

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    async def symbols(params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
        document, analysis = await state.of(params.text_document.uri)
        return [state.symbol(document, symbol) for symbol in language_facts.symbols(analysis)]

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    def formatting(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        document = server.workspace.get_text_document(params.text_document.uri)
        if not _is_zyn(document.uri):
            return None
        try:
            done = format_text(document.source, document.path or document.uri)
        except UserError:
            return None  # the messages of the text say why
        if done == document.source:
            return []
        end = types.Position(len(document.lines) + 1, 0)
        return [types.TextEdit(types.Range(types.Position(0, 0), end), done)]

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=["@", "."]))
    async def completion(params: types.CompletionParams) -> list[types.CompletionItem]:
        document, analysis = await state.of(params.text_document.uri)
        if not _is_zyn(document.uri):
            return []
        words = language_facts.completions(analysis, document.source, *state.place(document, params.position))
        return [types.CompletionItem(label=word, kind=_kind(kind)) for word, kind in words]

    return server


class _ServerState:
    """The documents' analyses, and the checks under way."""

    def __init__(self, server: LanguageServer) -> None:
        self._server = server
        self._good: dict[str, Analysis] = {}
        """The last analysis of a text that parsed."""
        self._newest: dict[str, tuple[str, Analysis]] = {}
        self._turn: dict[str, int] = {}
        """Counts the texts of a document: an analysis of an older one is not reported."""

    def forget(self, uri: str) -> None:
        from lsprotocol import types

        for kept in (self._good, self._newest, self._turn):
            kept.pop(uri, None)
        self._server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))

    async def check(self, uri: str, delay: float) -> None:
        """Analyse a document, if its text is still the same after a while, and report."""
        turn = self._turn[uri] = self._turn.get(uri, 0) + 1
        await asyncio.sleep(delay)
        if self._turn.get(uri) != turn:
            return
        document = self._server.workspace.get_text_document(uri)
        version = document.version
        analysis = await self._analysis(document)
        if self._turn.get(uri) == turn:
            from lsprotocol import types

            found = [self._diagnostic(document, d) for d in analysis.diagnostics if not d.span.line or d.span.path == analysis.path]
            self._server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, found, version))

    async def of(self, uri: str) -> tuple[TextDocument, Analysis]:
        """A document and what is known of it: of its text, or where that does not parse, of the last one that did."""
        document = self._server.workspace.get_text_document(uri)
        analysis = await self._analysis(document)
        return document, analysis if analysis.program is not None else self._good.get(uri, analysis)

    async def _analysis(self, document: TextDocument) -> Analysis:
        text = document.source
        kept = self._newest.get(document.uri)
        if kept is not None and kept[0] == text:
            return kept[1]
        analysis = await asyncio.to_thread(language_facts.analyse, text, document.path or document.uri)
        self._newest[document.uri] = text, analysis
        if analysis.program is not None:
            self._good[document.uri] = analysis
        return analysis

    # -- places -----------------------------------------------------------------------------------------------------

    def place(self, document: TextDocument, position: types.Position) -> tuple[int, int]:
        here = document.position_from_client_units(position)
        return here.line + 1, here.character + 1

    def range(self, document: TextDocument, span: Span) -> types.Range:
        from pygls.workspace.position_codec import ServerTextPosition, ServerTextRange

        if not span.line:
            return document.range_to_client_units(ServerTextRange(ServerTextPosition(0, 0), ServerTextPosition(0, 1)))
        start = ServerTextPosition(span.line - 1, span.column - 1)
        end = ServerTextPosition(max(span.end_line, span.line) - 1, max(span.end_column - 1, 0))
        return document.range_to_client_units(ServerTextRange(start, end if start < end else start))

    def _diagnostic(self, document: TextDocument, found: Diagnostic) -> types.Diagnostic:
        from lsprotocol import types

        message = found.message if not found.help else f"{found.message}\nhelp: {found.help}"
        severity = types.DiagnosticSeverity.Error if found.severity == "error" else types.DiagnosticSeverity.Warning
        related = [
            types.DiagnosticRelatedInformation(types.Location(document.uri, self.range(document, call)), "called here")
            for call in found.span.calls()
            if call.path == found.span.path
        ]
        return types.Diagnostic(
            self.range(document, found.span), message, severity=severity, code=found.code, source="tilewright",
            related_information=related or None,
        )  # fmt: skip

    def symbol(self, document: TextDocument, found: Symbol) -> types.DocumentSymbol:
        from lsprotocol import types

        kinds = {"function": types.SymbolKind.Function, "let": types.SymbolKind.Constant, "config": types.SymbolKind.Object}
        own = self.range(document, found.place)
        inside = [self.symbol(document, s) for s in found.inside]
        whole = self.range(document, found.whole)
        last = max([whole.end, own.end, *(s.range.end for s in inside)], key=lambda p: (p.line, p.character))
        return types.DocumentSymbol(found.name, kinds.get(found.kind, types.SymbolKind.Variable), types.Range(whole.start, last), own, children=inside)


def _kind(kind: str) -> Any:
    from lsprotocol import types

    kinds = {
        "attribute": types.CompletionItemKind.Property, "kind": types.CompletionItemKind.EnumMember, "member": types.CompletionItemKind.Field,
        "function": types.CompletionItemKind.Function, "type": types.CompletionItemKind.TypeParameter,
        "keyword": types.CompletionItemKind.Keyword,
    }  # fmt: skip
    return kinds.get(kind, types.CompletionItemKind.Variable)


def _is_zyn(uri: str) -> bool:
    return re.search(r"\.zyn$", uri, re.IGNORECASE) is not None
