"""Take away one guard at a time: the test named beside it must fail.

    python -m tests.faults.mutations [WORD…]        all of them, or those whose line holds one of the words

A guard is one line of sqlq: the file, the text (found there exactly once), what stands there instead, and the test. Each is
tried in a copy of the tree; nothing is written here. A text that is not found, or a test that does not exist, is a failure,
too: the list goes with the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.servers import own_postgresql

ROOT = Path(__file__).parents[2]
COPIED = ("sqlq", "migrations", "tests", "examples", "pyproject.toml", "alembic.ini", "README.md")
SECONDS = 120
AT_A_TIME = 2
PYTEST_FAILED = 1


class Guard(NamedTuple):
    file: str
    text: str
    instead: str
    killed_by: str


LEASES, FLOW, OUTCOMES = "tests/worker/test_leases.py::", "tests/worker/test_flow.py::", "tests/worker/test_outcomes.py::"
FRONTIER, HINTS = "tests/worker/test_frontier.py::", "tests/conformance/test_enqueue_hints.py::"
SMALL, HOSTILE, CROWD = (
    "tests/faults/test_small_guards.py::",
    "tests/faults/test_hostile_data.py::",
    "tests/faults/test_sqlite_contention.py::",
)
MACHINE, ZOMBIES = "tests/faults/test_state_machine.py::", "tests/faults/test_zombies.py::"
COMPLETE, SUPERVISING, LINK = "tests/worker/test_complete.py::", "tests/worker/test_supervising.py::", "tests/unit/test_link.py::"
CANCEL, QUEUES, BLINKS = (
    "tests/conformance/test_admin_cancel.py::",
    "tests/conformance/test_admin_queues.py::",
    "tests/faults/test_blinks.py::",
)
SCHEMA = "tests/worker/test_schema_change.py::"
UNIQUE, ENQUEUE = "tests/conformance/test_enqueue_unique.py::", "tests/conformance/test_enqueue.py::"
WALK = MACHINE + "test_the_database_walks_as_the_contract_says"
IN_DRIVER, DRIVER = "sqlq/store/driver.py", "tests/sql/test_driver.py::"
IN_DIALECT, IN_PG, IN_LITE, IN_JOBS = "sqlq/store/dialect.py", "sqlq/store/postgresql.py", "sqlq/store/sqlite.py", "sqlq/store/jobs.py"
IN_EXECUTE, IN_SETTLE, IN_LEASE, IN_WORKER = (f"sqlq/worker/{name}.py" for name in ("execute", "settle", "lease", "worker"))
IN_SUPERVISOR, IN_ISOLATES, IN_LINK, IN_BOX = (f"sqlq/worker/{name}.py" for name in ("supervisor", "isolates", "link", "blackbox"))
IN_RUNNING, IN_CHILD, IN_OPERATORS = "sqlq/worker/running.py", "sqlq/worker/child.py", "sqlq/store/operators.py"

# ruff: noqa: E501 - a guard is one line
# fmt: off
GUARDS = [
    # waits that end; first, because without it the test hangs
    Guard("sqlq/worker/claim.py", "            if claimed or not self._drain:", "            if True:", FRONTIER + "test_a_worker_for_which_every_claim_is_dear_does_everything[True-postgresql]"),
    Guard("sqlq/worker/claim.py", "self._dear_seconds = seconds if is_dear and self._was_dear else 0.0", "self._dear_seconds = 1e9", FRONTIER + "test_a_worker_for_which_every_claim_is_dear_does_everything[False-postgresql]"),
    Guard(IN_PG, "interval '1 microsecond', level.id)", "interval '1 microsecond', 0)", FRONTIER + "test_claims_beyond_a_place_take_what_is_due_after_it_in_order[postgresql]"),
    Guard("sqlq/store/database.py", "        if use.plan_once:", "        if False:", "tests/sql/test_statements.py::test_a_claim_planned_while_the_table_was_empty_does_when_it_is_full[postgresql]"),
    Guard(IN_PG, "ONLY_ON_REQUEST if leads_to_one_server(dbapi_connection) else None", "ONLY_ON_REQUEST", "tests/faults/test_pgbouncer.py::test_nothing_is_prepared_through_a_pooler[postgresql]"),
    Guard(IN_PG, "            bound(dbapi_connection, patience)", "            pass", BLINKS + "test_no_wait_is_without_end[postgresql]"),
    # the fence of every owner's write
    Guard(IN_DIALECT, ".where(jobs.c.lease_token == rows.c.token, jobs.c.reserved_at.is_not(None))", ".where(jobs.c.reserved_at.is_not(None))", LEASES + "test_a_zombie_changes_nothing[sqlite-Completed]"),
    Guard(IN_DIALECT, ".where(jobs.c.lease_token == rows.c.token, jobs.c.reserved_at.is_not(None))", ".where(jobs.c.lease_token == rows.c.token)", LEASES + "test_a_settle_is_not_repeated[sqlite-Retried]"),
    Guard(IN_DIALECT, ".with_for_update(of=jobs, skip_locked=skip_locked)", ".with_for_update(of=jobs)", LEASES + "test_a_locked_row_does_not_keep_the_others_back[settle-postgresql]"),
    Guard(IN_JOBS, "        if actual != token:", "        if False:", LEASES + "test_a_zombie_changes_nothing[postgresql-Completed]"),
    Guard(IN_JOBS, "return Fate.LOST if keep_finished else Fate.SETTLED", "return Fate.LOST", SMALL + "test_where_finished_jobs_are_not_kept_a_row_that_is_gone_was_settled[sqlite]"),
    Guard(IN_SETTLE, "            if fates.get(right) is jobs.Fate.LOST:", "            if False:", ZOMBIES + "test_a_worker_of_the_same_name_in_the_same_process_is_somebody_else[sqlite]"),
    # the claim
    Guard(IN_PG, "       lease_token = lease_token + 1,", "       lease_token = lease_token,", LEASES + "test_each_claim_raises_the_token_and_counts_the_attempt[postgresql]"),
    Guard(IN_PG, "       attempts = attempts + 1", "       attempts = attempts", LEASES + "test_each_claim_raises_the_token_and_counts_the_attempt[postgresql]"),
    Guard(IN_LITE, "       lease_token = lease_token + 1,", "       lease_token = lease_token,", LEASES + "test_each_claim_raises_the_token_and_counts_the_attempt[sqlite]"),
    Guard(IN_LITE, "       attempts = attempts + 1", "       attempts = attempts", LEASES + "test_each_claim_raises_the_token_and_counts_the_attempt[sqlite]"),
    Guard(IN_PG, "               FOR UPDATE SKIP LOCKED) AS ready", "               ) AS ready", LEASES + "test_the_claim_skips_what_a_rival_is_claiming[postgresql]"),
    Guard(IN_PG, "WITH due AS MATERIALIZED (", "WITH due AS (", "tests/sql/test_statements.py::test_the_database_receives_the_golden_statement[postgresql-claim]"),
    Guard(IN_PG, "reserved_at IS NULL AND available_at <= statement_timestamp()", "reserved_at IS NULL", WALK + "[postgresql]"),
    Guard(IN_PG, "reserved_at IS NULL AND available_at <= statement_timestamp()", "reserved_at IS NULL AND available_at <= now()", SMALL + "test_a_claim_in_a_long_transaction_goes_by_the_time_of_its_statement[postgresql]"),
    Guard(IN_LITE, "AND priority = ? AND available_at <= {SQLITE_NOW}", "AND priority = ?", WALK + "[sqlite]"),
    Guard(IN_JOBS, "    if len(claimed) > limit:", "    if False:", SMALL + "test_more_than_asked_for_is_not_run[postgresql]"),
    Guard("sqlq/worker/executors.py", "    def _attempt(self, job: RunningJob) -> Outcome:\n        if not job.is_trusted():", "    def _attempt(self, job: RunningJob) -> Outcome:\n        if False:", LEASES + "test_a_job_is_not_started_on_a_lease_that_is_not_trusted[sqlite]"),
    Guard(IN_WORKER, "                self._give_back_unstarted()", "                pass", FLOW + "test_what_does_not_start_in_time_is_given_back[sqlite]"),
    Guard(IN_WORKER, "            self._settle(job, late(job) or give_back(job.claimed))", "            pass", FLOW + "test_what_the_grace_time_does_not_suffice_for_is_given_back_uncounted"),
    # attempts and releases
    Guard(IN_JOBS, '"attempts": jobs.c.attempts - 1,', '"attempts": jobs.c.attempts,', LEASES + "test_each_claim_raises_the_token_and_counts_the_attempt[sqlite]"),
    Guard(IN_JOBS, '"releases": jobs.c.releases + 1,', '"releases": jobs.c.releases,', WALK + "[sqlite]"),
    Guard("sqlq/retry.py", "case Snooze() if job.releases < MAX_RELEASES:", "case Snooze():", "tests/unit/test_retry.py::test_snooze_gives_the_attempt_back_but_not_for_ever"),
    Guard("sqlq/store/records.py", '"reserved_by", "errors")', '"reserved_by", "errors", "lease_token")', LEASES + "test_a_zombie_changes_nothing_after_an_operators_retry_reset_the_attempts[sqlite]"),
    # renewal and rescue
    Guard(IN_JOBS, "    return update(jobs).values(_RENEWED)", "    return update(jobs).values(lease_expires_at=jobs.c.lease_expires_at)", LEASES + "test_a_lease_is_renewed_while_its_handler_runs[sqlite]"),
    Guard(IN_JOBS, "_revoking = update(jobs).values(lease_token=jobs.c.lease_token + 1)", "_revoking = update(jobs).values(lease_token=jobs.c.lease_token)", LEASES + "test_what_nobody_renews_is_rescued_and_counted[sqlite]"),
    Guard(IN_JOBS, ".where(jobs.c.reserved_at.is_not(None), jobs.c.lease_expires_at <= now())", ".where(jobs.c.reserved_at.is_not(None))", LEASES + "test_what_nobody_renews_is_rescued_and_counted[postgresql]"),
    Guard(IN_JOBS, "alive = [row for row in revoked if row.attempts < row.max_attempts]", "alive = list(revoked)", LEASES + "test_what_nobody_renews_is_rescued_and_counted[sqlite]"),
    Guard(IN_LEASE, "                self.drop([right])\n                self._ask_to_stop(job)", "                self.drop([right])", LEASES + "test_a_handler_whose_lease_is_lost_is_told[sqlite]"),
    Guard(IN_LEASE, "        self._give_back(unknown & self._unknown)", "        pass", LEASES + "test_a_claim_whose_reply_was_lost_is_given_back[sqlite]"),
    Guard(IN_LEASE, "        self._give_back(unknown & self._unknown)", "        self._give_back(unknown)", LEASES + "test_a_claim_whose_reply_was_lost_is_given_back[postgresql]"),
    # complete(), in the handler's own transaction
    Guard(IN_RUNNING, "        if not jobs.complete(", "        if None is jobs.complete(", COMPLETE + "test_a_zombie_cannot_complete[sqlite]"),
    Guard(IN_RUNNING, "        if not jobs.complete(", "        if None is jobs.complete(", ZOMBIES + "test_a_frozen_worker_changes_nothing_when_it_wakes[sqlite-another finished it]"),
    Guard(IN_JOBS, "jobs.c.lease_token == right[1], jobs.c.reserved_at.is_not(None))", "jobs.c.reserved_at.is_not(None))", SUPERVISING + "test_completing_is_the_owners_alone_and_once[sqlite-False]"),
    Guard(IN_JOBS, "skip_locked=False, options=options", "skip_locked=True, options=options", COMPLETE + "test_complete_waits_for_a_heartbeat_and_a_heartbeat_passes_over_it[postgresql]"),
    Guard(IN_RUNNING, "        if level is not None:", "        if False:", COMPLETE + "test_a_stricter_isolation_level_is_refused_in_a_sentence[REPEATABLE READ-postgresql]"),
    Guard(IN_RUNNING, "        refuse_loose_savepoint(conn)", "        pass", SUPERVISING + "test_completing_in_a_savepoint_that_may_be_the_outermost_is_refused[sqlite]"),
    Guard(IN_EXECUTE, "return SelfCompleted(late(running) or again(running, error))", "return Completed(None)", COMPLETE + "test_a_rollback_after_complete_is_a_failed_attempt_and_says_why[sqlite]"),
    Guard(IN_SETTLE, "Completed() if right in settled else outcome.otherwise", "Completed()", COMPLETE + "test_a_rollback_after_complete_is_a_failed_attempt_and_says_why[postgresql]"),
    Guard(IN_SETTLE, "Completed() if right in settled else outcome.otherwise", "outcome.otherwise", COMPLETE + "test_without_retention_the_row_is_gone_and_that_counts_as_done[sqlite]"),
    # the supervisor, and what it knows of a process that died
    Guard(IN_SUPERVISOR, " if started is None or (job.id, job.lease_token) in started]", "]", SUPERVISING + "test_what_a_dead_worker_had_started_counts_and_the_rest_does_not[sqlite]"),
    Guard(IN_SUPERVISOR, "if started is None or (job.id, job.lease_token) in started", "if (job.id, job.lease_token) in (started or ())", SUPERVISING + "test_of_a_worker_whose_box_cannot_tell_all_jobs_count_as_started[sqlite]"),
    Guard(IN_SUPERVISOR, "        return not left\n", "        return True\n", SUPERVISING + "test_a_row_that_is_locked_is_given_back_later[postgresql]"),
    Guard(IN_SUPERVISOR, "renewed = jobs.extend_owned(conn, worker, lease_ms=self._lease_ms)", "renewed = {}", SUPERVISING + "test_it_renews_what_its_worker_holds_and_tells_it[sqlite]"),
    Guard(IN_SUPERVISOR, "renewed = jobs.extend_owned(conn, worker, lease_ms=self._lease_ms)", "renewed = {}", ZOMBIES + "test_a_process_that_is_frozen_alone_keeps_its_jobs_while_its_supervisor_lives[sqlite]"),
    Guard(IN_SUPERVISOR, "                elif worker not in self._known:", "                elif False:", SUPERVISING + "test_a_worker_that_it_does_not_find_has_to_renew_for_itself[sqlite]"),
    Guard(IN_JOBS, '_OWNED = (jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == bindparam("owner", type_=String))', '_OWNED = (jobs.c.reserved_at.is_not(None), bindparam("owner", type_=String).is_not(None))', SUPERVISING + "test_it_renews_what_its_worker_holds_and_tells_it[postgresql]"),
    Guard(IN_JOBS, '"losses": jobs.c.losses + 1}', '"losses": jobs.c.losses}', SUPERVISING + "test_what_a_dead_worker_had_started_counts_and_the_rest_does_not[postgresql]"),
    Guard(IN_CHILD, "            stop(ORPHANED_MS)", "            pass", SUPERVISING + "test_a_worker_whose_supervisor_is_gone_stops_soon"),
    Guard(IN_EXECUTE, "        starting(running)\n        result = task.handler", "        result = task.handler", SUPERVISING + "test_the_box_says_what_runs[sqlite]"),
    Guard(IN_LEASE, "            self._box.ended(rights)", "            pass", SUPERVISING + "test_the_box_says_what_runs[postgresql]"),
    Guard(IN_BOX, "                _WORD.pack_into(self._memory, 8, 1)\n", "                pass\n", LINK + "test_a_box_that_overflowed_says_that_it_cannot_tell"),
    Guard(IN_LINK, "if not (droppable and self._unsent):", "if True:", LINK + "test_offers_do_not_wait_for_a_process_that_does_not_read"),
    Guard(IN_LINK, r'if not line.endswith(b"\n"):', "if not line:", LINK + "test_a_word_cut_off_is_no_message"),
    Guard(IN_LINK, "signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)", "signal.pthread_sigmask(signal.SIG_BLOCK, [])", LINK + "test_a_new_process_does_not_meet_the_terminals_signals_half_started"),
    # processes for one job at a time
    Guard(IN_WORKER, "(task.isolate or job.losses > 0)", "task.isolate", SUPERVISING + "test_what_has_lost_a_worker_or_says_so_itself_runs_alone[sqlite]"),
    Guard(IN_ISOLATES, "            if isolate.running is running:", "            if True:", SUPERVISING + "test_a_kill_that_comes_too_late_spares_the_next_job"),
    # operators
    Guard(IN_OPERATORS, "values(lease_token=jobs.c.lease_token + 1)", "values(lease_token=jobs.c.lease_token)", CANCEL + "test_after_a_forced_cancel_the_old_owner_changes_nothing[sqlite-Completed-True]"),
    Guard(IN_OPERATORS, ".with_for_update(skip_locked=wait_ms is None)", "", CANCEL + "test_a_claim_that_came_first_makes_of_a_cancel_a_request[False-postgresql]"),
    Guard(IN_OPERATORS, "func.coalesce(jobs.c.cancel_requested_at, now())", "null()", CANCEL + "test_a_running_job_is_asked_and_still_its_owners[sqlite]"),
    Guard(IN_LEASE, "if cancel_requested and not job.cancel_requested:", "if False:", LEASES + "test_what_the_supervisor_renewed_is_trusted_longer_and_what_it_did_not_is_looked_at[sqlite]"),
    Guard(IN_EXECUTE, "    if running.heeded:", "    if False:", CANCEL + "test_a_running_handler_is_asked_to_stop_and_its_job_ends_as_cancelled[sqlite-def]"),
    Guard(IN_EXECUTE, "    if running.cancel_requested:\n        return Cancelled(BY_OPERATOR)\n    if job", "    if job", COMPLETE + "test_a_job_asked_to_end_while_it_waits_for_its_next_attempt_does_not_start[sqlite]"),
    Guard(IN_PG, "WHERE q.queue = wanted.queue AND q.paused_at IS NOT NULL)", "WHERE false)", QUEUES + "test_nothing_is_claimed_from_a_paused_queue_and_everything_else_goes_on[postgresql]"),
    Guard(IN_LITE, "levels = [] if name in paused else ask", "levels = ask", QUEUES + "test_nothing_is_claimed_from_a_paused_queue_and_everything_else_goes_on[sqlite]"),
    # blinks, and migrations beneath a worker
    Guard("sqlq/worker/wake.py", "                if time.monotonic() >= ping_at:", "                if False:", BLINKS + "test_only_the_connection_that_listens_is_deaf[postgresql]"),
    Guard(IN_PG, '_USELESS = ("08", "57P", _READ_ONLY, "0A000")', '_USELESS = ("08", "57P", "0A000")', SMALL + "test_a_database_that_only_reads_is_waited_for_on_another_connection[postgresql]"),
    Guard("sqlq/schema/version.py", "self.oldest_code <= HEAD < self.revision", "HEAD < self.revision", SCHEMA + "test_a_worker_left_behind_stops_in_good_order[sqlite-too new]"),
    Guard("sqlq/schema/version.py", "self.revision == HEAD or self.oldest_code <= HEAD < self.revision", "self.revision == HEAD", SCHEMA + "test_a_newer_revision_is_one_line_in_the_log[sqlite]"),
    Guard("sqlq/schema/live.py", "            if sqlstate(error) not in (LOCK_NOT_AVAILABLE, DEADLOCK_DETECTED):", "            if True:", "tests/migrations/test_live.py::test_patience_ends_in_a_sentence_and_changes_nothing"),
    Guard("sqlq/schema/live.py", "        if is_valid(connection, schema, index) is False:", "        if False:", "tests/migrations/test_live.py::test_an_index_of_an_aborted_build_is_built_again"),
    # the connections of sqlq's own
    Guard("sqlq/store/database.py", 'conn.execution_options(isolation_level="READ COMMITTED")', "conn", SMALL + "test_sqlqs_own_transactions_are_read_committed_whatever_the_default[url-postgresql]"),
    Guard("sqlq/store/database.py", 'conn.execution_options(isolation_level="READ COMMITTED")', "conn", SMALL + "test_sqlqs_own_transactions_are_read_committed_whatever_the_default[engine-postgresql]"),
    Guard(IN_PG, '_USELESS = ("08", "57P", _READ_ONLY, "0A000")', '_USELESS = ("08", "57P", _READ_ONLY)', SMALL + "test_a_claim_outlives_a_change_of_a_column_it_returns[postgresql]"),
    Guard(IN_JOBS, "    _dialect(conn).refuse_standby(conn)\n", "", SMALL + "test_a_standby_is_not_asked_what_became_of_a_job"),
    Guard(IN_DRIVER, "if moment - taken_at < TAKEN_SECONDS and ", "if ", DRIVER + "test_statements_that_follow_each_other_ask_the_pool_once[sqlite]"),
    Guard(IN_DRIVER, " and not self._dialect.is_cut_off(pooled.dbapi_connection)", "", DRIVER + "test_a_connection_cut_off_between_two_statements_is_replaced[postgresql]"),
    Guard(IN_DRIVER, "        pooled.info[RESTS_SINCE] = taken_at", "        pass", DRIVER + "test_a_connection_that_rested_long_is_asked_for_a_sign_of_life[postgresql]"),
    Guard(IN_DRIVER, "            except self._known.loaded_dbapi.Error:", "            except ZeroDivisionError:", DRIVER + "test_a_connection_that_cannot_be_rolled_back_is_given_up[postgresql]"),
    Guard(IN_DRIVER, " and engine.pool.size() > 1", "", DRIVER + "test_the_only_connection_of_a_pool_is_kept_by_nobody[sqlite]"),
    Guard(IN_DRIVER, "            self.close()", "            pass", DRIVER + "test_a_connection_of_no_use_is_given_up_with_those_that_rest[postgresql]"),
    Guard(IN_PG, "record.info.setdefault(RESTS_SINCE, time.monotonic())", "record.info[RESTS_SINCE] = time.monotonic()", DRIVER + "test_a_connection_that_rested_long_is_asked_for_a_sign_of_life[postgresql]"),
    Guard(IN_DRIVER, "                pooled.rollback()", "                pass", SMALL + "test_a_claim_that_is_broken_off_keeps_no_lock[sqlite]"),
    Guard("sqlq/worker/outage.py", "            if not wrote and TAKES_NO_WRITES in Outage._said_at:", "            if False:", "tests/worker/test_outage.py::test_an_answer_to_a_question_does_not_end_the_trouble_with_a_standby[postgresql]"),
    Guard("sqlq/enqueue.py", "                if not database.dialect.has_no_room(error):", "                if True:", SMALL + "test_a_job_does_not_depend_on_its_hint"),
    Guard("sqlq/hints.py", "                self._begin()  # so that it has a connection by the time of the commit", "                pass", HINTS + "test_a_hint_for_a_session_finds_a_connection_made[postgresql]"),
    Guard("sqlq/store/cluster.py", "set_config('synchronous_commit', 'off', true)", "set_config('synchronous_commit', 'off', false)", HINTS + "test_a_hint_waits_for_no_disk_and_all_else_does[postgresql]"),
    Guard("sqlq/hints.py", "            while any(map(is_in_transaction, committing))", "            while False", HINTS + "test_a_hint_waits_for_the_commit_it_speaks_of[psycopg-postgresql]"),
    Guard("sqlq/enqueue.py", "        if self._hints.takes_along():", "        if False:", HINTS + "test_a_lone_job_takes_its_hint_along[postgresql]"),
    Guard("sqlq/store/database.py", 'return conn.scalar(text("SHOW default_transaction_isolation")) in ("read committed", "read uncommitted")', "return True", SMALL + "test_sqlqs_own_transactions_are_read_committed_whatever_the_default[url-postgresql]"),
    # enqueueing
    Guard(IN_DIALECT, 'index_elements=["queue", "unique_key"], index_where=text(HOLDS_KEY)', 'index_elements=["queue", "unique_key"]', UNIQUE + "test_a_duplicate_answers_with_the_live_job[postgresql]"),
    Guard("sqlq/enqueue.py", "        refuse_loose_savepoint(conn)", "        pass", ENQUEUE + "test_a_savepoint_that_may_be_the_outermost_is_refused"),
    Guard("sqlq/enqueue.py", 'if conn.dialect.name == "sqlite" and jobs.DIALECTS["sqlite"].rolled_back(error):', "if False:", CROWD + "test_a_transaction_that_read_before_a_rival_wrote_is_refused_in_one_sentence[sqlite]"),
    Guard(IN_LITE, "begin_explicitly(engine, immediate=True)", "begin_explicitly(engine, immediate=False)", SMALL + "test_a_transaction_of_sqlqs_own_has_the_write_lock_from_its_beginning[sqlite]"),
    Guard("sqlq/store/database.py", "        self.engine.dispose(close=False)", "        pass", "tests/faults/test_fork.py::test_a_forking_server_shares_no_connection[postgresql]"),
    Guard("sqlq/store/database.py", "        self._driver.forget()", "        pass", "tests/faults/test_fork.py::test_a_forking_server_shares_no_connection[postgresql]"),
    # hostile data
    Guard(IN_EXECUTE, "if isinstance(error, ArgumentsError) and running.started is None:", "if False:", OUTCOMES + "test_an_unreadable_payload_fails_on_its_first_attempt_and_blocks_nobody[sqlite-not json]"),
    Guard(IN_EXECUTE, "    return Released(delay_ms, unknown_task=True)", '    return Failed("unknown_task", describe(UnknownTaskError("dropped")))', OUTCOMES + "test_an_unknown_task_is_put_back_with_growing_delay_and_fails_after_a_day[sqlite]"),
    Guard(IN_EXECUTE, "        return _judged(running, seen)", "        raise", HOSTILE + "test_no_exception_stops_the_jobs_behind_it[sqlite]"),
    Guard("sqlq/retry.py", r'_UNSTORABLE = re.compile("[\0\ud800-\udfff]")', r'_UNSTORABLE = re.compile("[\ud800-\udfff]")', OUTCOMES + "test_an_error_text_of_50_megabytes_is_cut_and_scrubbed[postgresql]"),
    Guard(IN_LITE, "            dbapi_connection.text_factory = _text", "            pass", HOSTILE + "test_broken_rows_at_the_head_of_the_queue[sqlite]"),
    Guard("migrations/versions/0001_jobs.py", "CHECK (id BETWEEN 1 AND 4000000000000000000)", "CHECK (id >= 1)", HOSTILE + "test_broken_rows_at_the_head_of_the_queue[sqlite]"),
    Guard("migrations/versions/0001_jobs.py", "        AND lease_token BETWEEN 0 AND 4000000000000000000),", "        AND lease_token >= 0),", HOSTILE + "test_broken_rows_at_the_head_of_the_queue[sqlite]"),
]
# fmt: on


def try_without(guard: Guard, server_url: str) -> tuple[str, float]:
    """Return what became of the mutant, "killed" if all is well, and how long that took."""
    begin = time.monotonic()
    with copy_of_the_tree() as copy:
        file = copy / guard.file
        code = file.read_text()
        if code.count(guard.text) != 1:
            return f"STALE: its text is found {code.count(guard.text)} times", 0.0
        file.write_text(code.replace(guard.text, guard.instead))
        try:
            done = run(copy, server_url, [guard.killed_by], SECONDS)
        except subprocess.TimeoutExpired:
            return "killed (it hung)", time.monotonic() - begin
    seconds = time.monotonic() - begin
    if done.returncode == PYTEST_FAILED:
        return "killed", seconds
    if done.returncode == 0:
        return "SURVIVED", seconds
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return f"NOT TRIED: pytest ended with {done.returncode}: {''.join(last)}", seconds


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sqlq-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        yield copy


def run(copy: Path, server_url: str, tests: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, on the sqlq that is in it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),  # before the installed sqlq
        "PYTHONDONTWRITEBYTECODE": "1",
        "SQLQ_TEST_POSTGRESQL_URL": server_url,
        "PGOPTIONS": "-c lock_timeout=10s",  # a guard against waiting is missed by waiting
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def main(words: Sequence[str]) -> int:
    guards = [guard for guard in GUARDS if not words or any(word in " ".join(guard) for word in words)]
    table = Table("file", "guard", "test", "without it", title=f"{len(guards)} guards, each taken away alone", show_lines=False)
    bad = 0
    with own_postgresql() as server, ThreadPoolExecutor(AT_A_TIME) as pool:
        with copy_of_the_tree() as copy:  # else it would be the copy that kills
            done = run(copy, server.url("postgres"), sorted({guard.killed_by for guard in guards}), 10 * SECONDS)
        if done.returncode:
            print(f"with every guard in its place the tests fail, too:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
            return 1
        fates = pool.map(lambda guard: try_without(guard, server.url("postgres")), guards)
        for guard, (fate, seconds) in zip(guards, fates, strict=True):
            bad += not fate.startswith("killed")
            table.add_row(guard.file, escape(" ".join(guard.text.split())[:60]), guard.killed_by.split("::")[1], f"{fate}, {seconds:.0f} s")
            print(f"{fate:8} {guard.file}: {' '.join(guard.text.split())[:80]}", flush=True)
    Console(width=200).print(table)
    print(f"{len(guards) - bad} of {len(guards)} killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
