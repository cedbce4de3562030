"""Each regular expression of sqlq takes time in proportion to its text, whoever has written that."""

from __future__ import annotations

import ast
import importlib
import re
import signal
from collections.abc import Callable, Iterator, Set
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import sqlq
from sqlq.cli import context, problems
from sqlq.cli.terminal import output
from sqlq.config import command_hint
from sqlq.model import limit, outcome, retry
from sqlq.payload import conversion, encryption
from sqlq.schema import qualify
from sqlq.web import access

FOLDER = Path(sqlq.__file__).parent
BYTES, SECONDS = 1_000_000, 1.0

LOCALS: dict[str, list[dict[str, Any]]] = {
    "names": [{"names": access.SECRET_NAMES}],
    "redact": [{"redact": access.SECRET_NAMES}],
    "pattern": [{"pattern": pattern} for pattern, _ in problems._MENDS],
    "f'{before}{kind}\\\\b'": [
        {"before": before, "kind": "flask"} for before in ("^(?:from|import) ", "(?:^|[\"'])")
    ],
}
"""The values of local names in patterns."""

KILLERS: dict[str, list[tuple[str, str, str]]] = {
    # beginning, what comes again and again, end
    qualify._NAMES.pattern: [("'", "''", ""), (" ", "<", ""), ("", "a", ""), ("", "SELECT ", "")],
    limit._RATE.pattern: [
        *[("", " ", "x"), ("", "1", ""), ("1", " ", "x"), ("1/", " ", "\n"), ("1/1", " ", "")]
    ],
    "{[^{}]*}": [("", "{", ""), ("{", "a", "")],
    r"[.\[]": [("", "a", "")],
    retry._UNSTORABLE.pattern: [("", "\0", ""), ("", "a", "")],
    r' *File "([^"]+)", line (\d+), in (.+)$': [
        *[("", " ", "x"), (' File "', "a", ""), (' File "a", line ', "1", ""), ("", ' File "', "")],
        ('File "a", line 1, in ', "a", "\n\n"),
    ],
    outcome._VARIES.pattern: [
        *[("0x", "f", "g"), ("", "f", "g"), ("", "'\"", "'"), ("", "0", "x"), ("", "-", "")]
    ],
    r'search_path\s*=\s*"?([a-z_][a-z0-9_]*)"?\s*(-|$)': [
        *[("search_path", " ", ""), ("search_path=", "a", "!"), ("search_path=a", " ", "!")],
        ("", "search_path=", ""),
    ],
    r"permission denied for (?:schema|relation|table|view) ": [("", "permission denied for ", "")],
    r"`?__sqlq__`?\.": [("", "`", ""), ("", "__sqlq__", "")],
    r"command denied to user (?P<account>'[^']*'@'[^']*')|the PROCESS privilege": [
        *[("", "command denied to user '", ""), ("command denied to user ", "'@'", ""), ("", "the ", "")]
    ],
    command_hint._STEERING.pattern: [("", "\x1b", ""), ("", "a", "")],
    output._CONTROL.pattern: [("", "\x1b", ""), ("", "a", "")],
    r"(\d+(?:\.\d+)?)(ms|s|m|h|d)": [("", "1s", "")],  # it reads only what the next one takes
    r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+": [("", "1", ""), ("", "1.1", ""), ("", "1s", "x"), ("1.", "1", "")],
    "pass|secret|token|scram": [("", "pas", "")],
    r":\d+(,|$)": [(":", "1", "x"), ("", ":1", "x")],
    r"[a-z_][a-z0-9_]{0,40}": [("", "a", "")],
    encryption._ROW.pattern: [
        *[("", encryption.HEAD, ""), (f"{encryption.HEAD}s1.", "0", "")],
        (f"{encryption.HEAD}s1.00000000.", "A", ""),
        (f'{encryption.HEAD}s1.00000000.{"A" * 44}", "text": ', "a}", " "),
    ],
    access.SECRET_NAMES: [("", "password", "x"), ("", "api_", ""), ("", "private_", "")],
    conversion._WHY_AND_WHERE.pattern: [
        *[("", "a", ""), ("", " - at `", ""), ("", " - at `$", ""), (" - at `$", "a", "")],
        ("", " - at `key in `$a", ""),
    ],
    r"[^\0-\x7f]+": [("", "é", ""), ("", "a", "")],
    r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?": [("", "1", "x"), ("1.", "1", "x"), ("1", " ", "x")],
    r"^(?:from|import) flask\b": [("", "from flask", "x"), ("", "from \n", "")],
    "(?:^|[\"'])flask\\b": [("", "'", ""), ("", "'flask", "x")],
    problems._OF_A_HOST.pattern: [
        *[("- host: '", "', port: '", ""), ("- host: 'a', port: '1',", " failed: ", "")],
        ("", "- host: '\n", ""),
        ("- host: 'a', port: '1', failed: FATAL:", " ", ""),
    ],
    r"(?:FATAL|ERROR):\s+(.+)": [("", "FATAL:", ""), ("FATAL:", " ", ""), ("", "FATAL: ", "")],
    r"^(?:- )?(?:.*connection failed: )?": [("", "connection failed:", ""), ("", "- ", "")],
    r"(?<!\\)((?:\\\\)*)\\u0000": [("", "\\", ""), ("a", "\\\\", "u000"), ("", "\\\\a", "")],
    context._PATH.pattern: [("", "a", " "), ("a:", "a", " "), ("a:b(", " ", "x")],
    **{pattern: [("", pattern.split("|")[0].split("[^")[0], "")] for pattern, _ in problems._MENDS},
}
"""For each regular expression of sqlq texts that would take long if it tried each end for each beginning."""


class Use(NamedTuple):
    where: str
    pattern: str
    is_bytes: bool
    flags: int
    methods: Set[str]


@cache
def uses() -> list[Use]:
    """Return the regular expressions in the source, each with the methods by which it is used."""
    return list(_uses())


def _uses() -> Iterator[Use]:
    for file in sorted(FOLDER.rglob("*.py")):
        if "import re\n" not in (source := file.read_text()):
            continue
        tree = ast.parse(source)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_of_re(node)]
        if not calls:
            continue
        name = ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)
        module = vars(importlib.import_module(name))
        for call in calls:
            assert isinstance(call.func, ast.Attribute)
            method, argument = call.func.attr, ast.unparse(call.args[0])
            flags = [ast.unparse(each) for each in (*call.args, *(word.value for word in call.keywords))]
            flag = sum(eval(each, module) for each in flags if re.fullmatch(r"re\.[A-Z |re.]+", each))
            methods = frozenset(_methods(tree, call) if method == "compile" else [method]) or {"search"}
            for names in LOCALS.get(argument, [{}]):
                pattern: str | bytes = eval(argument, module, names)
                text = pattern if isinstance(pattern, str) else pattern.decode()
                yield Use(f"{name}:{call.lineno}", text, text != pattern, flag, methods)


def _is_of_re(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
        and function.attr not in ("escape", "purge")
    )


def _methods(tree: ast.AST, call: ast.Call) -> Iterator[str]:
    """Yield the methods of what a `re.compile` is assigned to."""
    targets = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in targets:
            yield node.attr


def run(use: Use, text: str | bytes) -> None:
    expression: Any = re.compile(use.pattern.encode() if use.is_bytes else use.pattern, use.flags)
    for method in use.methods:
        apply: Callable[..., Any] = getattr(expression, method)
        apply("x", text) if method in ("sub", "subn") else apply(text)


def test_each_regular_expression_has_its_killing_texts() -> None:
    assert {use.pattern for use in uses()} == set(KILLERS)


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.where)
def test_a_regular_expression_ends_within_a_second(use: Use) -> None:
    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{use.pattern!r} takes over a second for {begin!r} + {again!r} * n + {end!r}")

    before = signal.signal(signal.SIGPROF, too_long)
    try:
        for begin, again, end in KILLERS[use.pattern]:
            text = begin + again * (BYTES // len(again)) + end
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            run(use, text.encode() if use.is_bytes else text)
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
