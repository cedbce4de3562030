"""A role that may create in a schema of the search_path cannot make sqlq's statements run its code.

PostgreSQL looks for an unqualified name in every schema of the path, and takes the best fit. So another role
makes two rivals in the schema of the tables for each function, operator and type of sqlq's statements. One
fits as well, the other fits better. Each run of a rival is counted.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

import sqlq
import sqlq.alembic
from sqlq.admin.doctor.doctor import examine
from sqlq.database.migrate import location
from sqlq.schema import version
from sqlq.schema.qualify import in_catalog
from sqlq.store import rights
from sqlq.store.jobs import insert, settle
from sqlq.testing import drain
from tests.kit import claim_on, execute, wait_until
from tests.kit.callers import dsn
from tests.kit.databases import fresh_database
from tests.kit.postgresql import PostgreSQL

GOLDEN = Path(__file__).parents[1] / "sql" / "postgresql"
SOURCES = Path(sqlq.__file__).parent
RULES = {"length", "statement_timestamp", "timezone"}
"""Functions that the tables' own rules and defaults call, beside the statements."""
BY_SQLALCHEMY = {"current_schema"}
"""Functions that SQLAlchemy itself calls unqualified when it connects."""
BASES = {"text": ["text", "varchar"], "int8": ["int8", "int4"], "int4": ["int4", "int2"]}
ARRAYS = ("_text", "_varchar", "_int8", "_int4", "_bool", "_timestamptz")
IN_DOMAINS = {"timestamp": "timestamptz", "smallint": "int2", "integer": "int4", "bigint": "int8"}
MOST = 400
"""At most this many rivals of one name are made."""


def names() -> tuple[set[str], set[str]]:
    """Return the functions and operators of sqlq's statements: of the golden ones, and of all that the source
    names."""
    said = "".join(file.read_text() for file in GOLDEN.glob("*.sql"))
    written = "".join(file.read_text() for file in SOURCES.rglob("*.py"))
    functions = set(re.findall(r"pg_catalog\.([a-z_]+)\(", said + written)) | RULES
    functions |= set(re.findall(r"\bfunc\.([a-z_]+)\(", written))
    functions |= set(re.findall(r"(?<![\w.])([a-z_]+)\(", "".join(re.findall(r'"SELECT[^"]*"', written))))
    operators = set(re.findall(r"OPERATOR\(pg_catalog\.([^)]+)\)", said)) | {"~~", "=", "<>", "||"}
    return functions - BY_SQLALCHEMY, operators


def domains() -> dict[str, list[str]]:
    """Return the domains of sqlq by the types that they are of."""
    found: dict[str, list[str]] = {}
    script = (location() / "versions" / "0001" / "postgresql.sql").read_text()
    for name, base in re.findall(r"CREATE DOMAIN \{prefix\}(\w+) AS (\w+)", script):
        base = base.lower()
        found.setdefault(IN_DOMAINS.get(base, base), []).append(f"public.{name}")
    return found


class Mallory:
    """A role that may create in the schema `public`, and nothing else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        execute(engine, "DROP ROLE IF EXISTS mallory")
        execute(engine, "CREATE ROLE mallory")
        execute(engine, "GRANT USAGE, CREATE ON SCHEMA public TO mallory")
        execute(engine, "CREATE SEQUENCE public.hits")  # which no rollback takes back
        execute(engine, "GRANT ALL ON SEQUENCE public.hits TO PUBLIC")

    def hits(self) -> int:
        called = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM public.hits"
        return int(execute(self._engine, called))

    def plants(self, known: dict[str, list[str]]) -> None:
        """Make what fits as well as what the catalogue has, or better; `known` are domains by their types."""
        functions, operators = names()
        with self._engine.begin() as conn:
            conn.exec_driver_sql("SET LOCAL search_path = pg_catalog")
            wanted = [*_wanted(conn, _FUNCTIONS, sorted(functions), known)]
            signs = [*_wanted(conn, _OPERATORS, sorted(operators), known)]
            assert {name for name, *_ in (*wanted, *signs)} >= {"length", "min", "unnest", "=", "<>", "||"}
            made = [
                _function("is_hostile()", "bool"),
                *(
                    f"CREATE DOMAIN public.{kind} AS pg_catalog.text CHECK (public.is_hostile())"
                    for kind in _TYPES
                ),
            ]
            made += [_function(f"{name}({', '.join(kinds)})", result) for name, kinds, result in wanted]
            for number, (name, kinds, result) in enumerate(signs):
                made.append(_function(f"is_{len(known)}_{number}({', '.join(kinds)})", result))
                made.append(
                    f"CREATE OPERATOR public.{name} (FUNCTION = public.is_{len(known)}_{number}, "
                    f"LEFTARG = {kinds[0]}, RIGHTARG = {kinds[1]})"
                )
            conn.exec_driver_sql("SET LOCAL ROLE mallory")
            conn.exec_driver_sql(_RUN)
            conn.execute(text("SELECT public.run(:made)"), {"made": made})


_TYPES = ("json", "timestamptz", "timestamp", "int8", "bool")

_RUN = """
CREATE OR REPLACE FUNCTION public.run(made pg_catalog.text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE statement pg_catalog.text;
BEGIN
    FOREACH statement IN ARRAY made LOOP
        BEGIN EXECUTE statement; EXCEPTION WHEN duplicate_function OR duplicate_object THEN END;
    END LOOP;
END $$"""


def _function(signature: str, result: str) -> str:
    return (
        f"CREATE FUNCTION public.{signature} RETURNS pg_catalog.{result} LANGUAGE plpgsql AS $f$ BEGIN "
        f"PERFORM pg_catalog.nextval('public.hits'); RAISE EXCEPTION 'hostile {signature}'; END $f$"
    )


_TYPE = "(SELECT typname FROM pg_catalog.pg_type WHERE pg_type.oid = {})"
_FUNCTIONS = f"""
SELECT proname, ARRAY(SELECT {_TYPE.format("t")}::text FROM unnest(proargtypes::oid[]) t),
       {_TYPE.format("prorettype")}
  FROM pg_catalog.pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY(:names)
   AND pronargs <= 3
"""
_OPERATORS = f"""
SELECT oprname, ARRAY[{_TYPE.format("oprleft")}, {_TYPE.format("oprright")}]::text[],
       {_TYPE.format("oprresult")}
  FROM pg_catalog.pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprname = ANY(:names)
   AND oprleft <> 0
"""
_OURS = {"text", "varchar", "int8", "int4", "int2", "timestamptz", "bool", "float8", "interval", "json"}
_OURS |= {"name", "xid", "_aclitem", "_text", "numeric"}


def _wanted(
    conn: Connection, query: str, wanted: list[str], known: dict[str, list[str]]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for name, kinds, result in conn.execute(text(query), {"names": wanted}).all():
        each = [_kinds(kind, known) for kind in kinds]
        returns = result if result in _OURS else "text"
        for chosen in itertools.islice(itertools.product(*each), MOST):
            if (name, chosen) not in seen:
                seen.add((name, chosen))
                yield name, chosen, returns


def _kinds(kind: str, known: dict[str, list[str]]) -> list[str]:
    """Return types that what takes this one is called with: itself, those that become it, and domains."""
    if kind.startswith("any") and kind != "any":
        return [*ARRAYS] if "array" in kind else ["text", "int8"]
    if kind not in _OURS:
        return []  # oid among them, which SQLAlchemy itself compares when it connects
    bases = BASES.get(kind, [kind])
    return [f"pg_catalog.{base}" for base in bases] + [
        domain for base in bases for domain in known.get(base, ())
    ]


@contextmanager
def under_attack(server: PostgreSQL, path: str) -> Iterator[tuple[str, Mallory]]:
    """A database with this search_path, in which what is hostile was there before sqlq's tables."""
    with fresh_database(server) as url:
        engine = create_engine(url)
        mallory = Mallory(engine)
        mallory.plants({})
        with engine.begin() as conn:
            conn.exec_driver_sql(f'ALTER DATABASE "{make_url(url).database}" SET search_path = {path}')
        engine.dispose()
        with closing(sqlq.App(url, schema="public")) as app:
            app.migrate()
        mallory.plants(domains())
        engine.dispose()
        yield url, mallory
        engine.dispose()


def declare(app: sqlq.App, engine: Engine) -> dict[str, Any]:
    def fails(n: int = 0) -> int:
        if n:
            raise ValueError("not this one")
        return n

    def completes(n: int = 0) -> None:
        job = sqlq.current_job()
        with Session(engine) as session, session.begin():
            job.checkpoint(session, n)
        job.progress(1, 2, "half")
        with Session(engine) as session, session.begin():
            job.complete(session, n)

    def moves(n: int = 0) -> None:
        job = sqlq.current_job()
        if job.queue == "default" and job.attempt == 1:
            raise sqlq.Retry("0s", priority=3, queue="other")

    options: dict[str, Any] = {"max_attempts": 2, "backoff": "0s"}
    after = app.task(name="after")(lambda ended: None)
    limit = sqlq.Limit("k", running=1, rate="100/1s")
    return {
        "plain": app.task(name="plain", **options)(fails),
        "follows": app.task(name="follows", on_failure=after, on_success=after, **options)(fails),
        "completes": app.task(name="completes", **options)(completes),
        "limited": app.task(name="limited", limit=limit, **options)(fails),
        "serial": app.task(name="serial", limit=sqlq.Serial("s"), **options)(fails),
        "moves": app.task(name="moves", **options)(moves),
    }


def work_through(app: sqlq.App, url: str) -> None:
    """Do all that callers, workers and operators do."""
    engine = create_engine(url)
    with engine.begin() as conn:  # a migration of the host's own
        sqlq.alembic.upgrade(Operations(MigrationContext.configure(conn)), version.HEAD, schema="public")
    tasks = declare(app, engine)
    plain = tasks["plain"]
    with Session(engine) as session, session.begin():
        for task in tasks.values():
            app.enqueue(task.new(0), session=session)
            app.enqueue_many([task.new(1), task.new(2).set(priority=3)], session=session)
        for conflict, more in {"keep": {}, "replace": {}, "debounce": {"max_wait": "1m"}}.items():
            keyed = plain.new().set(unique_key=conflict, on_conflict=conflict, delay="1s", **more)
            for _ in range(2):
                app.enqueue(keyed, session=session)
        for _ in range(2):
            app.enqueue(plain.new().set(unique_key="p", unique_until="pruned"), session=session)
        flow = sqlq.Flow("order")
        first = flow.add(plain.new(0))
        second = flow.add(plain.new(1))
        flow.add(plain.new(0), after=[first, second])
        flow.add(plain.new(0), after=[second], when="failure")
        app.enqueue(flow, session=session)
    with psycopg.connect(dsn(url)) as conn:
        app.enqueue(plain.new(), session=conn)
        app.enqueue(tasks["limited"].new(), session=conn)
        conn.execute(*app.statement(plain.new().set(unique_key="statement")))
    app.schedule("beat", plain.new(), every="1s")
    waiting = app.enqueue(plain.new().set(delay="1h"))
    late = app.enqueue(plain.new().set(queue="late", start_within="1ms"))
    with app.worker():
        assert app.result(app.enqueue(plain.new(0)), timeout="30s") == 0
        wait_until(lambda: any(job.schedule for job in app.jobs.list(state="finished")), what="a tick")
        wait_until(lambda: app.jobs.get(late.id).state == "cancelled", what="the end of what is late")
    drain(app)
    assert app.jobs.cancel([waiting.id])
    failed = app.jobs.list(state="failed")
    assert failed
    assert app.jobs.retry([failed[0].id])
    assert app.jobs.replay(task="plain")
    app.queues.pause("default")
    drain(app)
    app.queues.resume("default")
    drain(app)
    app.queues.list(), app.workers.list(), app.schedules.list(), app.limits.list(), app.flows.list()
    with app.database.begin() as held:
        insert.insert(held, [plain.new()])
        claim_on(held, limit=1, owner="dead", lease_ms=-1_000)
        settle.rescue(held)
    app.jobs.prune(finished="0s", failed="0s")
    with app.database.begin() as conn:
        rights.apply(conn, "reader", "mallory", "public")
    assert not [found.said for found in examine(app.database) if "could not look" in found.said]
    engine.dispose()


@pytest.mark.parametrize("path", ["public", "public, pg_catalog"])
def test_no_function_of_another_role_runs(postgresql: PostgreSQL, path: str) -> None:
    with under_attack(postgresql, path) as (url, mallory), closing(sqlq.App(url, schema="public")) as app:
        work_through(app, url)
        assert mallory.hits() == 0


RUNS = ("text", "exec_driver_sql", "run_statement", "execute")
MIGRATES = ("database/postgresql/online.py", "database/migrate.py")
"""While a migration runs nothing is looked for outside of pg_catalog."""


def test_each_statement_that_is_written_by_hand_is_qualified() -> None:
    """Also those that no caller above comes by."""
    seen, bare = 0, []
    for file in SOURCES.rglob("*.py"):
        module = ast.parse(file.read_text())
        constants = {
            target.id: node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(module):
            if not (isinstance(call, ast.Call) and call.args and ast.unparse(call.func).endswith(RUNS)):
                continue
            given = call.args[0]
            said = constants.get(given.id, given) if isinstance(given, ast.Name) else given
            statement = str(said.value) if isinstance(said, ast.Constant) else ""
            if statement.strip().startswith("SELECT"):
                seen += 1
                is_ours = not re.search("sqlite_|pragma_|main[.]|information_schema[.]|@@", statement)
                if is_ours and in_catalog(statement) != statement:
                    bare.append(f"{file.relative_to(SOURCES)}: {statement}")
    assert seen > 10
    assert [each for each in bare if not each.startswith(MIGRATES)] == []
