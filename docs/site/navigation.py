"""`python -m docs.site.navigation` writes the README's table of pages, made of the site's navigation.

Each page has one name: its first heading. mkdocs.yml lists files alone, so the site shows the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
OUTSIDE: Final = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "benchmarks.md": "benchmarks/README.md",
    "examples/index.md": "examples",
    "decisions/index.md": "docs/decisions",
}
"""Pages of the site whose text is elsewhere in the repository."""
_TABLE: Final = re.compile(r"^\| group \| pages \|\n(?:\|.*\n)+", re.MULTILINE)


def groups() -> Iterator[tuple[str, list[str]]]:
    """Yield each group of the navigation, a group within a group by both names, and its pages."""
    _, _, text = (ROOT / "docs/site/mkdocs.yml").read_text().partition("\nnav:\n")
    for group in yaml.safe_load(text):
        ((name, entries),) = group.items()
        yield from _parts(name, entries)


def _parts(name: str, entries: list[Any]) -> Iterator[tuple[str, list[str]]]:
    pages = [entry for entry in entries if isinstance(entry, str)]
    if pages:
        yield name, pages
    for entry in entries:
        if isinstance(entry, dict):
            ((below, pages),) = entry.items()
            yield from _parts(f"{name}: {below.lower()}", pages)


def path_of(page: str) -> str:
    """Return where the text of a page of the site is, from the root of the repository."""
    return OUTSIDE.get(page, f"docs/{page}")


def title_of(page: str) -> str:
    """Return a page's first heading; a folder without a page of its own has its name."""
    path = ROOT / path_of(page)
    if path.is_dir():
        return path.name.capitalize()
    return path.read_text().lstrip("# ").partition("\n")[0]


def table() -> str:
    """Return the README's table of pages: a line for each group."""
    rows = ["| group | pages |\n|---|---|\n"]
    for name, pages in groups():
        links = [
            f"[{title_of(page)}]({path_of(page)})"
            for page in pages
            if page != "index.md" and (ROOT / path_of(page)).exists()
        ]
        rows.append(f"| {name} | {' · '.join(links)} |\n")
    return "".join(rows)


def with_table(readme: str) -> str:
    """Return the README's text with its table as it has to be."""
    text, number = _TABLE.subn(table().replace("\\", r"\\"), readme)
    assert number == 1, "README.md has no table that begins with `| group | pages |`"
    return text


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_table((ROOT / "README.md").read_text()))
