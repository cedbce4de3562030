"""Guards of what waits, as `tests.faults.mutations` takes them away: schedules, flows and limits, and what else may
become of a job meanwhile."""

from __future__ import annotations

from typing import Final

BESIDE = "tests/worker/test_limits_and.py::"
PAUSED = "tests/worker/test_paused_tasks.py::"

# ruff: noqa: E501 - a guard is one line
# fmt: off
WAITING: Final[list[tuple[str, str | None, str, str]]] = [
    ("only-what-is-served-is-admitted-postgresql", "queue = ANY(CAST(%(served)s AS varchar[]))", "true", BESIDE + "test_jobs_of_a_queue_that_no_worker_serves_stay_in_line[postgresql-limit]"),
    ("only-what-is-served-is-admitted-sqlite", "? IS NULL OR queue IN (SELECT value FROM json_each(?))", "? IS NULL OR ? IS NOT NULL", BESIDE + "test_jobs_of_a_queue_that_no_worker_serves_stay_in_line[sqlite-serial]"),
    ("only-what-is-served-is-admitted-mariadb", "AND queue IN", "AND '' NOT IN", BESIDE + "test_jobs_of_a_queue_that_no_worker_serves_stay_in_line[mariadb-limit]"),
    ("unserved-hold-no-slots", None, "if False:", BESIDE + "test_a_queue_that_is_served_no_more_gives_its_slots_back[sqlite]"),
    ("a-rule-is-said-at-once", "Wake(job.limit_key, rule)", "Wake(job.limit_key, rule, job.delay_ms, job.available_at)", BESIDE + "test_what_a_delayed_job_said_does_not_undo_what_a_newer_one_says[sqlite]"),
    ("a-schedule-knows-its-limit", None, "pass", BESIDE + "test_the_job_of_a_schedule_knows_the_limit_that_it_names[postgresql]"),
    ("the-next-start-is-by-the-new-rate", "min(free_at, latest)", "row.next_free_at", BESIDE + "test_a_rate_that_is_raised_counts_from_the_last_start[sqlite]"),
    ("the-next-start-is-by-the-new-rate", "min(free_at, latest)", "min(row.next_free_at, latest)", BESIDE + "test_a_rate_that_is_lowered_is_kept_at_once[postgresql]"),
    ("one-wake-for-the-next-start", "bool(self.ids) or self.changed", "True", BESIDE + "test_looks_at_a_rate_that_is_used_up_leave_one_wake[sqlite]"),
    ("the-slots-of-the-expired-are-looked-at", None, "pass", BESIDE + "test_a_job_that_was_not_started_in_time_lets_the_next_go_on[sqlite-admitted]"),
    ("skipping-lets-a-line-go-on", None, "pass", BESIDE + "test_skipping_a_step_gives_its_slot_back[postgresql]"),
    ("slots-are-counted-postgresql", "LIMIT coalesce(line.running, 0)", "LIMIT line.running", "tests/sql/test_admission_costs.py::test_an_admission_reads_no_more_beside_a_long_line[postgresql]"),
    ("the-paused-do-not-start", "job.task in paused]", "False]", PAUSED + "test_a_job_of_a_paused_task_does_not_run_and_counts_no_attempt[sqlite]"),
    ("the-paused-do-not-start", "job.task in paused]", "False]", PAUSED + "test_a_plain_insert_of_a_paused_task_is_blocked_too[postgresql]"),
    ("a-pause-counts-no-attempt", "jobs.c.attempts - 1", "jobs.c.attempts", PAUSED + "test_a_job_of_a_paused_task_does_not_run_and_counts_no_attempt[sqlite]"),
    ("the-paused-keep-their-place", None, "due = now()", PAUSED + "test_a_job_keeps_its_place_through_a_pause[sqlite]"),
    ("the-freed-keep-their-place", "else_=_due)", "else_=now())", PAUSED + "test_a_job_keeps_its_place_through_a_pause[postgresql]"),
    ("the-paused-stay-in-order", None, "return set()", PAUSED + "test_a_job_in_order_that_was_claimed_as_its_task_was_paused_returns_to_its_line[sqlite]"),
    ("a-paused-head-keeps-the-order-postgresql", "WHERE paused_at IS NOT NULL))", "WHERE false))", PAUSED + "test_nothing_overtakes_a_paused_job_in_a_line_in_order[postgresql]"),
    ("a-paused-head-keeps-the-order-sqlite", "FROM main.sqlq_tasks WHERE paused_at IS NOT NULL", "FROM main.sqlq_tasks WHERE false", PAUSED + "test_nothing_overtakes_a_paused_job_in_a_line_in_order[sqlite]"),
    ("a-paused-head-keeps-the-order-mariadb", "sqlq_tasks WHERE paused_at IS NOT NULL", "sqlq_tasks WHERE false", PAUSED + "test_nothing_overtakes_a_paused_job_in_a_line_in_order[mariadb]"),
    ("a-line-in-order-goes-on", None, "pass", PAUSED + "test_nothing_overtakes_a_paused_job_in_a_line_in_order[sqlite]"),
    ("a-resume-frees-all", "while ids :=", "if ids :=", PAUSED + "test_a_resume_frees_two_thousand_jobs[postgresql]"),
    ("the-freed-are-looked-at", None, "pass", PAUSED + "test_a_paused_job_holds_no_slot_of_its_limit[sqlite]"),
    ("what-is-left-of-a-pause-is-swept", "paused.sweep(self._database)", "False", PAUSED + "test_a_worker_sweeps_what_a_killed_resume_has_left[sqlite]"),
    ("a-sweep-leaves-the-paused", " if task not in still", "", PAUSED + "test_the_jobs_that_a_killed_resume_has_left_are_swept[postgresql]"),
    ("the-look-sees-the-paused-postgresql", "blocked_by = 'pause'", "false", PAUSED + "test_a_worker_sweeps_what_a_killed_resume_has_left[postgresql]"),
    ("the-resumed-are-not-blocked-again", None, "pass", PAUSED + "test_a_worker_that_has_not_heard_of_a_resume_blocks_nothing[sqlite]"),
    ("paused-tasks-are-heeded", None, "pass", PAUSED + "test_a_worker_at_work_starts_no_job_of_a_task_from_two_seconds_after_its_pause[sqlite]"),
    ("paused-keys-are-not-forgotten", None, "", "tests/conformance/test_limit_keys.py::test_a_key_that_is_still_to_count_is_kept[sqlite-blocked_by_a_pause]"),
    ("what-waits-for-a-slot-is-paused-too", None, "pass", PAUSED + "test_jobs_that_wait_for_a_slot_are_paused_too[sqlite]"),
    ("children-hear-of-paused-tasks", None, "pass", PAUSED + "test_a_supervisor_tells_its_workers_of_paused_tasks"),
    ("tasks-are-freed-when-their-pause-ends", "(wait := self._free.turn()) is not None", "False", PAUSED + "test_the_end_of_a_pause_frees_the_jobs_of_its_task[sqlite]"),
]
