"""Writes statements whose names lead to `pg_catalog`, or to sqlq's own schema, whatever the search_path is.

PostgreSQL looks for an unqualified function, operator or type in every schema of the session's path. It takes
the one that fits its arguments best, not the one of the first schema. A role that may create in one of these
schemas could run its code with the rights of sqlq's session. In a caller's session the path is the caller's,
and through a pooler it changes. So the statement itself names the schema, in `pg_catalog.length(…)` and
`OPERATOR(pg_catalog.=)`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from sqlalchemy.sql import operators
from sqlalchemy.sql.compiler import OPERATORS, GenericTypeCompiler, SQLCompiler
from sqlalchemy.types import NullType, String

_SYNTAX = ("array", "coalesce", "greatest", "least")
"""They look like functions, but the parser handles them."""

_NAMES = re.compile(
    r"""'(?:[^']|'')*'  # a text, which is left as it is
    | (?<=\s) (?P<operator> <> | <= | ~~ | >= | ->>? | \|\| | [=<>+/-] | (?<!SELECT\s)\* ) (?=\s)
    | (?<![\w.\]]) (?<!AS\s) (?<!RECURSIVE\s) (?P<function> [a-z]\w*) (?=\()""",
    re.VERBOSE,
)


def in_catalog(sql: str) -> str:
    """Return a statement written by hand with the schema of each operator and function.

    An operator stands between blanks; an assignment (`SET a=1`) and a star (`count(*)`) do not. With a schema
    all operators have one precedence, from left to right, tighter than IS, NOT and AND. Use brackets for any
    other order. Do not use IN, BETWEEN, LIKE, IS DISTINCT FROM, NULLIF, USING and NATURAL: their operators
    take no schema. Write the schema of types by hand.
    """
    return _NAMES.sub(_named, sql)


def _named(match: re.Match[str]) -> str:
    if operator := match["operator"]:
        return f"OPERATOR(pg_catalog.{operator})"
    function = match["function"]
    return f"pg_catalog.{function}" if function and function not in _SYNTAX else match[0]


def written(build: Callable[..., str]) -> Callable[..., str]:
    """Wrap a function that writes a statement for PostgreSQL: qualify the statement, and cache it by
    arguments."""
    return cache(lambda *arguments, **named: in_catalog(build(*arguments, **named)))


def qualified(dialect: Any) -> Any:
    """Return a copy of a dialect that writes each statement as sqlq wants it: on PostgreSQL with all names
    qualified. A dialect without a compiler of sqlq's own is returned unchanged."""
    compiler = COMPILERS.get(dialect.name)
    if compiler is None:
        return dialect
    own = vars(dialect).get(_QUALIFIED)
    if own is None:
        own = copy.copy(dialect)
        own.statement_compiler = type("Compiler", (compiler, dialect.statement_compiler), {})
        if dialect.name == "postgresql":
            types = type(dialect.type_compiler_instance)
            own.type_compiler_instance = type("TypeCompiler", (_Types, types), {})(own)
        setattr(own, _QUALIFIED, own)
        if dialect.server_version_info:  # else a first connection has yet to report its version
            setattr(dialect, _QUALIFIED, own)
    return own


_QUALIFIED = "_sqlq_qualified"


class _Types(GenericTypeCompiler):
    """Writes types with their schema."""

    def visit_TEXT(self, type_: Any, **kw: Any) -> str:  # noqa: N802 - SQLAlchemy's name
        return f"pg_catalog.{super().visit_TEXT(type_, **kw)}"


COMPILER: Any = SQLCompiler
"""Its methods have no types, or those that differ between releases of SQLAlchemy."""


class _Names(COMPILER):  # type: ignore[misc]  # COMPILER is Any: see above
    """Writes functions and operators with their schema."""

    def visit_function(self, func: Any, *args: Any, **kw: Any) -> str:
        text: str = super().visit_function(func, *args, **kw)
        # with several arrays the parser handles it, by this name alone
        is_syntax = func.name in _SYNTAX or (func.name == "unnest" and len(func.clauses) > 1)
        return text if is_syntax else f"pg_catalog.{text}"

    def visit_textclause(self, textclause: Any, *args: Any, **kw: Any) -> str:
        is_part = bool(self.stack)  # a caller writes whole statements itself
        text: str = super().visit_textclause(textclause, *args, **kw)
        return in_catalog(text) if is_part else text

    def _generate_generic_binary(
        self, binary: Any, opstring: str, eager_grouping: bool = False, **kw: Any
    ) -> str:
        is_part = kw.pop("_in_operator_expression", False)
        kw |= {"_in_operator_expression": True, "_binary_op": binary.operator}
        left, right = (self.process(side, **kw) for side in (binary.left, binary.right))
        operator = opstring.strip()
        if operator in ("IN", "NOT IN"):
            if right.startswith("(__[POSTCOMPILE_"):
                known = String() if isinstance(binary.left.type, NullType) else binary.left.type
                kind = self.dialect.type_compiler_instance.process(known)
                right = f"(ARRAY[{right[1:-1]}]::{kind.partition('(')[0]}[])"
            text = f"{left} OPERATOR(pg_catalog.=) ANY {right}"
            return text if operator == "IN" else f"(NOT {text})"
        if operator.endswith("DISTINCT FROM"):  # arrays are equal where both hold NULL
            left, right = f"ARRAY[{left}]", f"ARRAY[{right}]"
            operator = "=" if "NOT" in operator else "<>"
        if not operator.startswith("IS"):
            operator = f"OPERATOR(pg_catalog.{operator})"
        # all qualified operators have one precedence
        return f"({left} {operator} {right})" if is_part else f"{left} {operator} {right}"

    def visit_expression_clauselist(self, clauselist: Any, **kw: Any) -> str:
        if clauselist.operator in (operators.and_, operators.or_):
            return str(super().visit_expression_clauselist(clauselist, **kw))
        operator = f" OPERATOR(pg_catalog.{OPERATORS[clauselist.operator].strip()}) "
        kw["_in_operator_expression"] = True
        return f"({operator.join(self.process(part, **kw) for part in clauselist.clauses)})"

    def for_update_clause(self, select: Any, **kw: Any) -> str:
        # SQLAlchemy before 2.0.39 passes the flags of an outer FOR UPDATE OF to one inside its subqueries
        inner = {key: value for key, value in kw.items() if key not in ("ashint", "use_schema")}
        return str(super().for_update_clause(select, **inner))

    def visit_grouping(self, grouping: Any, *args: Any, **kw: Any) -> str:
        return str(super().visit_grouping(grouping, *args, **kw | {"_in_operator_expression": False}))

    def visit_like_op_binary(self, binary: Any, operator: Any, **kw: Any) -> str:
        return self._generate_generic_binary(binary, "~~", **kw)

    def visit_floordiv_binary(self, binary: Any, operator: Any, **kw: Any) -> str:
        return self._generate_generic_binary(binary, "/", **kw)

    def visit_empty_set_op_expr(self, type_: Any, expand_op: Any, **kw: Any) -> str:
        return ""  # of an array


COMPILERS: dict[str, type[SQLCompiler]] = {"postgresql": _Names}
"""The classes that write sqlq's own statements, each with the compiler of a dialect of SQLAlchemy's."""
