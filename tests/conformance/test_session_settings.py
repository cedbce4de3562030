"""Jobs run and are shown alike, whatever a server, a role, a URL, the environment or a hook sets."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.orm import Session

import sqlq
import sqlq.alembic
from sqlq.admin.doctor.doctor import examine
from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command
from sqlq.database.migrate import location
from sqlq.schema import version
from sqlq.schema.qualify import in_catalog
from sqlq.store import rights
from sqlq.store.jobs import insert, settle
from tests.kit import claim_on, drain, execute, wait_until
from tests.kit.callers import dsn
from tests.kit.databases import DATABASES, fresh_database
from tests.kit.postgresql import PostgreSQL

TEXT = "price in €, 😀"
LACKING = ("LATIN1", "WIN1252")  # encodings that lack a character of it

SLEEP = {"postgresql": "SELECT pg_catalog.pg_sleep(0.2)", "mariadb": "DO SLEEP(0.2)", "sqlite": "SELECT 1"}

SETTINGS = {
    "postgresql": {
        "encoding": ["LATIN1", "WIN1252", "SQL_ASCII"],
        "database": [
            *("datestyle = 'SQL, DMY'", "client_encoding = latin1", "timezone = 'Asia/Kolkata'"),
            *("standard_conforming_strings = off", "array_nulls = off", "statement_timeout = 100"),
            *("idle_in_transaction_session_timeout = 1", "default_transaction_isolation = serializable"),
            *("intervalstyle = sql_standard", "transform_null_equals = on", "bytea_output = escape"),
            *("client_min_messages = debug1", "idle_session_timeout = 100", "transaction_timeout = 100"),
        ],
        "role": ["datestyle = German", "client_encoding = sql_ascii", "lock_timeout = 1"],
        "url": ["client_encoding=win1252", "options=-c datestyle=German -c array_nulls=off"],
        "environment": [
            *("PGOPTIONS=-c standard_conforming_strings=off -c statement_timeout=100", "PGDATESTYLE=German"),
            *("PGCLIENTENCODING=LATIN1", "PGTZ=America/New_York"),
        ],
        "hook": ["SET client_encoding = latin1", "SET datestyle = 'Postgres, DMY'"],
    },
    "mariadb": {
        "server": [
            *("sql_select_limit = 1", "collation_server = latin1_german2_ci", "sql_mode = 'ANSI'"),
            *("time_zone = '+05:30'", "sql_safe_updates = 1", "completion_type = 2", "max_join_size = 1"),
            *("group_concat_max_len = 8", "max_statement_time = 0.1", "idle_transaction_timeout = 1"),
            *("default_storage_engine = MyISAM", "tx_isolation = 'SERIALIZABLE'", "autocommit = 0"),
            *("innodb_lock_wait_timeout = 1", "unique_checks = 0"),
        ],
        "url": ["charset=latin1", "charset=utf8mb3", "use_unicode=0", "sql_mode=ANSI"],
        "hook": ["SET NAMES latin1", "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"],
    },
    "sqlite": {
        "encoding": ["UTF-16le"],
        "url": ["detect_types=3", "timeout=0", "isolation_level=EXCLUSIVE"],
        "hook": [
            *("PRAGMA foreign_keys = ON", "PRAGMA recursive_triggers = ON", "PRAGMA busy_timeout = 0"),
            *("PRAGMA case_sensitive_like = ON", "PRAGMA reverse_unordered_selects = ON"),
            *("PRAGMA read_uncommitted = ON", "PRAGMA ignore_check_constraints = ON"),
            *("PRAGMA trusted_schema = OFF", "PRAGMA synchronous = OFF", "PRAGMA temp_store = MEMORY"),
            *("PRAGMA count_changes = ON", "PRAGMA full_column_names = ON"),
        ],
        "driver": ["text_factory = bytes"],
    },
}
"""The settings of each kind of database, by the place where they are set."""
ALWAYS = {setting for places in SETTINGS.values() for settings in places.values() for setting in settings[:1]}
"""The first ones of each place; the others are tried by `poe test-all`."""
TABLE = [
    pytest.param(
        *(kind, place, setting),
        id=re.sub(r"[^\w.+-]+", "-", f"{kind}-{place}-{setting}"),
        marks=() if setting in ALWAYS else pytest.mark.slow,
    )
    for kind in DATABASES
    for place, settings in SETTINGS[kind].items()
    for setting in settings
]


@contextmanager
def set_at(place: str, setting: str, url: str, server: Any, monkeypatch: Any) -> Iterator[str]:
    """Set it there while the block lasts; yields the URL to use."""
    name = make_url(url).database
    with ExitStack() as undoing:
        match place:
            case "encoding" if "sqlite" in url:
                with create_engine(url, poolclass=NullPool).connect() as conn:
                    conn.exec_driver_sql(f"PRAGMA encoding = '{setting}'")
                    conn.exec_driver_sql("CREATE TABLE host (id INTEGER)")
            case "encoding":
                url = server.url(own := f"sqlq_test_{uuid4().hex}")
                of = f"TEMPLATE template0 ENCODING {setting} LC_COLLATE 'C' LC_CTYPE 'C'"
                server._administer(f"CREATE DATABASE {own} {of}")
                undoing.callback(server.drop_database, url)
            case "database":
                server._administer(f'ALTER DATABASE "{name}" SET {setting}')
            case "role":
                server._administer(f'ALTER ROLE CURRENT_USER IN DATABASE "{name}" SET {setting}')
            case "server":
                variable = setting.partition(" =")[0]
                ((before,),) = server.administer(f"SELECT @@global.{variable}")
                server.administer(f"SET GLOBAL {setting}")
                undoing.callback(server.administer, f"SET GLOBAL {variable} = {before!r}")
            case "url":
                url = make_url(url).update_query_string(setting).render_as_string(hide_password=False)
            case "environment":
                monkeypatch.setenv(*setting.split("=", 1))
        yield url


def app_at(place: str, setting: str, url: str) -> sqlq.App:
    """Return an App at the URL, or beside an engine whose hook sets this."""
    if place not in ("hook", "driver"):
        return sqlq.App(url)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _connected(driver: Any, record: Any) -> None:
        if place == "driver":
            driver.text_factory = bytes
        else:
            driver.cursor().execute(setting)

    return sqlq.App(engine=engine)


@pytest.mark.parametrize(("kind", "place", "setting"), TABLE)
def test_jobs_run_and_are_shown_whatever_is_set(
    kind: str, place: str, setting: str, tmp_path: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = None if kind == "sqlite" else request.getfixturevalue(kind)
    with ExitStack() as stack:
        if server is None:
            url = f"sqlite:///{tmp_path / 'jobs.db'}"
        else:
            url = server.create_database()
            stack.callback(server.drop_database, url)
        url = stack.enter_context(set_at(place, setting, url, server, monkeypatch))
        app = stack.enter_context(closing(app_at(place, setting, url)))
        app.migrate()

        @app.task(name="end", max_attempts=2, backoff="0s")
        def end(how: str) -> str:
            running = sqlq.current_job()
            running.progress(1, 2, TEXT)
            if how == "fail" or (how == "retry" and running.attempt == 1):
                raise ValueError(TEXT)
            if how == "cancel":
                raise sqlq.Cancel(TEXT)
            if how == "snooze" and running.lease_token == 1:
                raise sqlq.Snooze("0s")
            return TEXT

        limited = app.task(name="limited", limit=sqlq.Limit("lines", running=1))(lambda back: back)
        made = [app.enqueue(end.new(how)) for how in ("finish", "retry", "snooze", "fail", "cancel")]
        made += app.enqueue_many([limited.new("C:\\new 'line'").set(unique_key=f"key {n}") for n in range(3)])
        drain(app)
        ended = [app.jobs.get(job.id) for job in made]
        states = [str(job.state) for job in ended]
        assert states == [*["finished"] * 3, "failed", "cancelled", *["finished"] * 3]
        assert [job.result for job in ended] == [*[TEXT] * 3, None, None, *["C:\\new 'line'"] * 3]
        # the database refuses the whole text because of one character that it lacks
        assert ended[3].message == (r"price in \u20ac, \ud83d\ude00" if setting in LACKING else TEXT)
        assert len(app.jobs.list()) == len(made)
        with app.database.read() as conn:  # longer than a timeout of the table
            conn.exec_driver_sql(SLEEP[kind])
        if place in ("hook", "driver"):
            return
        for words in (["status"], ["doctor"], ["jobs"]):
            context = Context()
            done = CliRunner(env={"COLUMNS": "300"}).invoke(command, ["-d", url, *words], obj=context)
            context.app().close()
            # the doctor has a thing to do on a server without fsync
            assert done.exit_code == 0 or "to do" in done.output, (words, done.output, done.exception)


GOLDEN, SOURCES = Path(__file__).parents[1] / "sql" / "postgresql", Path(sqlq.__file__).parent
RULES = {"length", "statement_timestamp", "timezone"}  # of the tables' own rules and defaults
BY_SQLALCHEMY = {"current_schema"}  # which SQLAlchemy itself calls unqualified when it connects
BASES = {"text": ["text", "varchar"], "int8": ["int8", "int4"], "int4": ["int4", "int2"]}
ARRAYS = ("_text", "_varchar", "_int8", "_int4", "_bool", "_timestamptz")
IN_DOMAINS = {"timestamp": "timestamptz", "smallint": "int2", "integer": "int4", "bigint": "int8"}
MOST = 400  # rivals of one name


def names() -> tuple[set[str], set[str]]:
    """Return the functions and operators of the golden statements, and of all that the source names."""
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
    """A role that may create in the schema `public`, and nothing else.

    PostgreSQL takes the best fit of an unqualified name from every schema of the path. So it makes two rivals
    for each function, operator and type: one fits as well, one fits better. Each run of them is counted.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # no rollback takes back what a sequence counts
        execute(engine, "DROP ROLE IF EXISTS mallory; CREATE ROLE mallory; CREATE SEQUENCE public.hits")
        execute(engine, "GRANT ALL ON SEQUENCE public.hits TO PUBLIC")
        execute(engine, "GRANT USAGE, CREATE ON SCHEMA public TO mallory")

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
            made = [_function("is_hostile()", "bool")]
            domain = "CREATE DOMAIN public.{} AS pg_catalog.text CHECK (public.is_hostile())"
            made += map(domain.format, _TYPES)
            made += [_function(f"{name}({', '.join(kinds)})", result) for name, kinds, result in wanted]
            for number, (name, kinds, result) in enumerate(signs):
                own, sides = f"is_{len(known)}_{number}", f"LEFTARG = {kinds[0]}, RIGHTARG = {kinds[1]}"
                made.append(_function(f"{own}({', '.join(kinds)})", result))
                made.append(f"CREATE OPERATOR public.{name} (FUNCTION = public.{own}, {sides})")
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
    return [f"pg_catalog.{base}" for base in bases] + [each for base in bases for each in known.get(base, ())]


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
        assert not n, "not this one"
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

    after = app.task(name="after")(lambda ended: None)
    limit = sqlq.Limit("k", running=1, rate="100/1s")
    declared: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (fails, {}),
        "follows": (fails, {"on_failure": after, "on_success": after}),
        "completes": (completes, {}),
        "limited": (fails, {"limit": limit}),
        "serial": (fails, {"limit": sqlq.Serial("s")}),
        "moves": (moves, {}),
    }
    return {
        name: app.task(name=name, max_attempts=2, backoff="0s", **options)(handler)
        for name, (handler, options) in declared.items()
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
    with psycopg.connect(dsn(url)) as theirs:
        app.enqueue(plain.new(), session=theirs)
        app.enqueue(tasks["limited"].new(), session=theirs)
        theirs.execute(*app.statement(plain.new().set(unique_key="statement")))
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
    app.database.run(lambda conn: rights.apply(conn, "reader", "mallory", "public"))
    assert not [found.said for found in examine(app.database) if "could not look" in found.said]
    engine.dispose()


@pytest.mark.parametrize("path", ["public", "public, pg_catalog"])
def test_no_function_of_another_role_runs(postgresql: PostgreSQL, path: str) -> None:
    with under_attack(postgresql, path) as (url, mallory), closing(sqlq.App(url, schema="public")) as app:
        work_through(app, url)
        assert mallory.hits() == 0


RUNS = ("text", "exec_driver_sql", "run_statement", "execute")
MIGRATES = ("database/postgresql/online.py", "database/migrate.py")  # it looks into pg_catalog alone


def test_each_statement_that_is_written_by_hand_is_qualified() -> None:
    """Also those that no caller above comes by."""
    seen, bare = 0, []
    for file in SOURCES.rglob("*.py"):
        module = ast.parse(file.read_text())
        assigned = [node for node in module.body if isinstance(node, ast.Assign)]
        constants = {ast.unparse(target): node.value for node in assigned for target in node.targets}
        for call in ast.walk(module):
            if not (isinstance(call, ast.Call) and call.args and ast.unparse(call.func).endswith(RUNS)):
                continue
            said = constants.get(ast.unparse(call.args[0]), call.args[0])
            statement = str(said.value) if isinstance(said, ast.Constant) else ""
            if statement.strip().startswith("SELECT"):
                seen += 1
                is_ours = not re.search("sqlite_|pragma_|main[.]|information_schema[.]|@@", statement)
                if is_ours and in_catalog(statement) != statement:
                    bare.append(f"{file.relative_to(SOURCES)}: {statement}")
    assert seen > 10
    assert [each for each in bare if not each.startswith(MIGRATES)] == []
