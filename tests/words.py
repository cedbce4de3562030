"""Check the prose of the code and of the documentation: `python -m tests.words`, a part of `poe check`.

The checker reads docstrings, comments and names of tests, and the paragraphs and list items of Markdown. It
counts sentences that begin with What, Who, That or Of, and sentences of more than 25 words. In code it also
counts words for which the field has a better one. In sqlq/ it reads the names that each module binds, and the
texts of its literals, too. Each room has ceilings in words.json. They may only fall.

    python -m tests.words PATH …          prints each finding in these files and directories
    python -m tests.words --names PATH …  prints names and literals alone
    python -m tests.words --lower         lowers the ceilings to the counts of today
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_suffix(".json")
FILES = (
    *("sqlq/**/*.py", "migrations/**/*.py", "tests/**/*.py", "examples/**/*.py", "benchmarks/**/*.py"),
    *("docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "*.md"),
)
KINDS = ("begin", "long", "word", "name", "literal")
OF_NAMES = ("name", "literal")
MOST_WORDS = 25

WORDS = {
    "ask": "query, request",
    "black box": "shared memory",
    "borrowed": "adapter",
    "chore|duty|duties": "maintenance service",
    "fate": "final state",
    "fleet": "workers",
    "frontier": "scan cursor",
    "given? back|gives? back|put back|puts? off": "release",
    "hear|hears|heard": "receive",
    "heed": "observe",
    "hint": "notification",
    "isolate": "subprocess",
    "keeper": "heartbeat",
    "lasting": "permanent",
    "link": "pipe",
    "lookout": "poller",
    "lots": "random back-off",
    "misfit": "signature mismatch",
    "moment": "time; of a schedule: run",
    "patience": "timeout",
    "pinned": "overridden",
    "say|says|said": "has, defines, sets, reports; people say",
    "sealed?|unsealed|unseal": "encrypt, sign",
    "stamp": "enqueue middleware",
    "surround": "middleware",
    "tally": "counts",
    "tell|tells|told|teller": "notify, publish, report",
}
"""Ours, as a pattern, and the field's."""

_SAID = (
    *("heeds?", "hears?", "lookout", "look so", "patience", "pinned", "tells? ", "told", "sealed?"),
    "unseal(?:ed)?",
)
"""Words that no message has."""
NAMES = {
    "asked|asks?": "query, request, requested",
    "begun": "started",
    "chosen": "selection",
    "course|doing": "running, the attempt",
    "fate|lookout|outlet|tally": "final state, poller, handler, counts",
    "found|looked": "rows, jobs, ids, match",
    "given": "value, options, arguments",
    "goes|went": "the noun of the thing",
    "heard?|hears": "received, message",
    "heed": "observe",
    "held": "locked, owned, jobs",
    "longest|most": "max",
    "made": "created",
    "met": "seen, occurred",
    "mine|ours": "own",
    "misfit": "mismatch",
    "moment": "time, now, run",
    "patience": "timeout",
    "places?": "position, slot",
    "rests|undone": "idle, pending",
    "said|says?|tells?|told|teller": "message, text, report, notify",
    "shortest": "min",
    "trouble": "problem, error",
    "wanted": "expected, requested",
    "what|who": "the noun of the thing",
}
"""Words that no name is made of, as a pattern, and those of the field."""

_NAME = re.compile("|".join(NAMES))
_PART = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LITERAL = re.compile(
    rf"\b(?:so (?:many|long|often)|{'|'.join(f'(?:{word})' for word in _SAID)})\b", re.IGNORECASE
)
_BEGINS = re.compile(r"(?:What|Who|That|Of|So many|So long)\b")
_OURS = re.compile(rf"\b(?:{'|'.join(f'(?:{word})s?' for word in WORDS)})(?:ed|ing)?\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[A-Z`\"'(]|sqlq\b)")
_CODE = re.compile(r"``.+?``|`[^`]+`|\"[^\"]*\"")
_NOT_PROSE = re.compile(r"(?:noqa|type:|guard:|pragma|--|fmt:|isort)")
_BLOCK = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_NO_PARAGRAPH = re.compile(r" *(?:#|\|)|.*\) ·")
_INDENTED = " " * 4
_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")


class Finding(NamedTuple):
    kind: str
    path: Path
    line: int
    text: str


def findings(path: Path) -> Iterator[Finding]:
    """Yield each sentence or word of a file's prose that has to be mended."""
    is_code = path.suffix == ".py"
    read = paragraphs if is_code else markdown_paragraphs
    for line, paragraph in read(path.read_text()):
        for sentence in _SENTENCE.split(paragraph):
            if _BEGINS.match(sentence):
                yield Finding("begin", path, line, sentence)
            if len(sentence.split()) > MOST_WORDS:
                yield Finding("long", path, line, sentence)
            for match in _OURS.finditer(_CODE.sub("", sentence)) if is_code else ():
                yield Finding("word", path, line, f"{match[0]}: {sentence}")
    if is_code and path.is_relative_to(ROOT / "sqlq"):
        yield from names(path)


def names(path: Path) -> Iterator[Finding]:
    """Yield each name that a module binds, and each literal text, that has a word to be mended."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    bound = dict[str, int]()
    for node in ast.walk(tree):
        for name in _bound(node):
            bound.setdefault(name, getattr(node, "lineno", 1))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for match in _LITERAL.finditer(node.value):
                yield Finding("literal", path, node.lineno, f"{match[0]}: {node.value!r}")
    for name, line in bound.items():
        if any(_NAME.fullmatch(part.lower()) for part in _PART.findall(name)):
            yield Finding("name", path, line, name)


def _bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=str() as name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case (
            ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            yield name
        case ast.alias(asname=str() as name) | ast.ExceptHandler(name=str() as name):
            yield name
        case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
            yield name


def paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph of a module's docstrings and comments, and each name of a test, with its line."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            match child:
                case ast.Expr(value=ast.Constant(value=str() as text), lineno=line):
                    yield from ((line, paragraph) for paragraph in _prose(text))
                case ast.FunctionDef(name=name, lineno=line) | ast.AsyncFunctionDef(name=name, lineno=line):
                    if name.startswith("test_"):
                        yield line, name.removeprefix("test_").replace("_", " ").capitalize()
    yield from _comments(source)


def markdown_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph and list item of a Markdown text with its line, without URLs and emphasis.

    Code, tables, headings, comments and rows of references are left out.
    """
    begin, parts = 0, list[str]()
    text = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = _ITEM.match(line)
        is_prose = bool(line.strip()) and not _NO_PARAGRAPH.match(line)
        if parts and (item or not is_prose):
            yield begin, _LINK.sub(r"\1", " ".join(parts)).replace("**", "")
            parts = []
        if is_prose and (parts or item or not line.startswith(_INDENTED)):
            begin = begin if parts else number
            parts.append(line[item.end() if item else 0 :].strip())


def _prose(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring that are no code."""
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", inspect.cleandoc(docstring)):
        is_code = all(line.startswith("    ") for line in paragraph.splitlines())
        if not (is_code or ">>>" in paragraph or "\b" in paragraph):
            yield " ".join(paragraph.split())


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comments as one paragraph."""
    begin, last, parts = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        if line != last + 1 or token.line.lstrip()[0] != "#":
            if parts:
                yield begin, " ".join(parts)
            begin, parts = line, []
        last = line
        if text and not _NOT_PROSE.match(text):
            parts.append(text)
    if parts:
        yield begin, " ".join(parts)


def room_of(path: Path) -> str:
    """Return the room of a file: `sqlq/worker`, `docs/decisions`, `sqlq` for the files directly in it."""
    parts = path.relative_to(ROOT).parts[:-1] or ("top level",)
    return "/".join(parts[:2]) if parts[0] in ("sqlq", "docs") else parts[0]


def counts() -> dict[str, Counter[str]]:
    """Return how many findings of each kind each room has."""
    rooms: dict[str, Counter[str]] = {}
    for files in FILES:
        for path in sorted(ROOT.glob(files)):
            room = rooms.setdefault(room_of(path), Counter())
            room.update(finding.kind for finding in findings(path))
    return rooms


def ceilings() -> dict[str, dict[str, int]]:
    """Return how many findings of each kind a room may have."""
    table: dict[str, dict[str, int]] = json.loads(CEILINGS.read_text())
    return table


def lower() -> None:
    """Lower each ceiling to the count of today."""
    before, rows = ceilings(), []
    for room, number in sorted(counts().items()):
        known = before.get(room, number)
        row = {kind: min(known.get(kind, number[kind]), number[kind]) for kind in KINDS}
        rows.append(f"  {json.dumps(room)}: {json.dumps(row)}")
    CEILINGS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main(arguments: list[str]) -> int:
    if arguments == ["--lower"]:
        lower()
        return 0
    shown = OF_NAMES if "--names" in arguments else KINDS
    for path in (Path(each).absolute() for each in arguments if each != "--names"):
        directory = [*path.rglob("*.py"), *path.rglob("*.md")]
        for file in sorted(directory) if path.is_dir() else [path]:
            for finding in sorted(findings(file), key=lambda finding: finding.line):
                if finding.kind in shown:
                    print(f"{file.relative_to(ROOT)}:{finding.line}: {finding.kind}: {finding.text}")
    if arguments:
        return 0
    known, rooms = ceilings(), sorted(counts().items())
    higher = [
        f"{room}: {number[kind]} of kind {kind!r}, the ceiling is {ceiling}"
        for room, number in rooms
        for kind in KINDS
        if number[kind] > (ceiling := known.get(room, {}).get(kind, 0))
    ]
    if higher:
        print(*higher, sep="\n")
        print("mend the sentences that `python -m tests.words PATH` prints; CONTRIBUTING.md has the rules")
    return int(bool(higher))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
