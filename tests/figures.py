"""Print how large the project is: `python -m tests.figures`, or `poe figures`.

The sizes of sqlq/ have ceilings in figures.json. They may only fall, to the bounds of `BOUNDS`.

    python -m tests.figures --check    fails where a size is above its ceiling; a part of `poe check`
    python -m tests.figures --lower    lowers the ceilings to the sizes of today
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

import sqlq
from sqlq.cli import root
from tests.words import KINDS, ROOT, counts, room_of

BOUNDS = {"lines": 28_000, "statements": 21_000, "tokens": 240_000}
"""The sizes of sqlq/ to which its ceilings are to fall."""
CEILINGS = Path(__file__).with_suffix(".json")
LONGEST_FILE = 500
MOST_PARAMETERS = 8
_NOT_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def sizes(source: str) -> Counter[str]:
    """Count the lines, statements and tokens of a module without blank lines, comments and docstrings."""
    tree = ast.parse(source)
    prose = [text for node in ast.walk(tree) for text in docstrings(node)]
    skipped = {line for text in prose for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    kept = [token for token in _tokens(source) if token.start[0] not in skipped]
    return Counter(
        lines=len({line for token in kept for line in range(token.start[0], token.end[0] + 1)}),
        statements=sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(prose),
        tokens=len(kept),
    )


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens that are code. An f-string is one, as before Python 3.12."""
    depth = 0
    begin = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        depth += name.endswith("STRING_START") - name.endswith("STRING_END")
        if name.endswith("STRING_START") and depth == 1:
            begin = token
        if depth:
            continue
        if begin is not None:
            token, begin = begin._replace(end=token.end), None
        if token.type not in _NOT_CODE:
            yield token


def docstrings(node: ast.AST) -> list[ast.Expr]:
    """Return the texts that stand alone in a body."""
    body = getattr(node, "body", None)
    return [
        child
        for child in (body if isinstance(body, list) else ())
        if isinstance(child, ast.Expr)
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
    ]


def code() -> Counter[str]:
    """Return the sizes of sqlq/."""
    return sum((sizes(path.read_text()) for path in (ROOT / "sqlq").rglob("*.py")), Counter())


def check(now: Counter[str], ceilings: dict[str, int]) -> int:
    """Print each size above its ceiling. Return the exit code."""
    above = [kind for kind in BOUNDS if now[kind] > ceilings[kind]]
    for kind in above:
        print(f"sqlq/ has {now[kind]:,} {kind}, the ceiling is {ceilings[kind]:,}")
    return 1 if above else 0


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


def report() -> None:
    lines, files, long, large = Counter[str](), Counter[str](), [], []
    for path in sorted((ROOT / "sqlq").rglob("*.py")):
        source, room = path.read_text(), room_of(path)
        lines[room] += sizes(source)["lines"]
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
        "lines of tests": sum(sizes(path.read_text())["lines"] for path in (ROOT / "tests").rglob("*.py")),
        f"files above {LONGEST_FILE} lines": ", ".join(long) or 0,
        f"constructors above {MOST_PARAMETERS} parameters": ", ".join(large) or 0,
    }.items():
        print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
    now = code()
    for kind, bound in BOUNDS.items():
        print(f"{kind} of sqlq/: {now[kind]:,}, bound {bound:,}")


def main(arguments: list[str]) -> int:
    if not arguments:
        report()
        return 0
    ceilings, now = json.loads(CEILINGS.read_text()), code()
    if arguments == ["--lower"]:
        ceilings = {kind: min(now[kind], ceilings[kind]) for kind in BOUNDS}
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")
    return check(now, ceilings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
