"""A trigger that rejects every transition the contract does not list, and every change of a lease token but
its four.

In a test's database it watches every write: of sqlq, another process, or the test by mistake. A rejection is
an error of the database whose text begins with `ILLEGAL`. A worker survives such errors, so a test that runs
workers looks for the word in their logs.

Some rules concern several rows. On PostgreSQL deferred triggers judge them at COMMIT. SQLite has none, so
there the order of statements counts: first the copy, then the delete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Connection, Engine, text

from sqlq.admin.flows import SKIPPED
from sqlq.config.constants import ERROR_BYTES, MAX_ATTEMPTS
from sqlq.schema.tables import LARGEST_TOKEN, MAX_COUNT
from sqlq.schema.types import MARIADB_NOW, POSTGRESQL_NOW, SQLITE_NOW

ILLEGAL = "illegal transition:"


class Rule(NamedTuple):
    """A condition that must not hold, for one kind of write.

    `{now}`, `{is}` and `{is not}` are each database's words. `{before}` is the table of a job before it
    ended. A rule with `at_commit` is judged there alone.
    """

    table: str
    event: str
    says: str
    when: str
    at_commit: bool = False


_CLAIMS = "OLD.reserved_at IS NULL AND NEW.reserved_at IS NOT NULL"
_STAYS = "OLD.reserved_at IS NOT NULL AND NEW.reserved_at IS NOT NULL"
_GIVES_UP = "OLD.reserved_at IS NOT NULL AND NEW.reserved_at IS NULL"
_WAITS = "OLD.reserved_at IS NULL AND NEW.reserved_at IS NULL"
_MADE_ANEW = (
    f"({_WAITS} AND NEW.unique_key IS NOT NULL AND NEW.lease_token = OLD.lease_token AND NEW.attempts = 0"
    " AND NEW.releases = 0 AND NEW.losses = 0 AND NEW.errors IS NULL AND NEW.cursor IS NULL)"
)
"""A waiting job is replaced by one of the same unique key."""
_A_WAIT = "b.blocked_by = 'event' AND b.task = 'sqlq.wait'"
"""T22: a signal, or its timeout, ends a step that waits for one."""
_UNBLOCKS = "OLD.blocked_by = 'flow' AND (NEW.blocked_by IS NULL OR NEW.blocked_by <> 'flow')"
_IDENTITY = ("id", "queue", "unique_key", "unique_until", "flow_id", "limit_key", "replay_of", "created_at")
_NEXT_TOKEN = f"(CASE WHEN OLD.lease_token < {LARGEST_TOKEN} THEN OLD.lease_token + 1 ELSE 1 END)"
_REVOKES = f"NEW.lease_token = {_NEXT_TOKEN}"


def _changed(*columns: str) -> str:
    return "(" + " OR ".join(f"NEW.{c} {{is not}} OLD.{c}" for c in columns) + ")"


def _rules(owners_may_be_known_dead: bool) -> list[Rule]:
    unexpired = "1 = 0" if owners_may_be_known_dead else "OLD.lease_expires_at > {now}"
    # the token a job ends under: its owner's, or one more where it was taken from its owner in the same
    # statement
    finished_fits = (
        "b.id = NEW.id AND b.attempts = NEW.attempts AND ("
        "(b.lease_token = NEW.lease_token AND (b.reserved_at IS NOT NULL OR NEW.outcome = 'cancelled' OR "
        f"{_A_WAIT})) OR "
        "(b.lease_token + 1 = NEW.lease_token AND b.reserved_at IS NOT NULL AND NEW.outcome = 'cancelled'))"
    )
    failed_fits = (
        "b.id = NEW.id AND b.attempts = NEW.attempts AND "
        f"(b.reserved_at IS NOT NULL OR {_A_WAIT} AND NEW.reason = 'timeout') AND (b.lease_token = "
        "NEW.lease_token OR (b.lease_token + 1 = NEW.lease_token AND NEW.reason = 'worker_lost'))"
    )
    skipped = f"NEW.flow_id IS NOT NULL AND NEW.outcome = 'finished' AND NEW.reason = '{SKIPPED}'"
    fate_fits = "e.id = OLD.id AND e.lease_token IN (OLD.lease_token, OLD.lease_token + 1)"
    rules = {
        ("jobs", "INSERT"): {
            # T1, T13
            "a new job has a history": (
                "NEW.lease_token = 0 AND (NEW.attempts <> 0 OR NEW.releases <> 0 OR NEW.losses <> 0 OR "
                "NEW.errors IS NOT NULL)"
            ),
            "a job begins reserved": "NEW.reserved_at IS NOT NULL",
            "a job with a token comes back that did not fail with it": (
                "NEW.lease_token <> 0 AND NOT EXISTS (SELECT 1 FROM failed_jobs f WHERE f.id = NEW.id AND "
                "f.lease_token = NEW.lease_token)"
            ),
            "a job comes back with attempts": "NEW.lease_token <> 0 AND (NEW.attempts <> 0 OR NEW.releases <> 0)",
            "a finished job comes back": "EXISTS (SELECT 1 FROM finished_jobs f WHERE f.id = NEW.id)",
            # T16 to T18
            "a job is blocked by a flow that it is not in": "NEW.blocked_by = 'flow' AND NEW.flow_id IS NULL",
            # T16, T19, T5L to T8L, T13L
            "in no line though it is under a limit": "NEW.limit_key IS NOT NULL AND NEW.blocked_by IS NULL",
        },
        ("jobs", "UPDATE"): {
            # whatever happens to it
            "what a job is was changed": f"{_changed('task', 'payload', 'timeout_ms', 'headers', 'label', 'backoff')} AND NOT {_MADE_ANEW}",
            "which job it is was changed": _changed(*_IDENTITY),
            "how often it may be tried was changed": f"{_changed('max_attempts')} AND NOT (OLD.max_attempts IS NULL AND {_CLAIMS}) AND NOT {_MADE_ANEW}",
            "until when it has to start was changed": f"{_changed('start_by')} AND NOT ({_GIVES_UP} AND NEW.start_by IS NULL) AND NOT {_MADE_ANEW}",
            # T20
            "a cursor was saved by somebody who did not hold the job": f"{_changed('cursor')} AND NOT ({_STAYS} AND NEW.lease_token = OLD.lease_token) AND NOT {_MADE_ANEW}",
            **{
                f"what follows {column} was changed": f"{_changed(column)} AND NOT (OLD.{column} IS NULL AND {_CLAIMS}) AND NOT {_MADE_ANEW}"
                for column in ("on_success", "on_failure")
            },
            "the token fell or jumped": f"NEW.lease_token NOT IN (OLD.lease_token, {_NEXT_TOKEN})",
            "blocked by its flow after it was not": f"NEW.blocked_by = 'flow' AND {_changed('blocked_by')}",
            "claimed while it was blocked": f"{_CLAIMS} AND OLD.blocked_by IS NOT NULL",
            "unblocked before its time": f"{_UNBLOCKS} AND NEW.blocked_by IS NULL AND NEW.available_at < OLD.due_at",
            "unblocked without the success that it waits for": (
                f"{_UNBLOCKS} AND EXISTS (SELECT 1 FROM sqlq_edges e WHERE e.job_id = NEW.id AND e.on_outcome = "
                "'success' AND NOT EXISTS (SELECT 1 FROM finished_jobs f WHERE f.id = e.depends_on AND f.outcome "
                "= 'finished'))"
            ),
            "unblocked without the failure that it waits for": (
                f"{_UNBLOCKS} AND EXISTS (SELECT 1 FROM sqlq_edges e JOIN finished_jobs f ON f.id = e.depends_on "
                "WHERE e.job_id = NEW.id AND e.on_outcome = 'failure')"
            ),
            "admitted before it is due": "OLD.blocked_by = 'limit' AND NEW.blocked_by IS NULL AND NEW.available_at < OLD.due_at",
            "put back with its place in the limit": f"{_GIVES_UP} AND NEW.limit_key IS NOT NULL AND NEW.blocked_by IS NULL",
            # T2
            "claimed without a new token": f"{_CLAIMS} AND NOT {_REVOKES}",
            "claimed without counting the attempt": f"{_CLAIMS} AND NEW.attempts <> OLD.attempts + 1 AND OLD.attempts < {MAX_COUNT}",
            "claimed early": f"{_CLAIMS} AND OLD.available_at > {{now}}",
            "claimed under a lease that has run out": f"{_CLAIMS} AND NEW.lease_expires_at <= {{now}}",
            "claimed out of a paused queue": (
                f"{_CLAIMS} AND EXISTS (SELECT 1 FROM sqlq_queues q WHERE q.queue = OLD.queue AND q.paused_at "
                "IS NOT NULL)"
            ),
            "a claim changed the history": f"{_CLAIMS} AND {_changed('releases', 'losses', 'errors', 'available_at')}",
            # T3, and the first half of T8, T9, T12
            "a reservation changed hands or history": f"{_STAYS} AND {_changed('reserved_by', 'reserved_at', 'attempts', 'errors', 'available_at')}",
            "releases or losses were taken back of a job that did not get on": (
                f"{_STAYS} AND {_changed('releases', 'losses')} AND NOT (NEW.releases = 0"
                f" AND NEW.losses = CASE WHEN OLD.losses > 1 THEN 1 ELSE OLD.losses END AND {_changed('cursor')})"
            ),
            "a lease was renewed into the past": f"{_STAYS} AND NOT {_REVOKES} AND {_changed('lease_expires_at')} AND NEW.lease_expires_at <= {{now}}",
            "taken from an owner whose lease still runs": f"{_STAYS} AND {_REVOKES} AND {unexpired}",
            # T5, T6, T8
            "given up under another token": f"{_GIVES_UP} AND {_REVOKES} AND ((NEW.losses <> OLD.losses + 1 AND OLD.losses < {MAX_COUNT}) OR {unexpired})",
            "given up with other attempts": f"{_GIVES_UP} AND NEW.attempts NOT IN (OLD.attempts, OLD.attempts - 1)",
            "an attempt given back without counting the release": f"{_GIVES_UP} AND NEW.attempts = OLD.attempts - 1 AND NEW.releases <> OLD.releases + 1",
            "a release was counted for an attempt that counted": f"{_GIVES_UP} AND NEW.attempts = OLD.attempts AND NEW.releases <> OLD.releases",
            "retried without attempts left": f"{_GIVES_UP} AND NEW.attempts = OLD.attempts AND OLD.attempts >= coalesce(OLD.max_attempts, {MAX_ATTEMPTS})",
            "retried without recording the error": (
                f"{_GIVES_UP} AND NEW.attempts = OLD.attempts AND NEW.errors {{is}} OLD.errors"
                f" AND length(coalesce(OLD.errors, '')) <= {ERROR_BYTES}"
            ),
            "a loss was miscounted": f"{_GIVES_UP} AND NEW.losses NOT IN (OLD.losses, OLD.losses + 1)",
            "the history of a waiting job changed": (
                f"{_WAITS} AND {_changed('lease_token', 'attempts', 'releases', 'losses', 'errors')}"
                f" AND NOT {_MADE_ANEW}"
            ),
        },
        ("failed_jobs", "INSERT"): {
            "lost with attempts left": f"NEW.reason = 'worker_lost' AND NEW.attempts < coalesce(NEW.max_attempts, {MAX_ATTEMPTS})",
            "ended twice": "EXISTS (SELECT 1 FROM finished_jobs f WHERE f.id = NEW.id)",
        },
        ("finished_jobs", "INSERT"): {
            "ended twice": f"EXISTS (SELECT 1 FROM failed_jobs f WHERE f.id = NEW.id) AND NOT coalesce({skipped}, false)"
        },
        ("finished_jobs", "UPDATE"): {
            # what has ended is moved back, pruned or forgotten, never changed
            "an ended job was changed": "1 = 1"
        },
        ("failed_jobs", "UPDATE"): {"an ended job was changed": "1 = 1"},
    }
    at_commit = {
        ("jobs", "UPDATE"): {
            "taken from its owner, and still reserved": (
                f"{_STAYS} AND {_REVOKES} AND EXISTS (SELECT 1 FROM jobs j WHERE j.id = NEW.id AND "
                "j.reserved_at IS NOT NULL"
                " AND j.lease_token = NEW.lease_token)"
            )
        },
        ("jobs", "DELETE"): {
            # T4, T7, T9, T10, T12
            "a job vanished": (
                f"NOT EXISTS (SELECT 1 FROM finished_jobs e WHERE {fate_fits})"
                f" AND NOT EXISTS (SELECT 1 FROM failed_jobs e WHERE {fate_fits})"
            )
        },
        ("finished_jobs", "INSERT"): {
            "finished by somebody who did not hold it": f"NOT EXISTS (SELECT 1 FROM {{before}} b WHERE {finished_fits}) AND NOT coalesce({skipped}, false)"
        },
        ("failed_jobs", "INSERT"): {
            "failed by somebody who did not hold it": f"NOT EXISTS (SELECT 1 FROM {{before}} b WHERE {failed_fits})"
        },
    }
    return [
        Rule(*where, says, when, judged_late)
        for table, judged_late in ((rules, False), (at_commit, True))
        for where, each in table.items()
        for says, when in each.items()
    ]


_TABLES = ("jobs", "finished_jobs", "failed_jobs")
_EVENTS = [(table, event) for table in _TABLES for event in ("INSERT", "UPDATE", "DELETE")]


def install(engine: Engine, *, owners_may_be_known_dead: bool = False) -> None:
    """Install the guard in a database that has sqlq's tables, whatever is in them by now.

    With `owners_may_be_known_dead` jobs may be taken from an owner whose lease still runs. A supervisor does
    so for a child that died, and an operator by force.
    """
    kind = engine.dialect.name
    words = _WORDS[kind]
    rules = _rules(owners_may_be_known_dead)
    rules = [rule._replace(when=_SAME.sub(words["same"], rule.when).format(**words)) for rule in rules]
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE guard_off (off INTEGER)"))
        for statement in {"postgresql": _postgresql, "sqlite": _sqlite, "mariadb": _mariadb}[kind](rules):
            conn.execution_options(no_parameters=True).exec_driver_sql(statement)


_SAME = re.compile(r"([\w.]+) \{(is|is not)\} ([\w.]+)")
_USUAL = r"\1 {\2} \3"
_WORDS = {
    "postgresql": {"now": POSTGRESQL_NOW, "same": _USUAL, "before": "guard_gone"}
    | {"is": "IS NOT DISTINCT FROM", "is not": "IS DISTINCT FROM"},
    "sqlite": {"now": f"({SQLITE_NOW})", "same": _USUAL, "before": "jobs", "is": "IS", "is not": "IS NOT"},
    "mariadb": {
        "now": MARIADB_NOW,
        "same": r"({\2} (\1 <=> \3))",
        "before": "jobs",
        "is": "",
        "is not": "NOT",
    },
}


def _at_once(rules: list[Rule]) -> Iterator[tuple[str, str, list[Rule]]]:
    """Yield the rules of each table and event, where none waits for the COMMIT.

    "Still reserved at the end" cannot be judged before the end; `check` judges it.
    """
    for table, event in _EVENTS:
        here = [rule for rule in rules if (rule.table, rule.event) == (table, event)]
        if these := [rule for rule in here if not (rule.at_commit and event == "UPDATE")]:
            yield table, event, these


def _sqlite(rules: list[Rule]) -> Iterator[str]:
    for table, event, these in _at_once(rules):
        body = "\n".join(f"SELECT RAISE(ABORT, '{ILLEGAL} {r.says}') WHERE {r.when};" for r in these)
        yield (
            f"CREATE TRIGGER guard_{table}_{event.lower()} BEFORE {event} ON {table} "
            f"WHEN NOT EXISTS (SELECT 1 FROM guard_off)\nBEGIN\n{body}\nEND"
        )


def _mariadb(rules: list[Rule]) -> Iterator[str]:
    for table, event, these in _at_once(rules):
        body = "\n".join(
            f"IF {r.when} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{ILLEGAL} {r.says}'; END IF;"
            for r in these
        )
        yield (
            f"CREATE TRIGGER guard_{table}_{event.lower()} BEFORE {event} ON {table} FOR EACH ROW BEGIN\n"
            f"IF NOT EXISTS (SELECT 1 FROM guard_off) THEN\n{body}\nEND IF;\nEND"
        )


def _postgresql(rules: list[Rule]) -> Iterator[str]:
    yield "CREATE TABLE guard_gone AS SELECT * FROM jobs LIMIT 0"
    yield "CREATE INDEX ON guard_gone (id)"
    yield "CREATE FUNCTION guard_is_on() RETURNS boolean LANGUAGE sql AS $$ SELECT NOT EXISTS (SELECT 1 FROM guard_off) $$"
    yield """CREATE FUNCTION guard_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             INSERT INTO guard_gone SELECT OLD.*; RETURN NULL; END $$"""
    yield "CREATE TRIGGER guard_note AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION guard_note()"
    for table, event in _EVENTS:
        for at_commit in (False, True):
            these = [r for r in rules if (r.table, r.event, r.at_commit) == (table, event, at_commit)]
            if not these:
                continue
            name = f"guard_{table}_{event.lower()}" + ("_at_commit" if at_commit else "")
            row = "OLD" if event == "DELETE" else "NEW"
            raises = f"RAISE EXCEPTION USING MESSAGE = '{ILLEGAL} %s: job ' || {row}.id"
            checks = "\n".join(f"IF {r.when} THEN {raises % r.says}; END IF;" for r in these)
            yield f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN\n{checks}\nRETURN {row}; END $$"
            # the condition of a constraint trigger is judged at once, its function at COMMIT
            kind, moment = ("CONSTRAINT TRIGGER", "AFTER") if at_commit else ("TRIGGER", "BEFORE")
            deferred = "DEFERRABLE INITIALLY DEFERRED" if at_commit else ""
            yield f"""CREATE {kind} {name} {moment} {event} ON {table} {deferred}
                      FOR EACH ROW WHEN (guard_is_on()) EXECUTE FUNCTION {name}()"""


@contextmanager
def unguarded(conn: Connection) -> Iterator[None]:
    """Let the test itself write what it likes, in this transaction and for this block."""
    conn.execute(text("INSERT INTO guard_off VALUES (1)"))
    yield
    conn.execute(text("DELETE FROM guard_off"))


MOMENTS = ("available_at", "lease_expires_at", "start_by", "due_at", "created_at")


def advance(engine: Engine, ms: int, where: str = "1 = 1", moments: tuple[str, ...] = MOMENTS) -> None:
    """Let time pass for waiting and reserved jobs: what is due or expires in `ms` is due or expires now."""
    earlier = {
        "sqlite": f"- {ms}",
        "postgresql": f"- interval '{ms} milliseconds'",
        "mariadb": f"- INTERVAL {ms} * 1000 MICROSECOND",
    }[engine.dialect.name]
    changes = ", ".join(
        # a blocked job is due at no time
        f"{moment} = CASE WHEN blocked_by IS NULL THEN {moment} {earlier} ELSE {moment} END"
        if moment == "available_at"
        else f"{moment} = {moment} {earlier}"
        for moment in moments
    )
    with engine.begin() as conn, unguarded(conn):
        conn.execute(text(f"UPDATE jobs SET {changes} WHERE {where}"))


def check(engine: Engine) -> None:
    """Demand what holds of the whole database between transactions: a job is in one table only, its id was
    given once."""
    with engine.connect() as conn:
        ids = [id for table in _TABLES for id in conn.scalars(text(f"SELECT id FROM {table}"))]
    assert len(ids) == len(set(ids)), f"in two tables: {sorted({id for id in ids if ids.count(id) > 1})}"
