"""Guards of what waits, as `tests.faults.mutations` takes them away: schedules, flows and limits, and what else may
become of a job meanwhile."""

from __future__ import annotations

from typing import Final

BESIDE = "tests/worker/test_limits_combined.py::"

# ruff: noqa: E501 - a guard is one line
# fmt: off
WAITING: Final[list[tuple[str, str | None, str, str]]] = [
    ("only-what-is-served-is-admitted", "jobs.c.queue.in_(", "jobs.c.queue.not_in(", BESIDE + "test_jobs_of_an_unserved_queue_stay_blocked[postgresql-limit]"),
    ("only-what-is-served-is-admitted", "jobs.c.queue.in_(", "jobs.c.queue.not_in(", BESIDE + "test_jobs_of_an_unserved_queue_stay_blocked[sqlite-serial]"),
    ("only-what-is-served-is-admitted", "jobs.c.queue.in_(", "jobs.c.queue.not_in(", BESIDE + "test_jobs_of_an_unserved_queue_stay_blocked[mariadb-limit]"),
    ("unserved-hold-no-slots", "serving(conn)", "{'serves_all': 1, 'served': []}", BESIDE + "test_a_queue_without_workers_releases_its_slots[sqlite]"),
    ("limit-rule-is-stored-at-enqueue", "Wake(job.limit_key, job.rule or NO_RULE)", "Wake(job.limit_key, job.rule or NO_RULE, job.delay_ms, job.available_at)", BESIDE + "test_the_limit_of_a_delayed_job_does_not_replace_a_newer_one[sqlite]"),
    ("a-schedule-knows-its-limit", None, "pass", BESIDE + "test_the_job_of_a_schedule_has_its_named_limit[postgresql]"),
    ("the-next-start-is-by-the-new-rate", "min(moved, now + AHEAD + distance)", "free_at", BESIDE + "test_a_rate_that_is_raised_counts_from_the_last_start[sqlite]"),
    ("the-next-start-is-by-the-new-rate", "min(moved, ", "min(free_at, ", BESIDE + "test_a_rate_that_is_lowered_is_kept_at_once[postgresql]"),
    ("one-wake-for-the-next-start", "bool(self.ids) or self.changed", "True", BESIDE + "test_looks_at_an_exhausted_rate_leave_one_wake[sqlite]"),
    ("skip-wakes-the-serial-key", None, "pass", BESIDE + "test_skipping_a_step_releases_its_slot[postgresql]"),
    ("rates-count-no-slots", "if grant.rule.max_running is not None", "", "tests/sql/test_admission_costs.py::test_an_admission_reads_no_more_beside_a_long_waiting_list[postgresql]"),
]
