"""Take away one guard at a time: the test named beside it must fail.

    python -m tests.faults.mutations [WORD…]        all of them, or those whose line holds one of the words
    python -m tests.faults.mutations --hundredth    a hundredth of them, others each day; MariaDB's where it is

A guard is a line of sqlq that carries the comment `# guard: NAME`, or the statement below a line that is such a
comment. In a migration's SQL it is `-- guard: NAME`. Its part `was` is replaced by `instead`; without `was` all of it is. So neither a reformatted line nor
one that moves makes the list stale. Each is tried in a copy of the tree; nothing is written here.
"""

from __future__ import annotations

import ast
import datetime as dt
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.kit.mariadb import found, own_mariadb
from tests.kit.postgresql import own_postgresql

ROOT = Path(__file__).parents[2]
COPIED = ("sqlq", "migrations", "tests", "examples", "docs", "pyproject.toml", "alembic.ini", "README.md")
SECONDS = 40
SECONDS_ALONE = 60
HUNG = "HUNG"
AT_A_TIME = 8
"""More than there are processors: most tests that miss a guard wait until their timeout."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
PYTEST_FAILED = 1
OF_MARIADB = re.compile("mariadb|pymysql")
"""Words in the name of a test that runs on MariaDB."""
MARK = re.compile(r"(?:#|;|--) guard: ([\w-]+)$")
TEST = re.compile(
    r"^class (?P<type>Test\w+)|^(?P<indent> *)(?:async )?def (?P<name>test_\w+)\(", re.MULTILINE
)


class Guard(NamedTuple):
    mark: str
    was: str | None
    instead: str
    killed_by: str
    """A test by the name of its function, of which there is one, or with its file before it."""

    @property
    def test(self) -> str:
        """The test as pytest takes it. Raises `ValueError` if its name leads to no test, or to several."""
        if self.killed_by.startswith("tests/"):
            return self.killed_by
        name, bracket, variant = self.killed_by.partition("[")
        tests = ids_of_tests().get(name, [])
        if len(tests) != 1:
            raise ValueError(f"{self.mark}: {name} names {len(tests)} tests: {tests}")
        return tests[0] + bracket + variant


def by(test: str, *lines: tuple[str, str | None, str]) -> list[Guard]:
    """Return the guards that one test misses."""
    return [Guard(*line, test) for line in lines]


@cache
def ids_of_tests() -> dict[str, list[str]]:
    """Return the places of the tests of each name: their files, and their classes where they have some."""
    ids: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        place = str(file.relative_to(ROOT))
        around = ""
        for line in TEST.finditer(file.read_text()):
            if line["type"]:
                around = f"{line['type']}::"
                continue
            if not line["indent"]:
                around = ""
            ids.setdefault(line["name"], []).append(f"{place}::{around}{line['name']}")
    return ids


# ruff: noqa: E501 - a guard is one line
# fmt: off
GUARDS = [
    # log lines about a database that is away
    Guard("outage-ends-by-a-statement", "answers.times > times", "True", "test_a_turn_without_a_statement_ends_no_outage[sqlite]"),
    Guard("read-ends-no-outage-of-writes", "answers.writing > writing", "True", "test_a_turn_that_only_reads_does_not_end_an_outage_at_a_standby[postgresql]"),
    *by("test_a_file_that_is_gone_for_a_short_time_ends_no_worker[sqlite]", ("a-file-that-is-gone-is-an-outage", "MissingFileError", "DBAPIError"), ("control-read-errors-are-survived", 'passing_over("what operators want could not be read; trying again")', "open(os.devnull)")),
    Guard("no-manager-holds-up-the-supervisor", "socket.MSG_DONTWAIT", "0", "test_a_manager_that_is_deaf_holds_nothing_up"),
    # telemetry
    Guard("numbers-are-sent-once", "self._counts, self._times = Counter(), {}", "pass", "test_counts_are_sent_once"),
    Guard("counters-begin-at-zero", None, "pass", "test_counters_begin_at_zero_before_a_task_is_counted"),
    *by("test_scrapes_and_health_query_the_database_once_in_a_while[sqlite]", ("strangers-query-once-a-second", None, "if True:"), ("scrapes-are-no-load", None, "if True:")),
    Guard("labels-are-bounded", None, "if False:", "test_unknown_tasks_and_queues_after_a_bound_count_as_other"),
    Guard("deaths-are-counted", None, "pass", "test_the_worker_endpoint_is_on_loopback_and_counts_as_the_database_does[sqlite]"),
    *by("test_log_lines_have_the_trace_id[sqlite]", ("traced-jobs-need-records", "job.trace_id is None", "True"), ("isolates-tell-their-trace", None, "pass"), ("isolates-call-what-is-called-at-exit", None, "pass")),
    # waits that end; first, because without it the test hangs
    Guard("slow-scan-is-measured-twice", "is_dear and self._was_dear", "is_dear", "test_the_scan_starts_at_the_head_unless_that_was_slow_twice"),
    Guard("turn-starts-at-its-queue", "positions and (not has_turns or positions[0][0] == names[0])", "positions", "test_a_worker_serves_a_low_queue_beside_a_full_one[postgresql-True]"),
    Guard("claim-starts-at-its-cursor", "interval '1 microsecond'), level.id)", "interval '1 microsecond'), 0)", "test_claims_after_the_cursor_take_due_jobs_in_order[postgresql]"),
    Guard("claim-starts-at-its-cursor-mariadb", "AND id > %s", "AND 0 < %s", "test_claims_after_the_cursor_take_due_jobs_in_order[mariadb]"),
    Guard("claims-are-planned-once", "plans_once=use.plan_once", "plans_once=False", "test_a_claim_planned_on_an_empty_table_is_fast_on_a_full_one[postgresql]"),
    Guard("nothing-prepared-through-a-pooler", "ONLY_ON_REQUEST if direct else None", "ONLY_ON_REQUEST", "test_no_statement_is_prepared_through_a_pooler[postgresql]"),
    Guard("every-wait-has-an-end", None, "pass", "test_every_wait_has_a_timeout[postgresql]"),
    # the fence of every owner's write
    Guard("settle-is-fenced", None, "return (jobs.c.reserved_at.is_not(None),)", "test_a_zombie_changes_nothing[sqlite-Finished]"),
    Guard("settle-is-fenced", None, "return (jobs.c.lease_token == rows.c.token,)", "test_a_settle_is_not_repeated[sqlite-Retried]"),
    Guard("locked-rows-are-skipped", "skip_locked=not waits", "skip_locked=False", "test_a_locked_row_does_not_delay_the_others[settle-postgresql]"),
    Guard("lease-state-compares-the-token", None, "if False:", "test_a_zombie_changes_nothing[postgresql-Finished]"),
    Guard("completed-and-pruned-is-settled", "LeaseState.SETTLED if (id, token) in completed else", "", "test_a_missing_row_counts_as_settled_if_its_handler_completed_the_job[sqlite]"),
    Guard("ended-jobs-are-seen", "max(self.retention_ms, SEEN_MS)", "self.retention_ms", "test_finished_jobs_past_their_retention_are_pruned[sqlite]"),
    *by("test_a_frozen_worker_changes_nothing_when_it_wakes[sqlite-another finished it]", ("lost-lease-is-not-settled", None, "if False:"), ("complete-by-the-owner", "if not settle.complete(", "if None is settle.complete(")),
    # the claim
    *by("test_a_claim_skips_jobs_that_are_not_due_or_that_a_rival_is_claiming[mariadb]", ("claim-mariadb", "FOR UPDATE SKIP LOCKED", ""), ("claim-mariadb", "AND available_at <= {NOW}", "")),
    Guard("claim-mariadb", "ORDER BY {order}", "ORDER BY {order}, task", "test_a_statement_reads_and_locks_a_bounded_number_of_rows[10000]"),
    *by("test_each_claim_raises_the_token_and_counts_the_attempt[postgresql]", ("claim-postgresql", "THEN lease_token + 1", "THEN lease_token"), ("claim-postgresql", "least(attempts + 1, {MAX_COUNT})", "attempts")),
    *by("test_each_claim_raises_the_token_and_counts_the_attempt[sqlite]", ("claim-sqlite", "THEN lease_token + 1", "THEN lease_token"), ("claim-sqlite", "min(attempts + 1, {MAX_COUNT})", "attempts"), ("release-gives-the-attempt-back", None, '"attempts": jobs.c.attempts,')),
    Guard("claim-postgresql", "FOR UPDATE SKIP LOCKED) AS ready", ") AS ready", "test_a_claim_skips_jobs_that_are_not_due_or_that_a_rival_is_claiming[postgresql]"),
    Guard("claim-postgresql", "WITH due AS MATERIALIZED (", "WITH due AS (", "tests/sql/test_statements.py::test_the_database_receives_the_golden_statement[postgresql]"),
    *by("test_random_walks_match_the_model[postgresql]", ("claim-postgresql", "reserved_at IS NULL AND available_at <= statement_timestamp()", "reserved_at IS NULL"), ("lost-job-writes-its-callback", "_follow(conn, follow_ups)", "pass")),
    Guard("claim-postgresql", "reserved_at IS NULL AND available_at <= statement_timestamp()", "reserved_at IS NULL AND available_at <= now()", "test_a_claim_in_a_long_transaction_uses_the_statements_time[postgresql]"),
    Guard("claim-postgresql", "CAST(CAST(%(max_attempts)s AS pg_catalog.json) ->> task AS integer))", "NULL)", "test_a_rescue_counts_attempts_by_the_tasks_option[postgresql]"),
    Guard("claim-sqlite", "coalesce(max_attempts, (SELECT value FROM json_each(?) WHERE key = task))", "iif(? IS NULL, 1, max_attempts)", "test_a_rescue_counts_attempts_by_the_tasks_option[sqlite]"),
    Guard("claim-postgresql", "least(attempts + 1, {MAX_COUNT})", "attempts + 1", "test_broken_rows_at_the_head_do_not_block_the_queue[postgresql]"),
    *by("test_broken_rows_at_the_head_do_not_block_the_queue[sqlite]", ("claim-sqlite", "min(attempts + 1, {MAX_COUNT})", "attempts + 1"), ("sqlite-bytes-are-read-as-text", None, "pass"), ("numbers-in-range", "CHECK (id BETWEEN 1 AND 4000000000000000000)", "CHECK (id >= 1)"), ("numbers-in-range", "AND lease_token BETWEEN 0 AND 4000000000000000000),", "AND lease_token >= 0),")),
    *by("test_random_walks_match_the_model[sqlite]", ("sqlite-claim-takes-due-jobs", " AND available_at <= {SQLITE_NOW}", ""), ("release-is-counted", None, '"releases": jobs.c.releases,'), ("only-the-owner-is-followed", " and (s.id, s.lease_token) in done", "")),
    Guard("claim-respects-its-limit", None, "if False:", "test_a_claim_beyond_its_limit_is_rolled_back[postgresql]"),
    Guard("start-on-a-trusted-lease", None, "if False:", "test_a_job_is_not_started_on_a_lease_that_is_not_trusted[sqlite]"),
    Guard("unstarted-jobs-are-released", None, "pass", "test_a_busy_worker_releases_jobs_that_it_cannot_start[sqlite]"),
    Guard("holding-worker-rests-briefly", "self._executors.load().waiting and ", "False and ", "test_a_resting_worker_releases_jobs_that_it_cannot_start[postgresql]"),
    Guard("refusals-are-logged", "self._may_log(self._activity)", "not self._quiet and self._may_log(self._activity)", "test_a_refused_service_is_logged_while_outages_are_logged_elsewhere[sqlite]"),
    Guard("give-back-after-grace", None, "pass", "test_a_job_that_outlasts_the_grace_time_is_released_uncounted[sqlite-goes_on_in_its_thread]"),
    # limits
    Guard("a-limited-job-is-looked-at", None, "pass", "test_limited_jobs_without_a_session_are_blocked[sqlite]"),
    Guard("a-limited-job-is-blocked", '(limited, "limit")', '(limited, null())', "test_limited_jobs_without_a_session_are_blocked[postgresql]"),
    Guard("what-never-began-has-one-line", ' and event.reason not in NEVER_BEGAN', "", "test_a_job_with_a_bad_signature_leaves_one_line_and_no_traceback[sqlite]"),
    Guard("what-is-protected-stays-in-its-queue", None, "pass", "tests/worker/test_outcomes.py::test_a_signed_job_stays_in_its_queue[sqlite]"),
    *by("test_a_queue_keeps_its_order_through_releases_a_stop_and_deaths[sqlite]", ("released-job-keeps-its-due-time", None, "due = after(func.coalesce(mine.c.delay_ms, 0))"), ("release-wakes-other-workers", "isinstance(outcome, Released) and outcome.delay_ms is None", "False")),
    Guard("the-admitted-know-their-place", '"blocked_by": null()}', '"blocked_by": null(), "due_at": null()}', "test_a_limited_job_that_never_started_keeps_its_place[sqlite-released]"),
    Guard("who-waits-behind-goes-back-too", "self._ready.clear()", "jobs = [self._ready.popleft()]", "test_a_job_does_not_start_before_a_released_one_ahead_of_it[sqlite]"),
    Guard("long-jobs-bound-the-pace", None, "pass", "test_long_jobs_bound_the_pace_until_short_ones_end"),
    Guard("slow-claims-get-smaller", None, "pass", "test_slow_claims_take_fewer_jobs[sqlite]"),
    Guard("large-claims-get-smaller", None, "pass", "test_claims_of_large_payloads_take_fewer_jobs[sqlite]"),
    Guard("late-rows-are-started", None, "pass", "test_a_late_claim_starts_its_jobs[postgresql]"),
    Guard("sqlite-claim-renews-its-lease", None, "pass", "test_a_late_claim_starts_its_jobs[sqlite]"),
    Guard("what-is-settled-is-not-lost", " and not job.ended", "", "test_a_released_and_reclaimed_job_does_not_count_as_lost[sqlite]"),
    Guard("released-job-frees-its-slot", None, "if False:", "test_a_job_that_waits_for_its_next_attempt_holds_no_slot[sqlite]"),
    Guard("released-job-wakes-its-limit", None, "pass", "test_a_job_that_waits_for_its_next_attempt_holds_no_slot[postgresql]"),
    Guard("the-slots-of-the-lost-are-looked-at", None, "pass", "test_a_job_that_ends_without_a_settle_releases_its_slot[sqlite-lost]"),
    Guard("cancelled-slots-are-looked-at", None, "pass", "test_a_job_that_ends_without_a_settle_releases_its_slot[sqlite-cancelled]"),
    Guard("blocked-jobs-are-freed-after-the-settle", None, "pass", "test_no_more_jobs_than_the_limit_run_at_a_time[sqlite]"),
    Guard("a-key-is-waited-for", 'sql.lock(conn, _LOCK, parameters, waits=True)', 'conn.execute(_LOCK, parameters).all()', "test_an_admission_counts_after_it_has_waited_for_the_key[postgresql]"),
    Guard("slots-are-counted", "jobs.c.blocked_by.is_(None)", "jobs.c.reserved_at.is_not(None)", "test_two_admissions_at_once_grant_no_slot_twice[sqlite]"),
    Guard("serial-key-has-one-head", "jobs.c.id)", "jobs.c.priority.desc(), jobs.c.id)", "test_jobs_of_a_key_run_in_the_order_of_their_ids[sqlite]"),
    Guard("the-head-of-a-line", 'line["holds"] == 0', 'line["holds"] >= 0', "test_a_failure_holds_the_key_until_it_is_retried_or_deleted[postgresql-retried]"),
    Guard("the-head-of-a-line", "_may_run, ", "", "test_a_delayed_job_blocks_those_after_it_and_one_that_has_failed_does_not[sqlite]"),
    Guard("paused-hold-no-slots", '"blocked_by": "limit"', '"blocked_by": "flow"', "test_jobs_of_a_paused_queue_hold_no_slots[sqlite]"),
    Guard("limit-keys-are-swept", None, "done, self._after_key = FreedJobs(), ''", "test_the_sweep_admits_jobs_of_a_lost_wake[sqlite]"),
    Guard("an-unknown-limit-is-the-strictest", "ONE_BY_ONE", "NO_RULE", "test_a_sweep_before_the_wake_admits_one_by_one_where_none_has_the_limit[sqlite-lost-admitted0]"),
    Guard("an-unknown-limit-is-the-strictest", " | rules", "", "test_a_sweep_before_the_wake_admits_one_by_one_where_none_has_the_limit[sqlite-late-admitted1]"),
    Guard("a-start-is-never-early", "ceil(position", "int(position", "test_starts_are_never_closer_than_the_rate"),
    Guard("a-failed-retry-holds-no-slot", "== 1", "== 2", "test_jobs_without_a_limit_run_beside_a_full_waiting_list[postgresql]"),
    Guard("delete-wakes-the-serial-key", None, "pass", "test_a_failure_holds_the_key_until_it_is_retried_or_deleted[sqlite-deleted]"),
    *by("test_no_function_of_another_role_runs[public]", ("own-statements-are-qualified", None, "pass"), ("a-migration-looks-nowhere-else", None, "pass")),
    Guard("wake-keeps-its-rule", "Wake(key, rules[key])", "Wake(key)", "test_a_wake_keeps_its_limit_when_the_key_is_deleted_meanwhile[postgresql]"),
    Guard("a-key-in-use-is-not-forgotten", None, "is_unused = False", "test_a_key_unused_for_a_month_is_deleted[sqlite]"),
    Guard("what-is-set-is-not-forgotten", None, "", "test_a_key_that_is_needed_is_kept[sqlite-set_by_an_operator]"),
    Guard("rates-are-not-forgotten", None, "", "test_a_key_that_is_needed_is_kept[sqlite-at_a_slow_rate]"),
    Guard("slots-are-not-forgotten", None, "", "test_a_key_that_is_needed_is_kept[sqlite-holding_a_slot]"),
    Guard("limit-key-with-waiting-jobs-is-kept", None, "", "test_a_key_that_is_needed_is_kept[sqlite-in_line]"),
    Guard("what-may-be-retried-is-not-forgotten", None, "", "test_a_key_that_is_needed_is_kept[sqlite-failed]"),
    Guard("steps-keys-are-not-forgotten", None, "", "test_a_key_that_is_needed_is_kept[sqlite-a_step_that_waits]"),
    Guard("no-key-is-waited-for", "returning=(limits.c.limit_key,)", "returning=(limits.c.limit_key,), waits=True", "test_the_deletion_of_keys_waits_for_no_lock[postgresql]"),
    Guard("pinned-limit-overrides-code", "row.pinned_at is not None", "False", "test_an_operators_limit_counts_until_it_is_cleared[sqlite]"),
    *by(
        "test_a_slow_down_closes_the_key_for_all_until_its_time[postgresql]",
        ("a-closed-key-grants-nothing", "if self.opens_at == self.now else 0", ""),
        ("a-closed-key-takes-back-its-starts", None, "pass"),
        ("a-slow-down-closes-its-key", None, "pass"),
        ("only-the-owner-closes", None, ""),
        ("the-later-end-of-a-close-counts", "limits.c.closed_until > _end", "limits.c.closed_until < _end"),
    ),
    Guard("a-closed-key-is-looked-at-when-it-opens", None, "pass", "test_an_operator_closes_and_opens_a_key[sqlite]"),
    Guard("a-closed-key-opens-at-its-rate", "self.next_free_at or self.opens_at, self.opens_at", "self.next_free_at or self.now, self.now", "test_starts_are_never_closer_than_the_rate"),
    Guard("a-close-is-not-forgotten", None, "", "test_a_key_that_is_needed_is_kept[sqlite-closed]"),
    Guard("a-slow-down-releases-what-its-worker-holds", None, "pass", "test_a_worker_releases_what_it_holds_of_a_key_that_its_job_closes[sqlite]"),
    Guard("a-limit-that-is-raised-is-looked-at", None, "pass", "test_an_operators_limit_counts_until_it_is_cleared[postgresql]"),
    Guard("drain-awaits-admissions", None, "return False", "test_a_drain_runs_the_waiting_by_priority_then_age[sqlite]"),
    *by("test_the_loop_does_what_follows_an_event", ("drain-claims-once-more", None, "return Retire('nothing is available', replace=False)"), ("large-processes-are-replaced", "turn.resident > options.max_rss", "False")),
    # attempts and releases
    Guard("groups-are-looked-into", "(error, *parts)", "(error,)", "test_groups_count_by_their_exceptions_and_a_signal_when_it_is_alone"),
    Guard("isolated-handlers-are-interrupted", None, "return", "test_a_stopped_handler_runs_its_finally_and_its_process_goes_on[sqlite]"),
    Guard("handlers-of-the-program-stay", " if signal.getsignal(number) == default", "", "test_run_in_a_program_stops_in_good_order_at_a_signal[own-15-sqlite]"),
    *by("test_a_child_forked_beside_a_worker_takes_signals", ("forked-children-take-signals-here", "handle_here(number", "signal.signal(number"), ("forks-lose-no-signal", "(signal.SIG_BLOCK, _replaced)", "(signal.SIG_BLOCK, ())")),
    Guard("snoozes-are-bounded", None, "case Snooze():", "test_a_snooze_counts_no_attempt_up_to_a_maximum"),
    Guard("retry-keeps-the-token", '"lease_token", BigInteger)', '"lease_token", BigInteger, "reset")', "test_a_zombie_changes_nothing_after_an_operators_retry_reset_the_attempts[sqlite]"),
    Guard("failed-backoff-uses-the-default", "except BaseException as error:", "except Exception as error:", "test_a_callable_that_fails_gets_the_default_and_a_warning"),
    Guard("attempt-raises-nothing", "except BaseException as second:", "except ZeroDivisionError as second:", "test_an_attempt_whose_outcome_cannot_be_computed_fails[sqlite-def]"),
    Guard("slot-survives-a-subprocess-error", "except BaseException as error:", "except ZeroDivisionError as error:", "test_an_error_of_the_pool_costs_no_slot"),
    # the history of a job
    Guard("first-attempt-writes-no-history", "job.is_first_claim", "False", "test_a_first_attempt_that_finishes_leaves_no_record[sqlite]"),
    Guard("notes-leave-room", ", NOTES_BYTES", "", "test_a_thousand_snoozes_leave_room_for_errors[sqlite]"),
    Guard("operator-retry-is-recorded", None, "pass", "test_an_operators_retry_leaves_a_record_and_so_does_a_cancel[sqlite]"),
    # replay
    Guard("steps-are-not-replayed", "table.c.flow_id.is_(None)", "true()", "test_a_replay_leaves_out_steps_of_flows_and_ids_that_do_not_fit[sqlite]"),
    Guard("nothing-is-replayed-twice", " if id not in done", "", "test_a_replay_by_task_goes_on_where_it_was[sqlite]"),
    Guard("replays-are-told", None, "pass", "test_a_replay_emits_an_enqueued_event[sqlite]"),
    Guard("a-limited-replay-is-looked-at", None, "pass", "test_a_replay_has_no_cursor_and_waits_under_a_limit[sqlite]"),
    Guard("own-retention-is-kept", "source.c.expires_at.is_(None)", "source.c.id > 0", "test_a_jobs_own_retention_comes_before_the_age[sqlite]"),
    # headers, labels and progress of a job
    Guard("what-a-job-says-wins", None, "pass", "test_enqueue_middleware_adds_headers_and_those_of_the_job_win[sqlite]"),
    *by("test_bytes_in_a_row_stop_no_worker[sqlite]", ("labels-are-text", "str(self.claimed.label)", "self.claimed.label"), ("callback-names-are-text", "str(job.queue)", "job.queue")),
    Guard("a-line-names-its-worker-in-text", "str(course.worker)", "course.worker", "test_bytes_in_a_row_do_not_block_the_rescue_of_others[False-sqlite]"),
    Guard("nothing-steers-a-terminal", r"\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff", "", "test_escapes_in_a_row_do_not_reach_the_terminal[sqlite]"),
    Guard("foreign-pyproject-is-ignored", "str(owner) not in own", "False", "test_a_pyproject_of_another_user_is_passed_over[the file]"),
    Guard("database-url-imports-no-app", "self.app_path if needs_code or self.database_url is None else self.app_option", "self.app_path", "test_commands_with_a_database_alone_import_no_code"),
    Guard("secrets-among-parameters-are-masked", "filter(_SECRET.search, url.query)", "()", "test_no_spelling_of_a_password_is_shown"),
    Guard("grants-are-the-owners", "if conn.scalar", "if False and conn.scalar", "test_only_the_owner_may_apply_grants[postgresql]"),
    Guard("unknown-revision-is-reported", None, "raise", "test_commands_without_a_database_print_what_their_transcript_shows[migrate]"),
    Guard("words-steer-no-terminal", "escaped(name)", "str(name)", "test_a_command_names_database_schema_and_app_and_steers_no_terminal"),
    Guard("bytes-are-shown", "str(text)", "text", "test_bytes_in_a_row_are_shown[sqlite]"),
    Guard("bytes-go-over-a-link-as-text", "str(value)", "value", "test_bytes_in_a_row_do_not_block_the_rescue_of_others[True-sqlite]"),
    Guard("headers-are-read-first", None, "pass", "test_wrong_headers_of_sql_fail_the_attempt_before_it_begins[sqlite-[1]-the headers are not a JSON object]"),
    Guard("the-last-word-is-written", None, "locked: dict[Right, Item] = {}", "test_the_last_progress_is_stored_however_the_job_ends[sqlite-returns]"),
    # renewal and rescue
    Guard("renewal", 'after(bindparam("lease_ms", type_=BigInteger))', "jobs.c.lease_expires_at", "test_a_lease_is_renewed_while_its_handler_runs[sqlite]"),
    *by("test_a_job_with_an_expired_lease_is_rescued_and_counted[sqlite]", ("rescue-raises-the-token", None, 'return {"lease_token": jobs.c.lease_token}'), ("attempts-are-bounded", None, "return True")),
    Guard("rescue-takes-the-expired", "_HAS_EXPIRED, jobs", "jobs", "test_a_job_with_an_expired_lease_is_rescued_and_counted[postgresql]"),
    Guard("a-lost-handler-is-told", None, "pass", "test_a_handler_sees_cancelled_when_its_lease_is_lost[sqlite]"),
    Guard("unknown-claims-are-given-back", None, "pass", "test_a_claim_whose_reply_was_lost_is_released[sqlite]"),
    Guard("unknown-claims-are-given-back", None, "self._doubts = set(unknown)", "test_a_claim_whose_reply_was_lost_is_released[postgresql]"),
    *by("test_a_claim_whose_reply_is_late_keeps_its_jobs[sqlite]", ("pending-claim-is-not-lost", "claims_ended >= unknown[right]", "True"), ("pending-claim-is-announced", "with self._leases.claiming():", "if True:")),
    Guard("pending-claim-is-not-lost", "unknown[right]", "claims_started", "test_a_job_is_lost_when_no_claim_under_way_can_bring_it"),
    # what follows the end of a job, written with it
    Guard("follow-ups-are-written", None, "if False:", "test_a_finished_job_gets_its_on_success_callback[sqlite]"),
    Guard("a-follow-up-that-cannot-be-made-stops-no-other", None, "raise", "test_a_callback_that_cannot_be_made_does_not_block_other_ends[sqlite-True]"),
    Guard("callback-commits-with-the-settle", None, "followed = False", "test_a_broken_settle_ends_no_job_and_is_repeated[postgresql-False]"),
    Guard("complete-writes-its-callback", None, "pass", "test_a_job_that_completes_itself_gets_its_callback_at_the_commit[sqlite]"),
    Guard("a-late-complete-is-not-followed", None, "if True:", "test_a_zombies_complete_writes_no_callback[postgresql]"),
    Guard("what-is-rolled-back-for-long-delays-no-other", "else OFTEN", "else self.failures", "test_refused_rows_hold_up_no_other[postgresql-settle-after a deadlock]"),
    Guard("rescue-skips-refused-rows", "lately(conn, LOST)", "{'refused': []}", "test_refused_rows_hold_up_no_other[sqlite-rescue-]"),
    Guard("refused-start-leaves-its-query", ", jobs.c.id.not_in(REFUSED)", "", "test_refused_rows_hold_up_no_other[sqlite-admission-]"),
    Guard("a-fault-ends-the-worker", None, "if False:", "test_a_worker_ends_with_code_1_when_its_library_fails[claim-postgresql]"),
    Guard("worker-stops-when-settles-keep-failing", None, "pass", "test_a_worker_ends_with_code_1_when_its_library_fails[settle and look-postgresql]"),
    Guard("a-refused-task-slows-no-other", None, "return set()", "test_outcomes_of_a_refused_task_are_settled_apart_from_then_on[sqlite]"),
    Guard("refused-batch-keeps-its-outcomes", None, "pass", "test_a_result_is_stored_whole_when_its_table_is_back[sqlite]"),
    Guard("settle-raises-library-errors", None, "pass", "test_a_worker_ends_with_code_1_when_its_library_fails[settle-postgresql]"),
    *by("test_a_refused_callback_does_not_block_other_rescues[sqlite]", ("a-refusal-is-logged-once", None, "if True:"), ("refused-part-rolls-back-to-a-savepoint", "nullcontext() if within is None else within.begin_nested()", "nullcontext()")),
    Guard("an-undone-transaction-is-begun-again", "problem.rolled_back and within is not None", "False", "test_a_deadlock_in_a_savepoint_is_no_refusal[postgresql]"),
    Guard("bad-headers-are-not-passed-on", None, "pass", "test_unreadable_headers_are_not_passed_on_to_a_callback[sqlite-no JSON]"),
    Guard("a-row-without-follow-ups-has-its-tasks", None, "pass", "test_a_job_inserted_by_sql_gets_its_tasks_callback[postgresql]"),
    # flows
    Guard("a-step-that-waits-is-blocked", "== 1", "== 2", "test_a_step_runs_after_its_parents[postgresql]"),
    Guard("a-wait-begins-with-the-settle", None, "pass", "test_a_job_waits_without_a_slot_and_runs_again_with_the_value[sqlite]"),
    Guard("a-signal-calls-all-that-wait", "True", "False", "test_a_wait_and_a_signal_that_do_not_see_each_other_meet[postgresql]"),
    Guard("a-look-calls-some", "== AT_ONCE", "== -1", "test_a_signal_for_many_waits_calls_some_at_a_time[sqlite]"),
    Guard("waits-of-no-job-are-deleted", "if due:", "if False:", "test_waits_of_cancelled_jobs_free_nothing[sqlite]"),
    Guard("a-signal-comes-first", "exists().where(_came), \"signal\"), (waits.c.until <= now(), \"timeout\")", "waits.c.until <= now(), \"timeout\"), (exists().where(_came), \"signal\")", "test_a_step_ends_with_the_first_signal_of_its_name[sqlite]"),
    Guard("the-first-signal-counts", "<= now()", "> now()", "test_a_step_ends_with_the_first_signal_of_its_name[sqlite]"),
    Guard("signals-are-bounded", "case((_bound > now(), _bound), else_=now())", "now()", "test_signals_are_bounded_and_cost_an_idle_worker_nothing[sqlite]"),
    Guard("a-new-signal-is-not-pruned", ".is_(None)", ".is_not(_bound)", "test_signals_are_bounded_and_cost_an_idle_worker_nothing[sqlite]"),
    Guard("signals-are-protected", None, "pass", "test_values_are_encrypted_where_jobs_are[sqlite]"),
    Guard("no-worker-runs-a-wait", ", jobs.c.task != WAIT_TASK", "", "test_a_step_ends_with_the_first_signal_of_its_name[sqlite]"),
    Guard("a-retried-wait-waits", None, "pass", "test_a_timeout_fails_the_step_and_leads_to_another[sqlite]"),
    Guard("unblock-waits-for-live-parents", "_id_in(parents, before)", "_id_in(parents, -1)", "test_a_step_is_unblocked_after_its_last_parent[postgresql]"),
    Guard("who-has-signed-off-stays-away", None, "pass", "test_a_worker_that_has_left_does_not_register_again[sqlite]"),
    Guard("crowded-worker-claims-later", None, "pass", "test_jobs_that_wait_for_subprocesses_keep_their_place[False-sqlite]"),
    Guard("drains-keep-what-waits-for-processes", "if not self._options.drain:", "if True:", "test_jobs_that_wait_for_subprocesses_keep_their_place[True-sqlite]"),
    Guard("failed-thread-start-is-repeated", "thread.start()", "self._thread = thread; thread.start()", "test_the_next_notification_starts_the_thread_that_could_not_start[postgresql]"),
    Guard("waiters-hear-of-what-does-not-mend", "was_up and self.may_mend(error)", "was_up", "test_the_wait_for_a_job_ends_when_its_row_or_a_table_is_gone[sqlite-table]"),
    Guard("timeout-checks-for-an-outcome", None, "return []", "test_the_timeout_ends_the_wait_and_not_the_job[postgresql]"),
    Guard("what-has-ended-keeps-its-key", None, "holders = {}", "test_a_key_is_kept_by_a_cancelled_job_and_free_when_its_row_is_gone[sqlite]"),
    Guard("what-has-just-ended-keeps-its-key", None, "pass", "test_a_job_that_ends_during_an_enqueue_of_its_key_keeps_it[postgresql]"),
    Guard("lasting-keys-need-read-committed", None, "pass", "test_a_stricter_transaction_is_refused[repeatable-postgresql]"),
    Guard("a-failed-step-ends-the-wait", None, "pass", "test_the_result_of_a_flow_is_that_of_its_end_or_of_a_failed_step[sqlite]"),
    Guard("a-last-look-awaits-the-thread", "self._looking", "threading.Lock()", "test_a_last_look_awaits_that_of_the_thread"),
    Guard("drain-awaits-maintenance", None, "pass", "test_a_draining_worker_awaits_jobs_that_a_service_unblocks[sqlite]"),
    Guard("drain-awaits-freed-jobs", "and all(unblocker.is_idle for unblocker in self._unblockers)", "", "test_a_draining_worker_awaits_the_steps_it_unblocks[sqlite]"),
    Guard("operators-unblock", None, "pass", "test_a_cancelled_or_deleted_step_cancels_steps_that_need_it[postgresql]"),
    Guard("what-ended-lately-is-swept", None, "", "test_the_unblock_service_sweeps_between_full_sweeps[postgresql]"),
    Guard("a-missing-result-fails-its-job", None, "done.ready.append(job)", "test_a_missing_result_fails_the_step_with_one_error[sqlite]"),
    Guard("cancel-writes-its-callback", None, "pass", "test_a_cancelled_job_gets_its_on_cancel_callback[sqlite-waiting]"),
    *by("test_prune_keeps_the_parents_of_a_live_step[postgresql]", ("needed-results-are-not-deleted", None, "pass"), ("what-is-asked-for-is-kept", None, "")),
    *by(
        "test_a_falsy_result_skips_a_step_and_those_behind_it_alone[sqlite]",
        ("an-unneeded-step-is-skipped", "why == NOT_NEEDED", "False"),
        ("a-step-behind-skipped-ones-alone-is-skipped", 'all(when == "ended" for _, when in edges_now)', "False"),
    ),
    Guard("an-optional-step-has-no-result", ' and on_outcome != "either"', "", "test_steps_go_on_behind_an_optional_one_that_fails[sqlite]"),
    Guard("a-stale-verdict-cancels-nothing", "verdict != NEVER", "False", "test_a_verdict_that_another_process_overtook_cancels_nothing[sqlite]"),
    Guard("optional-steps-are-not-cancelled", '"either"', '"ended"', "test_steps_behind_an_optional_one_wait_as_for_others[sqlite]"),
    Guard("growth-goes-with-the-ending", None, "pass", "test_a_step_adds_steps_in_the_transaction_that_completes_it[sqlite]"),
    Guard("step-result-is-not-formatted", "__str__", "text_of", "test_a_result_is_no_part_of_a_text"),
    Guard("a-named-task-takes-results", "tuple(results.items())", "()", "test_a_step_by_name_takes_the_results_of_others[sqlite]"),
    Guard("growth-is-not-dropped", None, "elif False:", "test_added_steps_exist_after_the_commit_that_completes_their_job[postgresql]"),
    # complete(), in the handler's own transaction
    Guard("complete-waits", ", waits=True", "", "test_an_owners_write_waits_for_a_heartbeat_and_a_heartbeat_skips_it[complete-postgresql]"),
    Guard("the-key-before-its-job", None, "pass", "test_an_enqueue_of_the_key_waits_for_an_open_complete[mariadb]"),
    Guard("strict-snapshot-is-refused", None, "return None", "test_a_stricter_isolation_level_is_refused_in_a_sentence[REPEATABLE READ-mariadb]"),
    Guard("undone-transaction-invalidates-its-connection", None, "pass", "test_a_session_refuses_all_after_a_deadlock_to_rollback[pymysql-Session]"),
    Guard("complete-read-committed", None, "if False:", "test_a_stricter_isolation_level_is_refused_in_a_sentence[REPEATABLE READ-postgresql]"),
    Guard("complete-must-commit", None, "return Finished(None)", "test_a_rollback_after_complete_is_a_failed_attempt_with_the_reason[sqlite]"),
    Guard("completion-is-verified-by-token", "Finished() if right in settled else otherwise", "Finished()", "test_a_rollback_after_complete_is_a_failed_attempt_with_the_reason[postgresql]"),
    Guard("completion-is-verified-by-token", "Finished() if right in settled else otherwise", "otherwise", "test_an_exception_after_the_commit_changes_nothing[sqlite-is pruned]"),
    # checkpoints of a long job, and its steps
    Guard("checkpoint-by-the-owner", "cursor, text)", "cursor, text) or False", "test_a_zombie_saves_nothing[sqlite]"),
    Guard("checkpoints-follow-each-other", "jobs.c.cursor.is_not_distinct_from(mine.selected_columns.before)", "jobs.c.id.is_not(None)", "test_a_checkpoint_after_a_rolled_back_one_is_refused[sqlite]"),
    Guard("checkpoint-waits", ", waits=True", "", "test_an_owners_write_waits_for_a_heartbeat_and_a_heartbeat_skips_it[checkpoint-postgresql]"),
    Guard("only-who-gets-on-is-patient", "jobs.c.cursor.is_distinct_from(mine.c.after)", "mine.c.after.is_not(None)", "test_only_a_moved_cursor_resets_the_counts[sqlite-1-expected0]"),
    Guard("cursor-resets-count", "attempt.claimed._replace(cursor=text, releases=0)", "attempt.claimed._replace(cursor=text)", "test_a_snooze_counts_only_without_a_moved_cursor[sqlite-True]"),
    Guard("no-checkpoint-after-complete", "attempt.completed", "False", "test_the_last_slice_and_the_end_may_be_one_transaction[sqlite]"),
    Guard("a-checkpoint-tells-of-a-cancel", None, "pass", "test_a_handler_in_a_thread_sees_at_a_checkpoint_that_it_is_cancelled[sqlite]"),
    Guard("cursors-are-read-first", None, "pass", "test_a_cursor_that_is_not_json_fails_its_job_alone[sqlite]"),
    *by("test_a_bad_cursor_is_refused_before_anything_is_written[sqlite]", ("cursors-are-bounded", "CURSOR_BYTES", "10**9"), ("steps-are-no-cursor", "STEPS in cursor", "False")),
    Guard("a-cursor-is-no-step", "steps is None", "False", "test_a_job_has_steps_or_checkpoints[sqlite]"),
    Guard("a-name-is-of-one-step", "is not step", "is None", "test_a_job_has_steps_or_checkpoints[postgresql]"),
    Guard("a-done-step-calls-nothing", "self._is_done()", "False", "test_each_step_is_done_once_and_remembers_its_value[sqlite]"),
    Guard("values-of-steps-are-bounded", "RESULT_BYTES", "10**9", "test_a_value_that_no_step_can_keep_is_refused[sqlite]"),
    Guard("steps-are-bounded", "STEPS_BYTES", "10**9", "test_steps_keep_eight_large_values[sqlite]"),
    Guard("values-of-steps-are-protected", None, "pass", "test_a_value_is_encrypted_as_results_are[sqlite]"),
    Guard("steps-side-by-side-are-saved", "self._saving", "Lock()", "test_async_steps_run_once_and_side_by_side[sqlite]"),
    # jobs that have to be started in time
    Guard("too-late-is-not-started", "late_ms >= 0", "False", "test_a_job_may_expire_without_a_slot[sqlite]"),
    Guard("what-was-started-does-not-expire", " and job.attempts <= 1", "", "test_started_jobs_go_on_after_snooze_and_retry[sqlite-failed]"),
    Guard("what-began-in-time-goes-on", " == 0", " >= 0", "test_started_jobs_go_on_after_snooze_and_retry[postgresql-snoozed]"),
    # what becomes of a waiting job whose unique key a new one has
    Guard("only-the-waiting-are-replaced", ", jobs.c.blocked_by.is_(None)", "", "test_limited_jobs_without_a_session_are_blocked[postgresql]"),
    Guard("only-the-waiting-are-replaced", "IS_UNRESERVED, ", "", "test_a_replace_of_a_running_job_waits_for_its_claim_and_for_no_completion[postgresql]"),
    Guard("what-runs-is-not-waited-for", "job.state is State.RUNNING", "False", "test_a_replace_of_a_running_job_waits_for_its_claim_and_for_no_completion[postgresql]"),
    Guard("keys-in-one-order", "sorted(positions.keys() - holders.keys(), key=lambda key: (key[0], key[1] or \"\"))", "[key for key in positions if key not in holders]", "test_batches_with_reversed_keys_do_not_deadlock[conflicts2-True-postgresql]"),
    Guard("debounced-to-a-limit", "(earlier > jobs.c.available_at, earlier)", "(earlier > jobs.c.available_at, new.available_at)", "test_debounce_moves_a_job_up_to_max_wait[sqlite]"),
    # the jobs of a dead host, in batches
    Guard("rescue-repeats-until-empty", None, "if True:", "test_ten_thousand_jobs_of_a_dead_host_are_rescued_without_a_wait[sqlite-looks itself]"),
    Guard("rescue-repeats-until-empty", "not rescued", "len(rescued) < RESCUE_BATCH", "test_a_job_whose_end_is_refused_does_not_delay_its_batch[sqlite]"),
    Guard("rescue-pauses-between-batches", None, "return 0.0", "test_rescue_pauses_between_batches_on_a_single_writer[sqlite]"),
    Guard("what-never-began-keeps-its-key", "as_trusted(job, encryption)", "as_trusted(job, encryption)._replace(limit_key=None)", "test_a_job_that_never_began_frees_its_slot_when_released[sqlite-itself]"),
    Guard("full-sweep-is-repeated", None, "pass", "test_a_paused_queue_releases_all_its_slots_without_a_wait[sqlite-4]"),
    # what may start once, and threads that cannot be started
    Guard("what-starts-once-is-not-given-back", "follows(1, job.max_attempts)", "True", "test_a_job_with_one_attempt_fails_when_it_outlasts_the_grace_time[sqlite-is_cancelled-False]"),
    Guard("what-is-given-back-does-not-start", "attempt.cancelled_at is not None", "False", "test_a_job_released_before_it_began_does_not_start"),
    Guard("admission-thread-start-is-retried", "self.begin()", "self._thread is not None", "test_blocked_jobs_are_freed_when_a_thread_can_be_started_again[sqlite-sqlq-limit]"),
    # the supervisor, and what it knows of a process that died
    Guard("only-what-started-counts", None, "started = set(batch)", "test_started_jobs_of_a_dead_worker_count_and_others_do_not[sqlite-memory]"),
    Guard("only-what-started-counts", "dead.started is None or right in dead.started", "right in (dead.started or ())", "test_started_jobs_of_a_dead_worker_count_and_others_do_not[sqlite-none]"),
    Guard("locked-rows-are-given-back-later", None, "dead.rights = []", "test_a_locked_row_is_released_later[postgresql]"),
    Guard("supervisor-renews", None, "entered, renewed = set(kept), {worker: {} for worker in kept}", "test_the_heartbeat_renews_its_workers_jobs_and_notifies_it[sqlite]"),
    Guard("unknown-workers-renew-themselves", None, "elif False:", "test_a_worker_unknown_to_the_heartbeat_renews_for_itself[sqlite]"),
    Guard("renews-its-own", "jobs.c.reserved_by.in_(_owners))", "jobs.c.id.is_not(None))", "test_the_heartbeat_renews_its_workers_jobs_and_notifies_it[postgresql]"),
    Guard("losses-are-counted", "one_more(jobs.c.losses)", "jobs.c.losses", "test_started_jobs_of_a_dead_worker_count_and_others_do_not[postgresql-memory]"),
    Guard("pipe-reader-survives-a-bad-message", "Exception", "ZeroDivisionError", "test_a_bad_message_does_not_stop_a_supervisor_from_receiving"),
    Guard("link-of-a-dead-child-is-closed", None, "self.link.close(), self.box.close()", "test_a_dead_worker_does_not_block_the_wake_of_others"),
    Guard("orphans-stop", None, "pass", "test_a_worker_whose_supervisor_is_gone_stops_soon"),
    Guard("reading-is-a-start", None, "pass", "test_a_process_that_dies_reading_arguments_costs_that_job_its_attempts[sqlite-kills]"),
    Guard("shared-memory-is-written-before-the-handler", None, "pass", "test_the_shared_memory_has_the_running_jobs[sqlite]"),
    Guard("shared-memory-drops-ended-jobs", None, "pass", "test_the_shared_memory_has_the_running_jobs[postgresql]"),
    Guard("shared-memory-needs-no-disk", 'os.memfd_create("sqlq")', "os.dup(tempfile.TemporaryFile().fileno())", "test_shared_memory_needs_no_disk"),
    Guard("shared-memory-overflow-is-marked", None, "pass", "test_shared_memory_that_overflowed_reads_as_unknown"),
    Guard("droppable-offers", None, "if True:", "test_offers_do_not_wait_for_a_process_that_does_not_read"),
    Guard("cut-message-is-ignored", None, "if not line:  # it died in the middle of a word", "test_a_message_cut_off_is_ignored"),
    Guard("forked-process-outlives-its-server", "os.pidfd_open(self.pid)", "-1", "test_a_fork_server_forks_processes_like_those_that_start_anew[exit_codes]"),
    *by("test_subprocesses_are_forked_unless_the_import_has_opened_what_none_can_share[sqlite]", ("forks-share-no-thread", 'return "the locks of another thread"', "pass"), ("forks-share-no-connection", "end.type == socket.SOCK_STREAM", "False")),
    Guard("a-fork-server-holds-no-pipe", "in private", "in ()", "test_a_fork_server_forks_processes_like_those_that_start_anew[descriptors]"),
    Guard("without-a-fork-server-all-goes-on", "OSError", "ZeroDivisionError", "test_a_worker_goes_on_when_its_fork_server_was_killed[sqlite]"),
    Guard("signals-blocked-at-spawn", None, "before = signal.pthread_sigmask(signal.SIG_BLOCK, [])", "test_a_new_process_does_not_meet_the_terminals_signals_half_started"),
    # processes for one job at a time
    Guard("lost-jobs-run-isolated", " or job.losses > 0", "", "tests/faults/test_supervisor.py::test_the_jobs_of_a_dead_process_are_released_at_once[sqlite-3-1]"),
    Guard("slot-survives-an-unreadable-message", "except Exception:", "except ZeroDivisionError:", "test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost"),
    Guard("kill-spares-the-next", None, "if True:", "test_a_late_kill_does_not_end_the_next_job"),
    Guard("unwritten-outcomes-are-bounded", None, "if not self._starting:", "test_unwritten_outcomes_bound_starts_on_sqlite[sqlite]"),
    # what cannot start, deadlines, and outcomes while the database is away
    Guard("what-cannot-start-is-given-back", None, "except ZeroDivisionError:", "test_a_job_is_released_when_no_event_loop_can_be_made[sqlite]"),
    Guard("processes-start-outside-of-locks", "isolate = Isolate(self._spawn, self._setup)", "with self._lock: isolate = Isolate(self._spawn, self._setup)", "test_no_slot_waits_while_a_subprocess_starts"),
    Guard("a-cancel-waits-for-no-process", "offer", "send", "test_a_cancel_waits_for_no_subprocess_that_does_not_read"),
    Guard("poller-errors-are-logged", "isinstance(error, away)", "True", "test_a_mistake_in_the_poller_is_logged_with_its_traceback[postgresql]"),
    Guard("a-mistake-is-no-outage", "isinstance(error, AWAY)", "True", "test_a_mistake_beside_the_loops_is_logged_with_its_traceback"),
    Guard("hosts-share-the-maintenance", "random.random() * hosts < RESCUERS", "True", "test_many_hosts_share_the_looks_for_maintenance"),
    Guard("starts-are-bounded", None, "if False:", "test_few_subprocesses_start_at_a_time"),
    *by("test_only_a_handler_past_its_timeout_counts_as_stuck", ("what-has-ended-is-not-stuck", "not job.ended", "True"), ("a-cancel-does-not-hide-a-timeout", None, "due = requested_at + OVERDUE_SECONDS")),
    Guard("idleness-begins-with-a-look", None, "_worked_at = monotonic()", "test_no_time_is_idle_before_the_database_answers"),
    Guard("an-outage-is-no-idleness", None, "pass", "test_an_outage_is_no_time_without_work[sqlite]"),
    Guard("a-worker-runs-once", None, "if False:", "test_a_worker_is_started_waited_for_and_stopped[sqlite]"),
    Guard("one-death-keeps-no-other-waiting", "Exception", "KeyboardInterrupt", "test_a_death_that_cannot_be_settled_keeps_no_other_waiting[sqlite]"),
    Guard("pipe-messages-do-not-interleave", None, "self._unsent = bytearray(_line(message))", "test_a_waiting_message_begins_after_the_one_that_did_not_fit"),
    Guard("refused-settle-is-left-to-the-rescue", None, "locked = list(states)", "test_an_end_that_the_database_refuses_makes_no_job_one_that_never_began[sqlite]"),
    Guard("refused-loss-counts-as-started", " if right[0] in ended", "", "test_a_job_whose_end_was_refused_is_not_released[sqlite]"),
    Guard("an-attempt-ends-once", None, "if False:", "test_a_job_ending_at_its_release_is_settled_once[sqlite]"),
    Guard("no-process-outlives-its-give-back", None, "pass", "test_a_subprocess_ends_before_its_job_is_released[sqlite]"),
    *by("test_a_child_without_a_receiving_thread_is_killed", ("child-without-a-reader-is-killed", "BaseException", "KeyboardInterrupt"), ("a-shortage-of-threads-is-waited-out", "SHORTAGES", "OSError")),
    Guard("without-a-thread-the-rest-goes-on", "(RuntimeError, MemoryError)", "KeyError", "test_a_worker_unknown_to_the_heartbeat_renews_for_itself[sqlite]"),
    *by("test_a_host_without_maintenance_has_no_poller[postgresql]", ("worker-polls-without-a-host", "SHORTAGES", "OSError"), ("poller-starts-after-its-maintenance", "(self._maintenance, poller)", "(poller, self._maintenance)")),
    Guard("pause-reaches-each-child", "message != child.requests", "message != self._children()[0].requests", "test_a_later_worker_is_notified_of_the_end_of_a_pause"),
    Guard("what-is-set-keeps-the-order", None, "takes_set = True", "test_a_key_that_is_set_before_its_first_job_keeps_the_order[sqlite]"),
    Guard("a-template-is-no-key", None, "if False:", "test_commands_print_what_their_transcript_shows[sqlite-limits]"),
    Guard("transaction-begins-once", None, "pass", "test_an_engine_may_be_configured_twice"),
    Guard("refused-tick-fails-alone", "(Exception,)", "()", "test_a_job_that_no_driver_takes_fails_alone[sqlite-on_failure]"),
    Guard("completed-once-in-a-block", None, "if False:", "test_a_job_is_completed_once_in_a_block_that_does_so[sqlite-True]"),
    Guard("a-stop-needs-no-database", 'passing_over("could not sign off"), ', "", "test_a_worker_stops_whatever_the_database_raises[sqlite]"),
    Guard("bytes-take-no-results", "isinstance(job.payload, str)", "True", "test_a_step_with_bytes_does_not_block_other_steps[sqlite]"),
    Guard("unready-process-is-unhealthy", "for child in children", "for child in children[:0]", "test_a_process_that_never_starts_is_unhealthy[sqlite]"),
    Guard("watchdog-skips-its-own-pause", "min(now - self._last_at, MAX_TICK_SECONDS)", "now - self._last_at", "test_a_watchdog_counts_no_time_when_the_supervisor_did_not_run"),
    Guard("late-job-fails-as-timeout", "row.id in late", "False", "test_a_frozen_process_is_killed_and_its_late_job_runs_again_alone[sqlite]"),
    Guard("stop-wait-is-bounded", "until - monotonic()", "until - monotonic(), 5.0", "test_the_timeout_for_outcomes_ends_after_the_grace_time"),
    Guard("every-wait-of-pymysql-has-an-end", " or is_over()", "", "test_a_stopping_thread_waits_no_longer_for_the_database[mariadb]"),
    Guard("changed-session-is-replaced", None, '_IS_SOUND = "SELECT 1"', "test_a_session_with_changed_settings_is_replaced[mariadb]"),
    Guard("workers-read-committed-mariadb", "'READ-COMMITTED'", "'REPEATABLE-READ'", "test_a_claim_of_all_due_jobs_does_not_block_producers[mariadb]"),
    Guard("rows-are-changed-by-their-ids", " FORCE INDEX (PRIMARY)", "", "test_a_renewal_waits_for_no_other_row_of_a_small_table[mariadb]"),
    Guard("workers-wait-for-no-key", None, "is_locked = False", "test_a_settle_does_not_wait_for_a_locked_unique_key[mariadb]"),
    Guard("what-passes-at-last-is-no-refusal", None, "pass", "test_outcomes_that_pass_at_their_second_try_are_written_in_batches[mariadb]"),
    Guard("what-is-rolled-back-for-long-delays-no-other", "self.failures + 1 if passes", "0 if passes", "test_an_outcome_whose_key_is_locked_delays_no_other[mariadb]"),
    Guard("what-is-locked-is-told-seldom", None, "if True:", "test_an_outcome_whose_key_stays_locked_is_logged_once[mariadb]"),
    Guard("insert-locks-conflicts-shared", "changes is None and returning", "False", "test_neighbouring_keys_do_not_deadlock_when_just_freed[mariadb]"),
    Guard("conflicting-job-is-read-anew", ".with_for_update(read=True)", "", "test_a_met_key_is_read_anew_in_an_old_snapshot[mariadb]"),
    Guard("statement-fits-its-packet", "size + own > limit", "False", "test_batches_of_large_jobs_are_written_whatever_their_size[plain-mariadb]"),
    Guard("workers-of-this-machine-are-rung", "doorbell.read() or ", "", "test_a_worker_without_notifications_is_woken_by_enqueues_of_its_machine[sqlq-mariadb]"),
    Guard("polls-are-frequent-after-jobs", None, "seconds = 1.25", "test_a_host_without_notifications_polls_ever_more_rarely_after_jobs"),
    Guard("stop-ends-the-wait-for-an-answer", " or (not ready and is_over())", "", "test_a_stopping_thread_waits_no_longer_for_the_database"),
    Guard("outcomes-have-no-deadline", None, "until = 0.0", "test_a_process_that_retires_during_an_outage_waits_until_its_outcomes_are_written[sqlite]"),
    Guard("what-was-started-counts", "unknown - started", "unknown", "test_a_refused_outcome_counts_while_the_supervisor_renews[sqlite]"),
    Guard("a-stop-iteration-keeps-nobody-waiting", "StopIteration", "ZeroDivisionError", "test_a_stop_iteration_of_a_handler_reaches_the_awaiting_caller"),
    Guard("an-unmet-step-fails-alone", None, "if False:", "test_a_step_that_takes_a_result_that_is_not_there_fails_alone[sqlite]"),
    Guard("callers-loop-is-not-stopped", " and self._ends_loop", "", "test_adrain_runs_handlers_and_the_lifespan_on_the_loop_of_the_test[sqlite]"),
    Guard("a-cancelled-drain-leaves-no-worker", None, "pass", "test_a_cancelled_adrain_leaves_no_worker_behind[sqlite]"),
    Guard("awaitables-are-awaited", None, "if False:", "test_an_async_handler_under_an_ordinary_decorator_is_awaited[sqlite]"),
    Guard("generators-are-no-results", "issubclass(kind, (types.GeneratorType, types.AsyncGeneratorType))", "False", "test_a_generator_is_no_result[sqlite-drain]"),
    Guard("threads-keep-no-process", None, "pass", "test_a_process_ends_although_a_coroutine_left_a_thread[sqlite]"),
    Guard("repeated-signal-is-one-stop", "stopping_since + REPEAT_SECONDS", "stopping_since", "test_signals_to_the_whole_group_stop_in_good_order[sqlite]"),
    Guard("process-1-has-no-child", None, "with suppress(ZeroDivisionError):", "test_a_process_without_children_has_no_orphans_to_bury"),
    # operators
    Guard("forced-cancel-raises-the-token", None, "pass", "test_after_a_forced_cancel_the_old_owner_changes_nothing[sqlite-Finished]"),
    Guard("cancel-passes-over-locked", "waits=wait_ms is not None", "waits=True", "test_cancel_after_a_claim_is_a_request[False-postgresql]"),
    *by("test_a_stopped_action_ends_after_its_batch[sqlite]", ("actions-can-be-stopped", "audit.c.stopped_at.is_(None)", "audit.c.id > 0"), ("an-action-is-one-row", "acting_as(None)", "acting_as(actor)")),
    Guard("what-is-not-recorded-is-done", "DBAPIError", "KeyError", "test_an_action_succeeds_when_its_audit_record_is_refused[postgresql]"),
    Guard("the-claimed-are-not-rescheduled", ", among=IS_UNRESERVED)", ")", "test_a_job_claimed_meanwhile_is_not_touched[sqlite]"),
    *by("test_a_rescheduled_job_releases_its_slot_until_its_new_time[sqlite]", ("the-rescheduled-hold-no-slot", None, "by = jobs.c.blocked_by"), ("the-rescheduled-are-looked-at", None, "pass")),
    Guard("cancel-is-requested", None, "requested = null()", "test_cancel_of_a_running_job_is_a_request_and_leaves_its_owner[sqlite]"),
    Guard("cancel-is-noted", None, "if False:", "test_supervisor_renewals_extend_trust_and_reveal_losses[sqlite]"),
    Guard("stopped-is-not-finished", None, "if False:", "test_a_running_handler_sees_the_cancel_and_its_job_ends_cancelled[sqlite-def]"),
    Guard("cancelled-before-it-starts", None, "if False:", "test_a_waiting_job_with_a_cancel_request_does_not_start[sqlite]"),
    Guard("counts-go-by-the-index", ".order_by(jobs.c.available_at)", "", "tests/conformance/test_admin_queues.py::test_postgresql_reads_a_bounded_number_of_pages[postgresql]"),
    Guard("all-children-are-idle", "min(", "max(", "test_a_supervisor_stops_when_none_of_its_children_has_work"),
    Guard("the-loop-of-all-goes-on", None, "if not self._closing:", "test_a_system_exit_in_an_asyncio_task_ends_its_attempt_alone[sqlite-exits]"),
    Guard("cancel-survives-a-closed-loop", "RuntimeError", "ZeroDivisionError", "test_a_cancel_after_the_loop_is_closed_blocks_nothing"),
    *by("test_an_asyncio_task_that_exits_ends_no_process_and_a_coroutine_finds_its_job[sqlite]", ("an-isolates-loop-goes-on", "if task.done():", "if True:"), ("an-isolates-coroutine-knows-its-job", "(coroutine)", '(coroutine, context=__import__("contextvars").Context())')),
    Guard("late-may-have-completed", None, "if False:", "test_a_job_that_completed_itself_is_finished_however_its_attempt_ends[sqlite-late-2s]"),
    Guard("the-dead-may-have-completed", None, "return outcome", "test_a_job_that_completed_itself_is_finished_however_its_attempt_ends[sqlite-gone-1h]"),
    Guard("give-back-after-grace", "SelfCompleted(otherwise)", "otherwise", "test_a_job_that_completed_itself_is_finished_after_the_grace_time[sqlite]"),
    Guard("what-gets-no-process-is-bounded", "running.claimed", "running.claimed._replace(releases=0)", "test_a_job_is_not_released_for_ever_when_no_subprocess_can_start"),
    Guard("second-process-death-is-backed-off", "max(job.losses, job.attempts - 1)", "job.losses", "test_a_job_is_due_at_once_when_its_process_dies_and_later_when_it_dies_again"),
    Guard("what-never-comes-up-is-bounded", "running.claimed", "running.claimed._replace(releases=0)", "test_a_job_is_not_released_for_ever_when_its_subprocess_fails_to_start"),
    Guard("what-cannot-start-is-bounded", "job.claimed", "job.claimed._replace(releases=0)", "test_a_job_that_cannot_start_anywhere_is_not_released_for_ever[sqlite]"),
    Guard("starts-have-an-end", None, "pass", "test_a_subprocess_that_hangs_at_its_start_is_killed_and_its_job_released"),
    Guard("what-has-begun-does-not-hang", None, "if True:", "test_a_process_that_has_begun_in_time_is_not_killed_for_its_start"),
    *by("test_a_job_that_needs_its_own_process_gets_an_unused_one", ("isolates-end-after-their-jobs", None, "if False:"), ("isolated-job-gets-an-unused-process", " or job.alone", "")),
    Guard("paused-workers-claim-nothing", None, "if False:", "test_a_paused_worker_claims_nothing_and_finishes_its_jobs[sqlite]"),
    Guard("control-request-applies-once", None, "if False:", "test_only_the_newest_request_counts_and_once[sqlite]"),
    Guard("cancel-notifies-the-worker", None, "pass", "test_a_running_job_sees_a_cancel_before_the_next_heartbeat[postgresql]"),
    Guard("a-replacement-is-paused-too", None, "pass", "test_a_signal_pauses_a_worker_and_replacements_of_its_children[12-sqlite]"),
    Guard("newest-first-has-no-forecast", "max([since, *passed]) > since", "False", "test_why_forecasts_when_a_due_job_begins[sqlite]"),
    *by("test_a_broken_deploy_ends_no_worker_until_a_mended_one_works[sqlite]", ("a-restart-starts-another-first", "not self._supervision.restart(request.asked_at)", "True"), ("a-failed-restart-is-given-up", None, "pass"), ("the-old-one-leaves-last", "is Stage.OUTDATED", "is Stage.LEAVING")),
    Guard("failed-starts-end-no-other-process", "if others:", "if False:", "test_starts_that_fail_end_no_process_that_works"),
    Guard("pause-postgresql", "WHERE q.queue = wanted.queue AND q.paused_at IS NOT NULL)", "WHERE false)", "test_a_claim_skips_paused_queues[postgresql]"),
    Guard("the-poller-asks-for-maintenance", "self.is_watched() and", "False and", "test_a_polled_service_runs_when_a_poll_has_found_work"),
    Guard("poll-calls-services", None, "pass", "test_the_poller_starts_the_rescue_of_an_idle_worker[postgresql]"),
    Guard("queues-without-order-share-a-claim", None, "several = False", "test_a_claim_takes_as_many_of_each_queue[sqlite]"),
    Guard("pause-sqlite", None, "served = list(names)", "test_a_claim_skips_paused_queues[sqlite]"),
    # blinks, and migrations beneath a worker
    Guard("idle-connections-are-closed", None, "if False:", "test_a_resting_worker_keeps_one_connection_beside_that_for_claims[postgresql]"),
    *by("test_a_connection_in_use_at_the_close_is_closed_when_it_comes_back[sqlite]", ("late-connection-is-closed", None, "pass"), ("disposed-pool-has-no-resting-connection", "self._engine.pool is pool", "True")),
    Guard("a-lost-host-is-tried-last", None, "pass", "test_a_host_is_tried_last_when_its_connection_has_broken[query-postgresql]"),
    Guard("the-host-that-answers-is-first", None, "pass", "test_a_host_is_tried_first_when_it_has_answered_last[postgresql]"),
    Guard("missing-port-is-left-to-libpq", '"port" in parameters', "True", "test_the_port_of_hosts_is_for_libpq_to_find_when_the_url_has_none[postgresql]"),
    Guard("collected-database-closes-its-pool", "dispose, engine", "int", "test_connections_are_closed_when_their_database_is_collected[sqlite]"),
    Guard("hosts-back-off-at-random", None, "if random.random() >= 0:", "test_a_few_of_many_hosts_claim_at_once_and_others_within_the_interval[24]"),
    Guard("silent-poller-is-noticed", None, "return True", "test_the_own_poller_and_the_worker_itself_follow_a_silent_supervisor"),
    Guard("wake-during-a-wait-is-kept", "if called:", "if True:", "test_a_call_as_a_wait_ends_counts_for_the_next[sqlite]"),
    *by("test_a_row_that_was_reserved_by_hand_is_rescued[reserved_at-postgresql]", ("look-reports-what-a-rescue-takes", "coalesce(lease_expires_at, reserved_at)", "lease_expires_at"), ("no-lease-counts-as-expired", "func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at)", "jobs.c.lease_expires_at")),
    Guard("rescue-waits-after-an-absence", None, "pass", "test_a_worker_that_was_away_lets_others_renew_before_it_rescues[sqlite]"),
    Guard("lone-worker-polls-at-once", "not self._supervision.is_alone and ", "", "test_a_supervisors_only_worker_looks_at_once"),
    Guard("host-has-one-poller", "if self._options.processes > 1:", "if True:", "test_a_single_worker_polls_for_itself"),
    Guard("wake-goes-to-a-late-worker-last", "child.is_late(), ", "", "test_another_worker_is_woken_when_the_last_is_late"),
    Guard("another-database-is-not-watched", " and self._heartbeat.knows(child.worker)", "", "test_a_worker_in_another_database_is_not_watched"),
    Guard("stop-ends-the-wait-for-the-file", "is_over()", "False", "test_a_stopped_worker_does_not_wait_for_other_writers_of_the_file[sqlite]"),
    Guard("progress-keeps-up", "range(len(self._noted))", "range(min(1, len(self._noted)))", "test_progress_keeps_up_when_many_jobs_report"),
    Guard("maintenance-is-taken-over", " and self._others_do()", "", "test_a_worker_of_a_silent_supervisor_rescues_jobs[postgresql]"),
    Guard("one-stuck-worker-is-passed-over", "returning=(workers.c.id,)", "returning=(workers.c.id,), waits=True", "test_a_locked_worker_row_stops_no_renewals_of_others[postgresql]"),
    Guard("poll-keeps-later-notifications", "if self.send_at > began:", "if True:", "test_a_notification_counts_until_a_later_look_or_a_worker_is_sent"),
    Guard("no-worker-is-sent-too-early", "answered + min", "moment + min", "test_the_poller_wakes_a_worker_in_time[postgresql]"),
    Guard("notifications-are-read-after-a-poll", "0.0 if looks else ", "", "test_a_notification_within_a_poll_is_read_at_once[postgresql]"),
    Guard("poller-polls", None, "if False:", "test_workers_survive_a_dead_listening_connection[postgresql]"),
    Guard("useless-connection-is-replaced", None, '_USELESS = ("08", "57P", "0A000")', "test_a_useless_connection_is_invalidated[raises_the_drivers-25006-postgresql]"),
    Guard("the-hosts-default-schema", None, "pass", "test_include_name_knows_that_sqlite_has_one_schema[sqlite]"),
    Guard("schema-usable", None, "return self.revision == HEAD or HEAD < self.revision", "test_a_worker_left_behind_stops_in_good_order[sqlite-too new]"),
    Guard("schema-usable", None, "return self.revision == HEAD", "test_a_newer_revision_is_logged_once[sqlite]"),
    Guard("migration-lock-timeout-is-reported", None, "if True:", "test_a_lock_timeout_is_one_sentence_and_changes_nothing"),
    Guard("broken-index-is-dropped", None, "if False:", "test_an_index_of_an_aborted_build_is_built_again"),
    # the connections of sqlq's own
    *by("test_sqlqs_own_transactions_are_read_committed_whatever_the_default[url-postgresql]", ("read-committed", '{"isolation_level": "READ COMMITTED"}', "{}"), ("single-statements-are-read-committed", None, "return True")),
    Guard("useless-connection-is-replaced", None, '_USELESS = ("08", "57P", _READ_ONLY)', "test_a_claim_recovers_after_a_change_of_a_column_type[postgresql]"),
    Guard("read-url-goes-with-the-database", "or same else", "or True else", "test_a_replica_of_another_database_is_skipped[postgresql]"),
    Guard("a-replica-decides-nothing", "reading.own", "reading.app", "test_the_dashboard_reads_the_replica_and_acts_on_the_database"),
    Guard("servers-that-break-promises-are-refused", "why :=", "False and", "test_a_multi_master_extension_is_refused[spock-postgresql]"),
    Guard("waiters-leave-a-demoted-primary", None, "pass", "test_a_waiter_leaves_a_primary_that_was_demoted"),
    Guard("isolated-primary-is-refused", "PERFORM pg_catalog.pg_logical_emit_message(true, 'sqlq', '');", "", "test_a_waiter_does_not_trust_an_old_primary_that_wakes"),
    Guard("a-demoted-primary-is-left", None, "pass", "test_a_worker_leaves_a_primary_that_was_demoted"),
    Guard("empty-look-needs-a-primary", None, "pass", "test_an_empty_look_at_a_server_that_takes_no_writes_is_refused[postgresql]"),
    Guard("empty-look-needs-a-primary-mariadb", None, "pass", "test_workers_wait_while_no_write_is_taken[mariadb]"),
    Guard("standby-is-not-believed", None, "", "test_final_states_are_not_read_from_a_standby"),
    Guard("resting-connection-is-checked", "if may_stay and", "if", "test_consecutive_statements_take_one_connection_from_the_pool[sqlite]"),
    Guard("resting-connection-is-checked", " and self._driver.is_sound(self._engine, pooled.dbapi_connection, pings=False)", "", "test_a_connection_cut_off_between_two_statements_is_replaced[postgresql]"),
    *by("test_a_connection_that_rested_long_is_pinged[postgresql]", ("returned-connection-keeps-its-idle-time", None, "pass"), ("idle-time-starts-at-the-first-return", None, "record.info[RESTS_SINCE] = time.monotonic()")),
    Guard("failed-rollback-drops-the-connection", None, "except ZeroDivisionError:", "test_a_connection_that_cannot_be_rolled_back_is_dropped[postgresql]"),
    Guard("pool-of-one-has-no-resting-connection", None, "self._may_rest = isinstance(engine.pool, QueuePool) ", "test_a_thread_does_not_keep_the_only_connection_of_a_pool[sqlite]"),
    Guard("useless-connection-drops-resting-ones", None, "pass", "test_a_useless_connection_is_dropped_with_the_idle_ones[postgresql]"),
    Guard("interrupted-transaction-is-rolled-back", "pooled.rollback()", "pass", "test_an_interrupted_claim_keeps_no_lock[sqlite]"),
    Guard("wait-survives-a-disk-error", "sqlite3.Error", "KeyError", "test_a_disk_error_does_not_end_a_worker[idle-sqlite]"),
    Guard("full-disk-is-an-outage", "*_NO_WRITES, ", "", "test_outcomes_wait_while_the_disk_is_full[sqlite]"),
    Guard("standby-is-an-outage", None, "if False:", "test_an_outage_ends_by_a_write_and_is_no_second_one_for_a_stale_connection[postgresql]"),
    Guard("what-is-settled-is-let-go", "finally:", "except KeyError:\n            raise\n        else:", "test_a_settled_job_is_let_go_when_a_report_raises[sqlite]"),
    Guard("a-log-handler-may-raise", "except Exception as error:", "except KeyError as error:", "test_a_worker_goes_on_when_a_log_handler_raises[sqlite]"),
    # the program around
    Guard("unwritten-failures-keep-no-locals", None, "pass", "test_locals_of_older_failures_are_dropped_while_none_is_written[postgresql]"),
    Guard("fork-server-is-waited-for-once", None, "pass", "test_a_fork_server_forks_processes_like_those_that_start_anew[standstill]"),
    Guard("an-ended-attempt-keeps-no-frames", None, "pass", "test_a_forgotten_attempt_keeps_no_locals_of_its_handler"),
    Guard("pipes-have-no-timeout", None, "pass", "test_workers_bear_what_programs_do[sockets and signals-sqlite]"),
    *by("test_a_handlers_fork_is_a_usual_process[sqlite]", ("forked-children-take-signals", "if signal.getsignal(number) is handler:", "if False:"), ("a-forked-child-runs-no-jobs", "if os.getpid() != pid:", "if False:")),
    Guard("a-subprocess-without-a-pipe-ends", None, "pass", "test_an_isolated_handler_that_closes_all_descriptors_is_lost_alone[sqlite]"),
    Guard("prints-fail-no-job", "except OSError as error:", "except KeyError as error:", "test_a_broken_output_fails_no_job[a full disk-sqlite]"),
    Guard("files-keep-their-directory", "below(Path.cwd(), where)", "where", "test_a_relative_file_is_found_when_a_handler_has_changed_the_directory[sqlite:///shop.db-sqlite]"),
    Guard("replaced-file-is-reopened", "self.close()", "pass", "test_a_database_file_made_anew_is_worked_on_by_all[replaced-sqlite]"),
    Guard("outcomes-stay-with-their-file", None, "pass", "test_a_write_to_another_file_is_refused_before_it_begins[sqlite]"),
    Guard("exits-have-an-end", None, "last = threading.Timer(1e6, leave, (code,))", "test_a_process_ends_when_its_exit_functions_do_not"),
    Guard("outage-is-logged-once", "if self._outage_number != self._shared.number:", "if False:", "test_an_outage_ends_by_a_write_and_is_no_second_one_for_a_stale_connection[postgresql]"),
    Guard("job-without-its-hint", None, "if True:", "test_a_job_is_enqueued_when_its_notification_cannot_be_sent"),
    Guard("hint-connects-early", None, "pass", "test_the_notifier_connects_before_the_session_commits[postgresql]"),
    Guard("hint-alone-is-asynchronous", "set_config('synchronous_commit', 'off', true)", "set_config('synchronous_commit', 'off', false)", "test_only_notifications_commit_without_waiting_for_the_disk[postgresql]"),
    Guard("hint-goes-along", None, "if False:", "test_the_insert_of_a_lone_job_sends_its_notification[postgresql]"),
    # enqueueing
    Guard("unique-arbiter", ", text(HOLDS_KEY))", ")", "test_a_duplicate_answers_with_the_live_job[postgresql]"),
    Guard("loose-savepoint-is-refused", None, "if False:", "test_a_savepoint_that_may_be_the_outermost_is_refused"),
    Guard("own-schema-first", "self.requested_schema or known", "self.requested_schema", "tests/conformance/test_enqueue.py::test_the_search_path_of_the_caller_does_not_redirect_jobs[postgresql]"),
    Guard("keys-are-let-go-of", None, "savepoint.commit()", "test_a_batch_that_is_retried_releases_its_keys[postgresql]"),
    Guard("enqueue-refuses-autocommit", None, "if False:", "test_autocommit_is_refused"),
    Guard("aiosqlite-autocommit-is-checked", None, "inner = None", "test_autocommit_is_refused[behind_aiosqlite]"),
    Guard("driver-begins-as-for-its-own", None, "pass", "test_a_handlers_writes_and_its_completion_commit_together[sqlite3]"),
    Guard("sqlalchemy-begins-as-for-its-own", None, "pass", "test_a_rollback_on_unconfigured_sqlite_keeps_nothing[sqlite-complete]"),
    Guard("psycopg2-block-begins-a-transaction", None, "pass", "test_blocks_of_psycopg2_and_sqlite3[postgresql]"),
    Guard("no-completing-in-autocommit", None, "if False:", "test_complete_refuses_a_connection_without_a_transaction"),
    Guard("zope-session-is-marked-changed", None, "pass", "test_a_job_is_committed_by_zopes_transaction[sqlite-enqueue]"),
    Guard("zope-read-only", None, "if False:", "test_zope_takes_no_read_only_session_but_a_reading_handler[sqlite]"),
    Guard("errors-are-sqlalchemys", None, "pass", "test_a_transaction_that_the_database_rolled_back_runs_again[raises_the_drivers-40001-postgresql]"),
    Guard("snapshot-refusal-is-said", None, "why = None", "test_a_transaction_that_read_before_a_rival_wrote_is_refused[sqlite]"),
    Guard("sqlite-begins-immediate", None, "begin_explicitly(engine, immediate=False)", "test_a_transaction_of_sqlqs_own_has_the_write_lock_from_its_beginning[sqlite]"),
    Guard("files-are-closed-before-a-fork", None, "pass", "test_a_fork_loses_nothing_while_a_file_is_open[sqlite-closes_first]"),
    *by("test_a_fork_loses_nothing_while_a_file_is_open[sqlite-reads_meanwhile]", ("fork-waits-for-transactions", None, "pass"), ("users-let-a-fork-through", "while self._forks", "while False")),
    Guard("inherited-file-is-not-used", None, "if False:", "test_a_fork_loses_nothing_while_a_file_is_open[sqlite-keeps_open]"),
    *by("test_a_forking_server_shares_no_connection[postgresql]", ("forked-child-leaves-the-pool", None, "pass"), ("forked-child-leaves-resting-connections", None, "pass")),
    # hostile data
    Guard("bad-payload-fails", None, "if False:", "test_an_unreadable_payload_fails_at_once_and_blocks_nobody[sqlite]"),
    Guard("misfits-are-put-back", None, "raise", "test_a_job_that_a_worker_cannot_run_is_released_and_fails_after_a_day[sqlite-arguments]"),
    *by("test_a_job_of_another_release_is_released_until_a_worker_takes_it", ("other-fields-are-put-back", "MismatchError if elsewhere else ArgumentsError", "ArgumentsError"), ("no-field-is-dropped", None, "if False:")),
    Guard("typed-arrives-equal", None, "if False:", "test_a_value_that_does_not_fit_is_refused_by_its_path"),
    Guard("orm-classes-are-not-converted", None, "if False:", "test_an_unsupported_annotation_takes_json_and_explains_refusals"),
    Guard("unknown-task-is-put-back", None, 'return Failed("unknown_task", describe(error))', "test_a_job_that_a_worker_cannot_run_is_released_and_fails_after_a_day[sqlite-unknown_task]"),
    Guard("texts-are-scrubbed", None, '_UNSTORABLE = re.compile("[\\ud800-\\udfff]")', "test_an_error_text_of_50_megabytes_is_cut_and_scrubbed[postgresql]"),
    Guard("moments-can-be-read-back", "failed_jobs_moments_in_range CHECK (", "failed_jobs_moments_in_range CHECK (1 OR ", "test_ended_jobs_have_no_times_that_python_cannot_read[sqlite-failed]"),
    Guard("invalid-toml-is-reported", "(ValueError, AttributeError, RecursionError)", "tomllib.TOMLDecodeError", "test_a_wrong_table_in_pyproject_is_refused"),
    # the test kit: nothing outside the test is touched
    Guard("test-database-is-not-left", None, "self._choose_address(); self._connected = self._connect(address)", "test_the_app_stays_on_the_tests_database[postgresql-engine]"),
    Guard("own-database-is-shut", 'partial(getattr, self, "_test_addresses")', "lambda: False", "test_a_worker_refuses_to_run[sqlite]"),
    Guard("a-test-database-is-named", None, "if False:", "test_a_block_that_cannot_begin_keeps_the_apps_database[postgresql]"),
    Guard("test-jobs-stay-in-the-test", None, "pass", "test_a_session_on_another_database_is_refused[sqlite]"),
    Guard("only-a-tests-jobs-are-drained", None, "if False:", "test_the_jobs_of_an_app_that_no_test_has_placed_are_not_run[sqlite]"),
    Guard("only-what-was-empty-is-emptied", None, "if False:", "test_the_fixture_refuses_a_file_with_rows_of_sqlq[sqlite]"),
    Guard("only-a-tests-own-tables-are-dropped", None, "if False:", "test_tables_that_may_be_no_tests_are_not_dropped"),
    Guard("test-schema-alone", "-csearch_path={schema}", "-csearch_path={schema},public", "test_an_applications_own_tables_are_in_the_tests_schema[postgresql]"),
    Guard("memory-is-never-opened", None, "if False:", "test_a_database_in_memory_is_refused_when_a_connection_is_needed"),
    # the test kit: what runs inline is what a worker would have run
    Guard("a-failed-commit-is-a-rollback", None, "pass", "test_a_commit_that_fails_runs_nothing[connection-postgresql]"),
    Guard("savepoints-take-their-jobs-along", None, "pass", "test_a_rolled_back_savepoint_removes_its_jobs[pysqlite-Session]"),
    Guard("a-commit-raises-nothing", "Exception", "ZeroDivisionError", "test_a_job_that_fails_reaches_the_test_when_the_block_ends[psycopg-Connection]"),
    Guard("log-tracebacks-are-bounded", "ERROR_BYTES", "10**8", "test_formatters_cut_tracebacks_and_messages[sqlite]"),
    Guard("dropped-lines-are-counted", None, "pass", "test_the_first_line_after_dropped_ones_has_their_number"),
    Guard("jobs-wait-once-for-a-reader", "0 if self._is_stuck else WAIT_SECONDS", "WAIT_SECONDS", "test_a_sleeping_reader_is_waited_for_once[pipe]"),
    Guard("others-see-records", "others or not is_plain", "False", "test_a_changed_logging_setup_gets_records[a handler of sqlq]"),
    Guard("closed-descriptors-are-replaced", None, "pass", "test_closed_descriptors_stop_no_job[all-sqlite]"),
    *by("test_a_handler_has_a_context_of_its_own[sqlite-async def]", ("a-context-for-each-coroutine", "context.copy()", "context"), ("a-context-of-no-caller", None, "context = contextvars.copy_context()")),
    Guard("json-takes-any", "_with_a_form(value)", "value", "test_no_field_of_a_record_breaks_its_line[sqlite]"),
    Guard("log-lines-name-their-job", None, "pass", "test_a_handlers_own_lines_appear_with_logger_and_job[sqlite]"),
    Guard("loggers-are-enabled", None, "pass", "test_logging_configured_by_the_app_module_formats_all_lines[dictConfig-sqlite]"),
    Guard("lost-jobs-are-counted", None, "pass", "test_a_job_that_fails_with_its_process_is_counted[sqlite]"),
    Guard("arguments-are-checked", None, "pass", "test_each_argument_of_each_method_is_checked_before_any_sql[sqlite-flows]"),
    Guard("no-separator-in-a-queue", '"," in name or "=" in name', "False", "test_a_queue_has_no_separator_in_its_name"),
    # in a Django project
    Guard("jobs-join-djangos-transaction", None, "return None", "test_inside[postgresql-test_enqueue]"),
    Guard("follows-into-the-test-database", None, "pass", "test_inside[sqlite-test_enqueue]"),
    Guard("idle-connections-are-looked-at", "True", "False", "test_no_attempt_meets_a_connection_that_was_lost[pay-postgresql]"),
    Guard("jobs-are-flushed-in-tests-alone", "is_testing() and ", "", "test_a_flush_leaves_jobs_alone[sqlite]"),
    # middleware and lifespans
    Guard("middleware-nests-in-order", "(*common, *self._middleware)", "(*self._middleware, *common)", "test_middleware_runs_around_each_attempt_in_order[sqlite-def]"),
    Guard("a-context-for-each-attempt", None, "return _call_surrounded(running, call, run)", "test_context_set_by_middleware_reaches_its_handler_alone[sqlite-def]"),
    Guard("swallowed-stop-is-released", None, "pass", "test_a_stopped_job_is_released_when_middleware_swallows_its_exception[sqlite]"),
    Guard("a-lifespan-does-not-outlive-the-grace", "may_wait", "lambda: True", "test_a_hanging_lifespan_ends_with_the_grace_time[sqlite-hanging_when_left]"),
    Guard("isolates-leave-their-lifespan", None, "pass", "test_each_subprocess_has_its_own_lifespan[def-sqlite]"),
    # events
    Guard("events-are-bounded", None, "if True:", "test_events_beyond_the_maximum_are_dropped_and_counted"),
    Guard("events-are-free", None, "if False:", "test_no_event_is_made_without_listener_and_log_line[sqlite]"),
    Guard("lost-jobs-publish-events", None, "pass", "test_events_of_isolated_jobs_and_of_dead_workers_are_published[sqlite]"),
    Guard("events-are-flushed", "not self._app.events.flush(0.1)", "False", "test_a_slow_listener_delays_no_job[sqlite]"),
    Guard("rollback-drops-events", None, "pass", "test_enqueued_is_published_after_the_commit[sqlite]"),
    Guard("a-commit-has-its-own-callbacks", "_open.get(conn, [])", "_open.get(conn) or vars(_sent).get('waiting', [])", "test_a_commit_publishes_its_own_events_after_one_that_a_listener_refused[postgresql]"),
    Guard("a-connection-that-is-dropped-is-rolled-back", None, "pass", "test_a_dropped_sessions_handle_is_void[sqlite]"),
    Guard("a-handle-knows-of-its-rollback", "origin.is_rolled_back or is_another", "is_another", "test_a_handle_of_a_rollback_names_no_other_job[pysqlite-Session]"),
    Guard("a-handle-knows-of-its-rollback", "origin.is_rolled_back or is_another", "origin.is_rolled_back", "test_a_handle_of_a_rollback_names_no_other_job[sqlite3]"),
    Guard("use-says-something", None, "if False:", "test_use_with_nothing_is_refused_and_a_wrong_use_changes_nothing"),
    Guard("what-is-not-said-stays", "self._arguments | changes", "{'engine': None} | changes", "test_use_keeps_settings_that_are_not_given"),
    Guard("where-to-listen-goes-with-the-database", None, "pass", "test_the_url_to_listen_at_goes_with_its_database"),
    Guard("a-missing-variable-is-no-default", None, "if False:", "test_a_url_of_none_is_refused_in_the_place_of_a_default"),
    Guard("eager-is-no-text", None, "if True:", "test_eager_takes_no_text"),
    *by("test_a_flow_is_enqueued_once_and_takes_no_steps_after_that", ("a-flow-is-enqueued-once", None, "if False:"), ("an-enqueued-flow-takes-no-steps", None, "if False:")),
    Guard("when-is-of-steps", None, "if False:", "test_an_impossible_flow_is_refused_in_a_sentence"),
    Guard("a-follow-up-fits", "hint is not JobOutcome", "False", "test_a_task_with_another_annotation_cannot_be_a_callback"),
    Guard("none-makes-no-key", None, "if False:", "test_none_makes_no_key"),
    Guard("savepoint-rollback-drops-events", None, "pass", "test_a_rolled_back_savepoint_drops_its_events[sqlite-before]"),
    Guard("async-middleware-needs-async-def", None, "if False:", "test_asynchronous_middleware_is_refused_beside_a_def_task[task]"),
    Guard("generators-are-no-results", None, "pass", "test_a_generator_is_no_result[sqlite-aenqueue]"),
    # schedules
    Guard("schedule-times-ascend", None, "if True:", "test_a_daily_schedule_is_neither_skipped_nor_doubled"),
    Guard("times-are-in-utc", "return at", "return value", "test_a_spread_counts_instants_in_the_hour_that_comes_twice"),
    Guard("read-times-are-in-utc", ".astimezone(UTC)", "", "test_times_of_jobs_are_in_utc_in_any_session_time_zone[postgresql]"),
    Guard("a-schedule-takes-no-results", None, "if False:", "test_a_schedules_job_takes_no_result_of_a_step[sqlite]"),
    Guard("moments-are-whole", None, "self._become(name, whole)", "test_runs_lie_from_starts_on_and_before_ends"),
    *by("test_overlap_skips_or_delays_a_run_while_the_last_job_lives[sqlite]", ("queue-waits", None, "pass"), ("overlap-is-skipped", None, "pass")),
    Guard("schedule-respects-repeats", None, "pass", "test_catch_up_and_overlap_decide_about_missed_runs"),
    Guard("ticks-are-due", None, ".where(_table.next_at.is_not(None))", "test_a_tick_reads_only_what_is_due[postgresql]"),
    *by("test_one_of_two_concurrent_ticks_enqueues_and_neither_waits[postgresql]", ("tick-locks-its-schedules", "lately(conn, DUE)", "lately(conn, DUE), waits=True"), ("tick-locks-its-schedules", None, "")),
    Guard("tick-commits-with-its-jobs", None, "pass", "test_each_run_gets_one_job_with_its_time[sqlite]"),
    Guard("ticks-wake-workers", None, "pass", "test_a_tick_wakes_idle_workers[postgresql]"),
    Guard("one-schedule-fails-alone", None, "except ZeroDivisionError as error:", "test_a_failing_schedule_stops_no_other_and_recovers[sqlite]"),
    Guard("older-deploy-changes-no-schedule", None, "pass", "test_declared_schedules_follow_the_deploy[sqlite]"),
    Guard("deploy-retires-its-own-schedules", " and row.service == service", "", "test_services_on_one_database_retire_only_their_own_schedules[sqlite-services0]"),
    Guard("deploy-retires-its-own-schedules", " and is_known", "", "test_services_on_one_database_retire_only_their_own_schedules[sqlite-services3]"),
    Guard("drain-runs-no-schedules", "[] if self._options.drain else [follow]", "[follow]", "test_a_draining_worker_neither_ticks_nor_declares[sqlite]"),
    *by("test_ticks_send_no_query_while_the_poller_runs[postgresql]", ("poller-replaces-schedule-queries", None, "if False:"), ("next-tick-is-looked-up", "self._wait()", "self._max_wait")),
    Guard("its-own-worker-is-called", None, "pass", "test_ticks_send_no_query_while_the_poller_runs[sqlite]"),
    Guard("poller-reports-the-next-tick", None, "pass", "test_the_poller_reports_when_a_schedule_is_due[postgresql]"),
    # what waits: schedules, flows, limits, and what else may become of a job meanwhile
    Guard("only-what-is-served-is-admitted", "jobs.c.queue.in_(", "jobs.c.queue.not_in(", "test_jobs_of_an_unserved_queue_stay_blocked[sqlite-serial]"),
    Guard("unserved-hold-no-slots", "serving(conn)", "{'serves_all': 1, 'served': []}", "test_a_queue_without_workers_releases_its_slots[sqlite]"),
    Guard("limit-rule-is-stored-at-enqueue", "Wake(job.limit_key, job.rule or NO_RULE)", "Wake(job.limit_key, job.rule or NO_RULE, job.delay_ms, job.available_at)", "test_the_limit_of_a_delayed_job_does_not_replace_a_newer_one[sqlite]"),
    Guard("a-schedule-knows-its-limit", None, "pass", "test_the_job_of_a_schedule_has_its_named_limit[postgresql]"),
    *by("test_a_rate_leaves_one_wake_and_counts_from_the_last_start_when_it_changes[sqlite]", ("the-next-start-is-by-the-new-rate", "min(moved, now + AHEAD + distance)", "free_at"), ("one-wake-for-the-next-start", "bool(self.ids) or self.changed", "True")),
    Guard("the-next-start-is-by-the-new-rate", "min(moved, ", "min(free_at, ", "test_a_rate_leaves_one_wake_and_counts_from_the_last_start_when_it_changes[postgresql]"),
    Guard("skip-wakes-the-serial-key", None, "pass", "test_a_job_that_ends_without_a_settle_releases_its_slot[postgresql-skipped]"),
    Guard("rates-count-no-slots", "if grant.rule.max_running is not None", "", "test_admissions_and_sweeps_read_no_more_beside_long_waiting_lists[postgresql]"),
    # the border: messages, queries and rows of strangers
    Guard("own-sessions-have-own-settings", "_at_once(driver, in_catalog(statement))", "leads_to_one_server(driver)", "test_jobs_run_and_are_shown_whatever_is_set[postgresql-database-datestyle-SQL-DMY-]"),
    Guard("own-sessions-speak-utf8mb4", None, "pass", "test_jobs_run_and_are_shown_whatever_is_set[mariadb-url-charset-latin1]"),
    Guard("what-an-encoding-lacks-is-escaped", "_escaped(result)", "result", "test_jobs_run_and_are_shown_whatever_is_set[postgresql-encoding-LATIN1]"),
    *by("test_json_nested_too_deep_is_neither_read_nor_shown", ("depth-is-bounded", "is_deep(text, value)", "False"), ("depth-is-bounded-in-workers", "is_deep(payload, arguments)", "False")),
    Guard("errors-hold-no-value", r"(.*) - at `(key` in `)?\$([^`]*)", r"(.*?) - at `(key` in `)?\$(.*)", "test_a_value_that_looks_like_a_path_is_not_in_the_error"),
    Guard("idle-transactions-end", "str(IDLE_TRANSACTION_MS)", '"0"', "test_a_host_that_is_lost_in_mid_transaction_frees_its_jobs[frozen-postgresql]"),
    Guard("idle-transactions-end-mariadb", "{IDLE_TRANSACTION_MS // 1000}", "0", "test_a_host_that_is_lost_in_mid_transaction_frees_its_jobs[frozen-mariadb]"),
    Guard("idle-transactions-end-behind-a-pooler", None, "pass", "test_settings_of_own_sessions_stay_with_them_behind_a_pooler[postgresql]"),
    Guard("notifications-are-read-strictly", "not notification.extra", "True", "test_only_an_empty_text_is_a_notification_of_jobs"),
    Guard("ignored-are-logged-rarely", None, "if True:", "test_notifications_of_a_stranger_are_ignored[postgresql]"),
    Guard("notifications-are-read-before-a-poll", "and (not listens or self._hearing.is_dry)", "", "test_the_poller_reads_all_notifications_before_the_next_poll[postgresql]"),
    Guard("old-wakes-hold-up-no-new-ones", None, "if False:", "test_old_wakes_hold_up_no_limit[postgresql]"),
    Guard("statements-end-with-their-client", '_CHECKS_CLIENT if driver.info.server_version >= 140000 else "NULL"', '"NULL"', "test_a_statement_ends_when_its_client_gives_up[postgresql]"),
    Guard("partial-indexes-need-literals", """literal_column(f"'{reason}'")""", "reason", "test_a_generic_plan_finds_the_indexes[postgresql]"),
    *by("test_many_rows_of_unknown_tasks_are_few_lines_of_the_log[postgresql]", ("a-task-is-put-back-in-one-line", None, "if True:"), ("what-is-put-back-has-one-line", " and not (isinstance(outcome, Released) and outcome.unknown_task)", "")),
    Guard("looks-reach-every-queue", "window[len(window)] if len(window) == LARGEST_WINDOW else ", "", "test_looks_read_all_queues_in_turn_when_there_are_more_than_a_window[sqlite]"),
    Guard("known-queues-are-bounded", "[:LARGEST_WINDOW]", "", "test_known_queues_keep_those_with_the_latest_claims"),
    Guard("stopped-child-is-called-once", "droppable=True, ", "", "test_notifications_do_not_pile_up_for_a_stopped_child"),
    Guard("supervisor-survives-a-bad-message", "Exception", "KeyboardInterrupt", "test_no_message_ends_a_supervisor"),
    Guard("unreadable-isolate-is-refused", "strictly:", "False:", "test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost[no JSON\\n]"),
    Guard("an-isolate-says-outcomes", "not isinstance(outcome, Outcome)", "False", "test_messages_of_a_subprocess_are_an_outcome_or_its_end"),
    Guard("few-scrape-at-a-time", "CONNECTIONS", "500", "test_the_endpoint_bounds_connections_of_strangers[sqlite]"),
    Guard("lines-steer-no-terminal", "escaped(", "str(", "test_the_line_of_a_finished_job_steers_no_terminal[Lines]"),
    Guard("tracebacks-steer-no-terminal", "escaped_lines(", "str(", "test_a_worker_prints_no_control_characters[sqlite-text]"),
    Guard("looks-steer-no-terminal", "escaped(label), escaped(text)", "label, text", "test_wrapped_text_steers_no_terminal"),
    Guard("labels-steer-no-terminal", "escaped(label)", "label", "test_reading_commands_print_no_control_characters[sqlite]"),
    Guard("new-tasks-are-named", "tasks != self._named", "len(tasks) != len(self._named)", "test_a_task_that_takes_the_place_of_another_is_named"),
    Guard("looks-take-a-small-share", "max(seconds, min(took * SHARE, MAX_KEPT_SECONDS))", "seconds", "test_a_slow_query_is_cached_longer[sqlite]"),
    Guard("large-numbers-are-estimates", "of <= ROWS and estimates[key] < 1.2 * EXACT", "True", "test_a_number_beyond_the_bound_is_an_estimate[sqlite]"),
    Guard("statements-of-others-are-hidden", "query=None", "", "test_statements_of_other_sessions_are_shown_to_operators_alone[postgresql]"),
    Guard("each-database-has-its-own-outages", "setdefault(key,", "setdefault(None,", "test_outages_are_per_database[sqlite]"),
    Guard("only-staff-sees-jobs", None, "if False:", "test_the_dashboard_works_inside_a_project[sqlite-plain]"),
    Guard("no-transaction-around-forms", "transaction.non_atomic_requests", "csrf_exempt", "test_the_dashboard_works_inside_a_project[sqlite-atomic]"),
    *by("test_the_admin_works_inside_a_project[sqlite-plain]", ("the-orm-changes-nothing", None, "pass"), ("actions-by-djangos-permissions", None, "if True:")),
    Guard("a-project-has-one-app", "_apps or [app]", "[app]", "test_a_worker_by_the_name_of_the_app_knows_the_tasks[sqlite]"),
    Guard("no-transaction-around-actions", "transaction.non_atomic_requests", "admin.display", "test_the_admin_works_inside_a_project[sqlite-atomic]"),
    # the dashboard: strangers' requests, and hostile rows
    Guard("host-name-is-checked", None, "if False:", "test_another_host_name_is_refused[sqlite]"),
    Guard("form-origin-is-checked", None, "if False:", "test_a_form_is_refused_when_another_site_sends_it[sqlite-headers4]"),
    Guard("forms-have-their-token", None, "if False:", "test_a_form_is_refused_when_its_token_is_wrong[sqlite-guessed]"),
    Guard("each-verb-has-its-role", None, "if False:", "test_a_visitor_can_do_what_the_table_allows[sqlite-viewer]"),
    Guard("redirect-stays-on-the-site", None, "return path", "test_a_form_does_not_redirect_to_another_site[sqlite-https://evil.example/]"),
    Guard("a-link-works-once", None, "pass", "test_a_login_url_works_once[sqlite]"),
    Guard("guesses-are-slow", None, "if False:", "test_frequent_guesses_of_passwords_are_refused[sqlite]"),
    Guard("strangers-need-a-login", "users is None", "False", "test_another_address_is_refused_when_nobody_can_log_in[sqlite-example.org]"),
    Guard("no-search-tells-what-is-hidden", None, "if False:", "test_a_visitor_can_do_what_the_table_allows[sqlite-viewer]"),
    Guard("no-search-tells-what-is-redacted", None, "return True", "test_no_search_finds_a_job_by_what_is_hidden_of_it[sqlite-compactly]"),
    Guard("only-a-user-enters", None, "if True:", "test_every_request_is_refused_when_authorize_returns_no_user[sqlite-impostor]"),
    Guard("no-process-shows-its-url", None, "pass", "test_titles_of_processes_show_their_roles_and_never_the_url[False-postgresql]"),
    Guard("actors-are-those-of-the-system", None, 'user = __import__("getpass").getuser()', "test_commands_are_recorded_as_their_users[postgresql]"),
    Guard("no-health-file-behind-a-symlink", "os.O_NOFOLLOW", "0", "test_a_health_file_is_refused_when_it_is_a_symlink_or_a_pipe"),
    Guard("what-is-too-slow-is-kept", "SQLAlchemyError", "ZeroDivisionError", "test_a_query_that_was_too_slow_is_not_repeated_by_each_viewer[sqlite]"),
    Guard("an-action-keeps-to-the-states-shown", None, "states = [*verb.states]", "test_an_action_on_a_filter_keeps_to_the_state_of_the_tab[sqlite]"),
    Guard("a-filter-is-counted-before-it-acts", 'form.get("matching") or ', "", "test_a_filter_is_counted_even_in_a_confirmed_form[sqlite]"),
    Guard("lists-read-no-large-field", "null().label(c.name) if c.name in left_out else c", "c", "test_lists_of_jobs_read_no_large_field[sqlite]"),
    Guard("kept-answers-are-bounded", "-KEPT_LIMIT", "0", "test_kept_answers_are_bounded[sqlite]"),
    Guard("joined-texts-steer-nothing", "escaped_lines(value)", "value", "test_a_text_that_is_joined_to_markup_steers_nothing"),
    *by("test_no_row_injects_markup_into_a_page[sqlite]", ("rows-are-hostile", "True", "False"), ("pages-bound-and-escape-texts", "escaped_lines(str(value))", "str(value)"), ("pages-bound-and-escape-texts", "shortened(escaped_lines(str(value)), TEXT_LIMIT)", "escaped_lines(str(value))")),
    # signed and encrypted payloads
    Guard("jobs-are-protected", None, "pass", "test_protected_jobs_run_and_so_are_their_results[sqlite-sign]"),
    Guard("bound-to-task-and-queue", "str(task), str(queue)", "'', str(queue)", "test_a_row_that_was_tampered_with_fails_alone[sqlite-sign-swapped between tasks]"),
    Guard("bound-to-task-and-queue", "str(task), str(queue)", "str(task), ''", "test_a_row_that_was_tampered_with_fails_alone[sqlite-encrypt-moved to another queue]"),
    Guard("bound-to-task-and-queue", "kind, str(task)", "'', str(task)", "test_a_signature_is_bound_to_task_queue_and_kind[encrypt]"),
    Guard("signatures-are-checked", None, "pass", "test_a_changed_text_is_refused[sign]"),
    Guard("plain-rows-are-refused", None, "if False:", "test_a_row_that_was_tampered_with_fails_alone[sqlite-sign-without its signature]"),
    Guard("no-encryption-without-a-key", None, "if False:", "test_the_environment_sets_keys_unless_the_app_does"),
    Guard("a-bad-signature-fails", None, "bad = Failed('error', describe(error))", "test_a_row_that_was_tampered_with_fails_alone[sqlite-sign-cut off]"),
    Guard("bad-signature-is-not-bad-payload", None, "if False:", "test_a_rewritten_signature_fails_at_once[sqlite-None]"),
    Guard("protected-without-a-key-fails", None, "if False:", "test_a_rewritten_signature_fails_at_once[sqlite-keys2]"),
    Guard("protected-without-a-key", None, "pass", "test_a_job_is_released_when_its_key_is_not_here[sqlite-None-encrypt]"),
    Guard("without-a-key-it-is-put-back", None, "return Failed('bad_signature', describe(error))", "test_a_job_is_released_when_its_key_is_not_here[sqlite-keys1-sign]"),
    Guard("a-result-without-its-key-is-put-back", None, "elif False:", "test_a_step_is_released_when_the_key_of_a_result_is_not_here[sqlite]"),
    Guard("nothing-follows-a-bad-signature", None, "case Failed('unsigned'):", "test_a_forged_row_gets_no_callback[sqlite-as refused]"),
    Guard("the-lost-are-trusted", None, "forged = set()", "test_a_forged_row_gets_no_callback[sqlite-lost]"),
    Guard("the-unstarted-are-trusted-by-signature", None, "return job", "test_a_forged_row_gets_no_callback[sqlite-released too often]"),
    Guard("plain-feeds-no-signed", None, "if False:", "test_a_plain_row_feeds_no_signed_step[sqlite-pay]"),
    Guard("unopened-step-result-raises", None, "if False:", "test_a_plain_row_feeds_no_signed_step[sqlite-look]"),
    Guard("results-are-protected", None, "pass", "test_protected_jobs_run_and_so_are_their_results[sqlite-encrypt]"),
    Guard("complete-encrypts", None, "stored = done", "test_a_task_of_a_queue_with_options_knows_its_app[sqlite]"),
    Guard("unopened-result-is-none", None, "if False:", "test_plain_rows_are_refused_taken_or_taken_by_queue[sqlite]"),
    Guard("results-of-steps-are-opened", None, "pass", "test_a_step_refuses_a_changed_result[sqlite-sign]"),
    Guard("growth-is-protected", None, "pass", "test_a_handler_sees_results_and_grows_its_flow[sqlite-sign]"),
    *by("test_callbacks_are_signed_whoever_writes_them[sqlite-sign]", ("follow-ups-are-protected", None, "return new"), ("what-follows-the-unstarted-is-protected", "encryption_of(conn)", "None")),
    Guard("supervisor-has-the-keys", None, "self._database.encryption = None", "test_the_callback_of_a_job_whose_worker_died_is_signed[sqlite]"),
    Guard("schedules-are-protected", None, "pass", "test_schedules_are_signed_when_they_are_stored[sqlite-sign]"),
    Guard("a-protected-schedule-stays", None, "if True:", "test_a_deploy_rewrites_a_signed_schedule_only_where_it_differs[sqlite-encrypt]"),
    Guard("djangos-keys-are-shown-nowhere", "repr=False", "repr=True", "test_in_memory[sqlite]"),
]
# fmt: on


class Marked(NamedTuple):
    """Where a mark stands: the file, and the lines that it speaks of, from one to before another."""

    file: Path
    start: int
    end: int


@cache
def marks() -> dict[str, list[Marked]]:
    """Return every mark in sqlq and its migrations."""
    found: dict[str, list[Marked]] = {}
    scripts = (ROOT / "migrations").rglob("*.sql")
    for file in sorted([*(ROOT / "sqlq").rglob("*.py"), *(ROOT / "migrations").rglob("*.py"), *scripts]):
        code = file.read_text()
        for number, line in enumerate(code.splitlines()):
            if mark := MARK.search(line):
                above = line.lstrip().startswith(("#", "--"))
                lines = _statement_after(code, number) if above else (number, number + 1)
                found.setdefault(mark[1], []).append(Marked(file.relative_to(ROOT), *lines))
    return found


def _statement_after(code: str, number: int) -> tuple[int, int]:
    """Return the lines of the statement that begins below a line; in SQL it ends at an empty one."""
    if code.splitlines()[number].startswith("--"):
        return number + 1, code.splitlines().index("", number)
    start, end = min(lines for lines in _statements(code) if lines[0] > number + 1)
    return start - 1, end


@cache
def _statements(code: str) -> list[tuple[int, int]]:
    """Return where each statement of a file begins and ends."""
    return [
        (min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), node.end_lineno or 0)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.stmt)
    ]


def mutant(guard: Guard, where: Marked) -> str:
    """Return the file's code without the guard. Raises `ValueError` where the list does not fit the code any more."""
    code = (ROOT / where.file).read_text()
    lines = code.splitlines(keepends=True)
    guarded = "".join(lines[where.start : where.end])
    indent = guarded[: len(guarded) - len(guarded.lstrip())]
    if guard.was is None:
        changed = f"{indent}{guard.instead}\n"
    else:
        words = re.compile(r"\s*".join(re.escape(word) for word in guard.was.split()))
        changed, times = words.subn(lambda _: guard.instead, guarded)
        if times != 1:
            raise ValueError(f"{guard.mark}: {guard.was!r} is found {times} times")
    mutated = "".join([*lines[: where.start], changed, *lines[where.end :]])
    try:
        if where.file.suffix == ".py":
            compile(mutated, str(where.file), "exec")
    except SyntaxError as error:
        raise ValueError(f"{guard.mark}: without it the code is none: {error}") from None
    if mutated == code:
        raise ValueError(f"{guard.mark}: nothing changes")
    return mutated


def try_without(
    guard: Guard, servers: Mapping[str, str], copies: SimpleQueue[Path], timeout: float = SECONDS
) -> tuple[str, float]:
    """Return what became of the mutant, "killed" if all is well, and how long that took. A copy of the tree
    is used for many, one after the other: to copy and compile it takes as long as most tests."""
    where = marks()[guard.mark][0]
    copy = copies.get()
    begin = time.monotonic()
    try:
        (copy / where.file).write_text(mutant(guard, where))
        done = run(copy, servers, [guard.test], timeout)
    except subprocess.TimeoutExpired:
        return HUNG, time.monotonic() - begin
    finally:
        shutil.copy2(ROOT / where.file, copy / where.file)
        kill_what_runs_on(copy)
        copies.put(copy)
    seconds = time.monotonic() - begin
    if done.returncode == PYTEST_FAILED:
        return "killed", seconds
    if -done.returncode in CRASHES:  # as an event loop may that was closed under its coroutines
        return f"killed (it crashed with {signal.Signals(-done.returncode).name})", seconds
    if done.returncode == 0:
        return "SURVIVED", seconds
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return f"NOT TRIED: pytest ended with {done.returncode}: {''.join(last)}", seconds


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sqlq-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        yield copy


def run(
    copy: Path, servers: Mapping[str, str], tests: Sequence[str], seconds: float, processes: str = "0"
) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, on the sqlq that is in it."""
    environment = {
        **os.environ,
        **servers,
        "PYTHONPATH": str(copy),  # before the installed sqlq
        "PYTHONDONTWRITEBYTECODE": "1",
        "SQLQ_TEST_DATABASES": "sqlite,postgresql" + ",mariadb" * any(map(OF_MARIADB.search, tests)),
        "SQLQ_TEST_LONGEST_WAIT": "25",
        "PGOPTIONS": "-c lock_timeout=10s",  # a guard against waiting is missed by waiting
    }
    options = ("-q", "-x", "-p", "no:cacheprovider", "-n", processes, "-m", "")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def kill_what_runs_on(copy: Path) -> None:
    """Kill the workers that a test has left behind, which hung and was killed.

    They have sessions of their own. They would compete with every later mutant, and run its code.
    """
    path = os.fsencode(copy)
    while found := [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/environ") if path in _read(p)]:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # noqa: TID251 - until they are out of /proc


def _read(file: Path) -> bytes:
    """Return what a process's file of /proc holds; nothing of one that is gone, or somebody else's."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def chosen(words: Sequence[str]) -> list[Guard]:
    """Return the guards that the command line means."""
    if list(words) == ["--hundredth"]:
        return _that_can_run(GUARDS[dt.datetime.now(dt.UTC).toordinal() % 100 :: 100])
    texts = {guard: " ".join([*map(str, guard), guard.test]) for guard in GUARDS}
    return [guard for guard, line in texts.items() if not words or any(word in line for word in words)]


def _that_can_run(guards: Sequence[Guard]) -> list[Guard]:
    """Return the guards, without those of MariaDB where its programs are missing, and print a line then."""
    try:
        found("mariadbd")
    except RuntimeError as error:
        kept = [guard for guard in guards if not OF_MARIADB.search(guard.test)]
        print(f"!!! {len(guards) - len(kept)} GUARDS OF MARIADB ARE NOT TRIED: {error}", flush=True)
        return kept
    return list(guards)


def is_killed(guard: Guard, fate: str, seconds: float) -> bool:
    """Print what became of a mutant, and return whether its test has killed it."""
    file = marks()[guard.mark][0].file
    print(f"{fate}, {seconds:.0f} s: {guard.mark} in {file}, by {guard.killed_by}", flush=True)
    return fate.startswith("killed")


def main(words: Sequence[str]) -> int:
    guards = chosen(words)
    if not guards:
        print(f"no guard has any of these words: {' '.join(words)}")
        return 1
    bad = 0
    hung: list[Guard] = []
    marks()  # fills its cache before threads do
    with ExitStack() as stack:
        servers = {"SQLQ_TEST_POSTGRESQL_URL": stack.enter_context(own_postgresql()).url("postgres")}
        if any(OF_MARIADB.search(guard.test) for guard in guards):
            servers["SQLQ_TEST_MARIADB_URL"] = stack.enter_context(own_mariadb()).url("mysql")
        copies: SimpleQueue[Path] = SimpleQueue()
        trees = [stack.enter_context(copy_of_the_tree()) for _ in range(AT_A_TIME)]
        for tree in trees:
            copies.put(tree)
        pool = stack.enter_context(ThreadPoolExecutor(AT_A_TIME))
        named = sorted({guard.test for guard in guards})
        # Else it would be the copy that kills. With servers of their own, since some tests change theirs.
        done = run(trees[0], {}, named, 15 * SECONDS, "auto")
        kill_what_runs_on(trees[0])
        if done.returncode:
            print(f"the tests fail with every guard, too:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
            return 1
        tried = pool.map(lambda guard: try_without(guard, servers, copies), guards)
        for guard, (fate, seconds) in zip(guards, tried, strict=True):
            if fate == HUNG:
                hung.append(guard)
            else:
                bad += not is_killed(guard, fate, seconds)
        for guard in list(hung):  # those beside it may have been what held it up
            fate, seconds = try_without(guard, servers, copies, SECONDS_ALONE)
            if fate == HUNG:
                fate = "killed (it hung alone, too)"
            else:
                hung.remove(guard)
            bad += not is_killed(guard, fate, seconds)
    print(f"{len(guards) - bad} of {len(guards)} killed")
    if hung:
        print(f"{len(hung)} of them by hanging: {', '.join(guard.mark for guard in hung)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
