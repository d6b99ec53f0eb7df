"""What mkdocs needs to know of our pages (`hooks:` in mkdocs.yml).

- README, ARCHITECTURE, CONTRIBUTING and CHANGELOG become pages of the site, and their links into docs/ lead to its pages.
- Files outside docs/ that pages link to (examples, sources) are copied into the site. Links to folders become plain text.
- What our tests read behind a block's language (```python error) is taken away: mkdocs knows only the language.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
AT_THE_TOP = {"README.md": "start.md", "ARCHITECTURE.md": "ARCHITECTURE.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""By path in the repository, the page of the site. A README would be a folder's index to mkdocs."""
_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```+)([\w+-]+) [^\n]*$", re.MULTILINE)
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def in_repository(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return next((path for path, page in AT_THE_TOP.items() if page == uri), f"docs/{uri}")


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return AT_THE_TOP.get(path) or path.removeprefix("docs/")


def on_files(files: Files, config: Any) -> Files:
    for path, page in AT_THE_TOP.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    linked: set[str] = set()
    for file in list(files.documentation_pages()):
        for _, _, link, _ in _LINK.findall(_CODE.sub("", file.content_string)):
            path = normpath(str(PurePosixPath(in_repository(file.src_uri)).parent / link))
            if not link.startswith("http") and not path.startswith("docs/") and path not in AT_THE_TOP and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, path, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = in_repository(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        path = normpath(str(PurePosixPath(here).parent / target))
        if (ROOT / path).is_dir():
            return text
        to = relpath(in_site(path), str(PurePosixPath(page.file.src_uri).parent))
        return f"{picture}[{text}]({to}{anchor or ''})"

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    # GitHub wants a bar in code of a table escaped; Python's Markdown would show the backslash.
    parts[1::2] = [part if part.startswith("```") else part.replace("\\|", "|") for part in parts[1::2]]
    return _FENCE.sub(r"\1\2", _whole_links("".join(parts), link))


def _whole_links(markdown: str, link: Any) -> str:
    """Links whose text is code: [`name`](place), which splitting by code has cut."""
    return re.sub(r"(!?)\[(`[^`\n]+`)\]\(([^)\s#]+)(#[^)\s]*)?\)", link, markdown)
