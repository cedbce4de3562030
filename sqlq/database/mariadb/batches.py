"""Batches of rows on MariaDB: JSON, which JSON_TABLE turns into a table."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, bindparam, text
from sqlalchemy.dialects import mysql
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import Double, Integer

from sqlq.schema.types import Moment, naive

TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"


def json_type(kind: type[Any]) -> str:
    return next((said for known, said in _TYPES.items() if issubclass(kind, known)), TEXT)


_TYPES = {BigInteger: "BIGINT", Integer: "INT", Moment: "DATETIME(6)", Double: "DOUBLE"}


def json_table(name: str, columns: str, types: Mapping[str, Any]) -> FromClause:
    """Return a table of the rows of a JSON array, a parameter of this name."""
    rows = text(f"SELECT * FROM JSON_TABLE(:{name}, '$[*]' COLUMNS ({columns})) AS given")
    return rows.bindparams(bindparam(name, type_=mysql.LONGTEXT)).columns(**types).subquery(name)


def in_json(moment: datetime) -> str:
    return str(naive(moment))
