"""The checker of the prose reads paragraphs and list items of Markdown."""

from __future__ import annotations

from pathlib import Path

from tests import words

PAGE = """# What a heading says

A paragraph goes on
over [two
lines](#a) and ends. **Of emphasis**, too.

- an item
  of two lines
- What begins an item

| What a table says |
|---|

<!-- python: of_a_comment -->
```python
app = "Of code"
```

    Of indented code

- [A](#a) · [What a row of links says](#b)

Last.
"""


def test_markdown_paragraphs_yields_paragraphs_and_items_with_their_lines() -> None:
    assert list(words.markdown_paragraphs(PAGE)) == [
        (3, "A paragraph goes on over two lines and ends. Of emphasis, too."),
        (7, "an item of two lines"),
        (9, "What begins an item"),
        (23, "Last."),
    ]


def test_findings_counts_beginnings_and_long_sentences_of_markdown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{PAGE}\nA {'long ' * 25}sentence. A link is told apart.\n")
    found = [(finding.kind, finding.line) for finding in words.findings(page)]
    assert found == [("begin", 3), ("begin", 9), ("long", 25)]


def test_room_of_names_the_folder_of_a_page() -> None:
    pages = ("docs/decisions/0001-payload-is-text.md", "docs/sql.md", "CHANGELOG.md", "benchmarks/README.md")
    rooms = [words.room_of(words.ROOT / page) for page in pages]
    assert rooms == ["docs/decisions", "docs", "top level", "benchmarks"]


def test_names_yields_bound_names_and_literals_when_a_word_is_ours(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Found in a docstring: so long."""\n'
        "MOST_JOBS = 1\n"
        "def found_jobs(given, *, timeout):\n"
        "    '''So many words.'''\n"
        "    foundation = placed = given.found\n"
        "    return f'Waits so long as {foundation} {placed}'\n"
    )
    findings = sorted(
        (finding.line, finding.kind, finding.text.split(":")[0]) for finding in words.names(module)
    )
    assert findings == [
        (2, "name", "MOST_JOBS"),
        (3, "name", "found_jobs"),
        (3, "name", "given"),
        (6, "literal", "so long"),
    ]
