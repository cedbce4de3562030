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
    ".md-typeset table:not([class]) :is(td, th) { padding: .6em .8em; min-width: 0 }\n"
    '[data-md-color-scheme="slate"] img[src$=".svg"] { filter: brightness(.85) }\n'
)
"""Room for lines of code of a hundred characters and tables of six columns; charts that do not dazzle."""
_LINK = re.compile(r"(```.*?^```$)|\]\(([^)#\s]*)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)


SEARCHED = {
    "middleware": "frameworks-and-middleware",
    "debounce": "cookbook",
    "dead letter": "retries-and-failed-jobs",
    "graceful shutdown": "run-workers",
    "Kubernetes": "deploy",
    "acks_late": "from-other-queues",
    "chord": "flows-and-callbacks",
    "beat": "schedules-and-limits",
    "Horizon": "from-other-queues",
    "burst": "from-other-queues",
    "prefetch": "run-workers",
}
"""Words of other queues, and the page that the search has to find by each."""
LESS_WANTED = ("decisions/", "changelog", "guarantees", "contributing")
"""The beginnings of pages that come after others in the results of a search."""


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
    page.meta["search"] = {"boost": 0.2 if place.startswith(LESS_WANTED) else 1}
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

    return _LINK.sub(turned, markdown)


@event_priority(-100)  # after the search has written its index
def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Refuse a site whose search does not find a page by the words for it."""
    sections = json.loads((Path(config.site_dir) / "search" / "search_index.json").read_text())["docs"]
    for words, page in SEARCHED.items():
        if not any(
            section["location"].startswith(f"{page}.html")
            and words.lower() in f"{section['title']} {section['text']}".lower()
            for section in sections
        ):
            raise PluginError(f"the search finds no {page}.md by {words!r}: say so on that page")


def title(text: str) -> str:
    """Return the title of a page."""
    return text.lstrip("# ").partition("\n")[0]


def _sources(folder: Path) -> list[str]:
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in SOURCES and path.stat().st_size]
    return [
        f"\n## {path.relative_to(folder)}\n\n```{SOURCES[path.suffix]}\n{path.read_text().rstrip()}\n```\n"
        for path in found
    ]
