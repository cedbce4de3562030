"""Guards of what waits, as `tests.faults.mutations` takes them away: schedules, flows and limits, and what else may
become of a job meanwhile."""

from __future__ import annotations

from typing import Final

BESIDE = "tests/worker/test_limits_combined.py::"
PAUSED = "tests/worker/test_paused_tasks.py::"

# ruff: noqa: E501 - a guard is one line
# fmt: off
WAITING: Final[list[tuple[str, str | None, str, str]]] = [
    ("only-what-is-served-is-admitted-postgresql", "queue = ANY(CAST(%(served)s AS varchar[]))", "true", BESIDE + "test_jobs_of_an_unserved_queue_stay_blocked[postgresql-limit]"),
    ("only-what-is-served-is-admitted-sqlite", "? IS NULL OR queue IN (SELECT value FROM json_each(?))", "? IS NULL OR ? IS NOT NULL", BESIDE + "test_jobs_of_an_unserved_queue_stay_blocked[sqlite-serial]"),
    ("only-what-is-served-is-admitted-mariadb", "AND queue IN", "AND '' NOT IN", BESIDE + "test_jobs_of_an_unserved_queue_stay_blocked[mariadb-limit]"),
    ("unserved-hold-no-slots", None, "if False:", BESIDE + "test_a_queue_without_workers_releases_its_slots[sqlite]"),
    ("a-rule-is-said-at-once", "Wake(job.limit_key, rule)", "Wake(job.limit_key, rule, job.delay_ms, job.available_at)", BESIDE + "test_the_limit_of_a_delayed_job_does_not_replace_a_newer_one[sqlite]"),
    ("a-schedule-knows-its-limit", None, "pass", BESIDE + "test_the_job_of_a_schedule_has_its_named_limit[postgresql]"),
    ("the-next-start-is-by-the-new-rate", "min(free_at, latest)", "row.next_free_at", BESIDE + "test_a_rate_that_is_raised_counts_from_the_last_start[sqlite]"),
    ("the-next-start-is-by-the-new-rate", "min(free_at, latest)", "min(row.next_free_at, latest)", BESIDE + "test_a_rate_that_is_lowered_is_kept_at_once[postgresql]"),
    ("one-wake-for-the-next-start", "bool(self.ids) or self.changed", "True", BESIDE + "test_looks_at_an_exhausted_rate_leave_one_wake[sqlite]"),
    ("the-slots-of-the-expired-are-looked-at", None, "pass", BESIDE + "test_an_expired_job_releases_its_slot[sqlite-admitted]"),
    ("skipping-lets-a-line-go-on", None, "pass", BESIDE + "test_skipping_a_step_releases_its_slot[postgresql]"),
    ("slots-are-counted-postgresql", "LIMIT coalesce(line.running, 0)", "LIMIT line.running", "tests/sql/test_admission_costs.py::test_an_admission_reads_no_more_beside_a_long_waiting_list[postgresql]"),
    ("the-paused-do-not-start", "job.task in paused]", "False]", PAUSED + "test_a_job_of_a_paused_task_does_not_run_and_counts_no_attempt[sqlite]"),
    ("the-paused-do-not-start", "job.task in paused]", "False]", PAUSED + "test_a_plain_insert_of_a_paused_task_is_blocked[postgresql]"),
    ("a-pause-counts-no-attempt", "jobs.c.attempts - 1", "jobs.c.attempts", PAUSED + "test_a_job_of_a_paused_task_does_not_run_and_counts_no_attempt[sqlite]"),
    ("the-paused-keep-their-place", None, "due = now()", PAUSED + "test_a_job_keeps_its_place_through_a_pause[sqlite]"),
    ("the-freed-keep-their-place", "else_=_due)", "else_=now())", PAUSED + "test_a_job_keeps_its_place_through_a_pause[postgresql]"),
    ("the-paused-stay-in-order", None, "return set()", PAUSED + "test_a_claimed_serial_job_of_a_paused_task_is_blocked_again[sqlite]"),
    ("a-paused-head-keeps-the-order-postgresql", "WHERE paused_at IS NOT NULL))", "WHERE false))", PAUSED + "test_a_paused_serial_job_is_not_overtaken[postgresql]"),
    ("a-paused-head-keeps-the-order-sqlite", "FROM main.sqlq_tasks WHERE paused_at IS NOT NULL", "FROM main.sqlq_tasks WHERE false", PAUSED + "test_a_paused_serial_job_is_not_overtaken[sqlite]"),
    ("a-paused-head-keeps-the-order-mariadb", "sqlq_tasks WHERE paused_at IS NOT NULL", "sqlq_tasks WHERE false", PAUSED + "test_a_paused_serial_job_is_not_overtaken[mariadb]"),
    ("a-line-in-order-goes-on", None, "pass", PAUSED + "test_a_paused_serial_job_is_not_overtaken[sqlite]"),
    ("a-resume-frees-all", "while ids :=", "if ids :=", PAUSED + "test_a_resume_frees_two_thousand_jobs[postgresql]"),
    ("the-freed-are-looked-at", None, "pass", PAUSED + "test_a_paused_job_holds_no_slot_of_its_limit[sqlite]"),
    ("what-is-left-of-a-pause-is-swept", "paused.sweep(self._database)", "False", PAUSED + "test_a_worker_sweeps_jobs_that_a_killed_resume_left[sqlite]"),
    ("a-sweep-leaves-the-paused", " if task not in still", "", PAUSED + "test_a_sweep_frees_jobs_that_a_killed_resume_left[postgresql]"),
    ("the-look-sees-the-paused-postgresql", "blocked_by = 'pause'", "false", PAUSED + "test_a_worker_sweeps_jobs_that_a_killed_resume_left[postgresql]"),
    ("the-resumed-are-not-blocked-again", None, "pass", PAUSED + "test_a_worker_that_has_not_observed_a_resume_blocks_nothing[sqlite]"),
    ("paused-tasks-are-heeded", None, "pass", PAUSED + "test_a_running_worker_observes_the_pause_of_a_task_within_two_seconds[sqlite]"),
    ("paused-keys-are-not-forgotten", None, "", "tests/conformance/test_limit_keys.py::test_a_key_that_is_still_needed_is_kept[sqlite-blocked_by_a_pause]"),
    ("what-waits-for-a-slot-is-paused-too", None, "pass", PAUSED + "test_a_pause_blocks_claimed_jobs_that_wait_for_a_slot[sqlite]"),
    ("children-hear-of-paused-tasks", None, "pass", PAUSED + "test_a_supervisor_notifies_its_workers_of_paused_tasks"),
    ("tasks-are-freed-when-their-pause-ends", "(wait := self._free.turn()) is not None", "False", PAUSED + "test_the_end_of_a_pause_frees_the_jobs_of_its_task[sqlite]"),
]
