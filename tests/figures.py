"""Print how large the project is: `python -m tests.figures`, or `poe figures`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import click

import sqlq
from sqlq.cli import root
from tests.words import KINDS, ROOT, counts, room_of

LONGEST_FILE = 600
MOST_PARAMETERS = 8
_NOT_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def code_lines(source: str) -> int:
    """Count the lines that are not blank, not a comment and not a docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            match child:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                    prose.update(range(first, (last or first) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def large_constructors(path: Path) -> list[str]:
    """Return the classes of a file whose constructor takes more parameters than is plain."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    given = function.args
                    number = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                    if number > MOST_PARAMETERS:
                        names.append(f"{node.name} ({number})")
    return names


def commands(group: click.Group) -> int:
    """Count the commands that do something by themselves."""
    number = 0
    for command in group.commands.values():
        if isinstance(command, click.Group):
            number += commands(command) + command.invoke_without_command
        else:
            number += not command.hidden
    return number


def main() -> None:
    lines, files, long, large = Counter[str](), Counter[str](), [], []
    for path in sorted((ROOT / "sqlq").rglob("*.py")):
        source, room = path.read_text(), room_of(path)
        lines[room] += code_lines(source)
        files[room] += 1
        if source.count("\n") > LONGEST_FILE:
            long.append(f"{path.relative_to(ROOT)} ({source.count(chr(10))})")
        large += large_constructors(path)
    sentences = counts()
    print(f"{'room':<16} {'lines':>6} {'files':>6} {'begin':>6} {'long':>6} {'words':>6}")
    for room, number in lines.most_common():
        prose = " ".join(f"{sentences[room][kind]:>6}" for kind in KINDS)
        print(f"{room:<16} {number:>6,} {files[room]:>6} {prose}")
    prose = " ".join(f"{sum(room[kind] for room in sentences.values()):>6}" for kind in KINDS)
    print(f"{'all':<16} {lines.total():>6,} {files.total():>6} {prose}\n")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    functions = sum(len(re.findall(r"^ *(?:async )?def test_", text, re.MULTILINE)) for text in tests)
    for name, value in {
        "layers": len(contracts[0]["layers"]),
        "exports": len(sqlq.__all__),
        "commands": commands(root.sqlq),
        "test functions": functions,
        "lines of tests": sum(code_lines(path.read_text()) for path in (ROOT / "tests").rglob("*.py")),
        f"files above {LONGEST_FILE} lines": ", ".join(long) or 0,
        f"constructors above {MOST_PARAMETERS} parameters": ", ".join(large) or 0,
    }.items():
        print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


if __name__ == "__main__":
    main()
