"""Writes statements of the store for MariaDB, so that they find the rows they change by the primary key."""

from __future__ import annotations

from typing import Any

from sqlq.schema import qualify

IS_OWN = "sqlq_is_own"
"""The attribute of a dialect whose connections are sqlq's own."""


class _Compiler(qualify.COMPILER):  # type: ignore[misc]  # Any, as its docstring says
    def visit_length_func(self, function: Any, **kw: Any) -> str:
        return f"CHAR_LENGTH{self.function_argspec(function, **kw)}"

    def visit_if__func(self, function: Any, **kw: Any) -> str:
        return f"IF{self.function_argspec(function, **kw)}"

    def visit_update(self, update: Any, *args: Any, **kw: Any) -> str:
        return self._without_waits(super().visit_update(update, *args, **kw))

    def visit_delete(self, delete: Any, *args: Any, **kw: Any) -> str:
        return self._without_waits(super().visit_delete(delete, *args, **kw))

    def _without_waits(self, said: str) -> str:
        """Write a change of rows that are locked already so that it waits for nothing. Producers lock a
        unique key before its job, workers the job before its key. So only one of them may wait. A handler
        that completes its job in a transaction of its own is no worker."""
        # guard: workers-wait-for-no-key
        is_locked = IS_OWN in vars(self.dialect) and not self.binds.keys().isdisjoint(("sqlq_ids", "batch"))
        return f"SET STATEMENT innodb_lock_wait_timeout = 0 FOR {said}" if is_locked else said

    def update_tables_clause(self, update: Any, table: Any, others: Any, **kw: Any) -> str:
        tables = [self.process(each, asfrom=True, **kw) for each in (*others, table)]
        # guard: rows-are-changed-by-their-ids
        return f"{' STRAIGHT_JOIN '.join(tables)} FORCE INDEX (PRIMARY)"

    def delete_table_clause(self, delete: Any, table: Any, others: Any, **kw: Any) -> str:
        return str(self.process(table, asfrom=True, **kw))

    def delete_extra_from_clause(self, delete: Any, table: Any, others: Any, hints: Any, **kw: Any) -> str:
        return f"USING {self.update_tables_clause(delete, table, others, **kw)}"


qualify.COMPILERS["mariadb"] = _Compiler
