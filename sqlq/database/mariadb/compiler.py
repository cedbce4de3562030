"""Writes statements of the store for MariaDB, so that they find the rows they change by the primary key."""

from __future__ import annotations

from typing import Any

from sqlq.schema import qualify


def compiler(kind: type[Any]) -> Any:
    class Compiler(kind):  # type: ignore[misc]  # a class that is known when it runs
        def visit_length_func(self, function: Any, **kw: Any) -> str:
            return f"CHAR_LENGTH{self.function_argspec(function, **kw)}"

        def visit_if__func(self, function: Any, **kw: Any) -> str:
            return f"IF{self.function_argspec(function, **kw)}"

        def update_tables_clause(self, update: Any, table: Any, others: Any, **kw: Any) -> str:
            # guard: rows-are-changed-by-their-ids
            tables = [self.process(each, asfrom=True, **kw) for each in (*others, table)]
            return f"{' STRAIGHT_JOIN '.join(tables)} FORCE INDEX (PRIMARY)"

        def delete_table_clause(self, delete: Any, table: Any, others: Any, **kw: Any) -> str:
            said = self.process(table, asfrom=True, **kw)
            return f"{self.preparer.quote(table.name)} USING {said} FORCE INDEX (PRIMARY)"

    return Compiler


qualify.COMPILERS["mariadb"] = compiler
