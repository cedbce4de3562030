"""Print how large the project is: `python -m tests.figures`, or `poe figures`.

The sizes of sqlq/ have ceilings in figures.json. They may only fall, to the bounds of `BOUNDS`.

    python -m tests.figures --check    fails where a size is above its ceiling; a part of `poe check`
    python -m tests.figures --lower    lowers the ceilings to the sizes of today
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.words import KINDS, ROOT, counts, room_of

BOUNDS = {"lines": 29_390, "statements": 22_350, "tokens": 255_290}
"""The sizes of sqlq/ to which its ceilings are to fall."""
CEILINGS = Path(__file__).with_suffix(".json")
MAX_LINES = 500
"""The most lines of a file, with its prose."""
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_LINES = 40
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
    """Print each size above its ceiling, and each place that is too long. Return the exit code."""
    problems = [
        f"sqlq/ has {now[kind]:,} {kind}, the ceiling is {ceilings[kind]:,}"
        for kind in BOUNDS
        if now[kind] > ceilings[kind]
    ]
    problems += [place for path in sorted((ROOT / "sqlq").rglob("*.py")) for place in long_places(path)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def long_places(path: Path) -> list[str]:
    """Return a file that has too many lines, and its functions with too many lines of code."""
    source, name = path.read_text(), path.relative_to(ROOT)
    number = source.count("\n")
    places = [f"{name} has {number} lines, at most {MAX_LINES}"] if number > MAX_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            bound = MAX_CONSTRUCTOR_LINES if node.name == "__init__" else MAX_FUNCTION_LINES
            segment = inspect.cleandoc("\n" + (ast.get_source_segment(source, node, padded=True) or ""))
            if (lines := sizes(segment)["lines"]) > bound:
                places.append(f"{name}:{node.lineno}: {node.name} has {lines} lines of code, at most {bound}")
    return places


def report() -> None:
    lines, files, long = Counter[str](), Counter[str](), list[str]()
    for path in sorted((ROOT / "sqlq").rglob("*.py")):
        source, room = path.read_text(), room_of(path)
        lines[room] += sizes(source)["lines"]
        files[room] += 1
        long += long_places(path)
    sentences = counts()
    print(f"{'room':<16} {'lines':>7} {'files':>7} " + " ".join(f"{kind:>7}" for kind in KINDS))
    for room, number in lines.most_common():
        words = " ".join(f"{sentences[room][kind]:>7}" for kind in KINDS)
        print(f"{room:<16} {number:>7,} {files[room]:>7} {words}")
    words = " ".join(f"{sum(room[kind] for room in sentences.values()):>7}" for kind in KINDS)
    print(f"{'all':<16} {lines.total():>7,} {files.total():>7} {words}\n")
    tests = (sizes(path.read_text())["lines"] for path in (ROOT / "tests").rglob("*.py"))
    print(f"lines of tests: {sum(tests):,}")
    print(f"files and functions that are too long: {', '.join(long) or 0}")
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
