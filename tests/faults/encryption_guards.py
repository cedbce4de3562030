"""The guards of signed and encrypted payloads, for `tests.faults.mutations`."""

from __future__ import annotations

STORM = "tests/faults/test_kills.py::"
ENCRYPTION, ENCRYPTED = (
    "tests/unit/test_encryption.py::",
    "tests/worker/test_encrypted.py::",
)

# ruff: noqa: E501 - a guard is one line
# fmt: off
GUARDS: list[tuple[str, str | None, str, str]] = [
    ("jobs-are-protected", None, "pass", ENCRYPTED + "test_signed_and_encrypted_jobs_run_and_so_are_their_results[sqlite-sign]"),
    ("bound-to-task-and-queue", "str(task), str(queue)", "'', str(queue)", ENCRYPTED + "test_payloads_of_two_tasks_cannot_be_exchanged[sqlite-sign]"),
    ("bound-to-task-and-queue", "str(task), str(queue)", "str(task), ''", ENCRYPTED + "test_a_row_that_was_tampered_with_fails_alone[sqlite-encrypt-moved to another queue]"),
    ("bound-to-task-and-queue", "kind, str(task)", "'', str(task)", ENCRYPTION + "test_a_signature_is_bound_to_task_queue_and_kind[encrypt]"),
    ("signatures-are-checked", None, "pass", ENCRYPTION + "test_a_changed_text_is_refused[sign]"),
    ("plain-rows-are-refused", None, "if False:", ENCRYPTED + "test_a_row_that_was_tampered_with_fails_alone[sqlite-sign-without its signature]"),
    ("no-encryption-without-a-key", None, "if False:", ENCRYPTION + "test_the_environment_sets_keys_unless_the_app_does"),
    ("a-bad-signature-fails", None, "bad = Failed('error', describe(error))", ENCRYPTED + "test_a_row_that_was_tampered_with_fails_alone[sqlite-sign-cut off]"),
    ("bad-signature-is-not-bad-payload", None, "if False:", ENCRYPTED + "test_a_rewritten_signature_fails_at_once[sqlite-None]"),
    ("protected-without-a-key-fails", None, "if False:", ENCRYPTED + "test_a_rewritten_signature_fails_at_once[sqlite-keys2]"),
    ("protected-without-a-key", None, "pass", ENCRYPTED + "test_a_job_is_released_when_its_key_is_not_here[sqlite-None-encrypt]"),
    ("without-a-key-it-is-put-back", None, "return Failed('bad_signature', describe(error))", ENCRYPTED + "test_a_job_is_released_when_its_key_is_not_here[sqlite-keys1-sign]"),
    ("a-result-without-its-key-is-put-back", None, "elif False:", ENCRYPTED + "test_a_step_is_released_when_the_key_of_a_result_is_not_here[sqlite]"),
    ("nothing-follows-a-bad-signature", None, "case Failed('unsigned'):", ENCRYPTED + "test_a_refused_row_gets_no_callback[sqlite-{}]"),
    ("the-lost-are-trusted", None, "forged = set()", ENCRYPTED + "test_a_forged_row_whose_worker_is_lost_gets_no_callback[sqlite]"),
    ("the-unstarted-are-trusted-by-signature", None, "return job", ENCRYPTED + "test_a_forged_row_of_a_dead_worker_gets_no_callback[sqlite]"),
    ("plain-feeds-no-signed", None, "if False:", ENCRYPTED + "test_a_plain_row_feeds_no_signed_step[sqlite-pay]"),
    ("unopened-step-result-raises", None, "if False:", ENCRYPTED + "test_a_plain_row_feeds_no_signed_step[sqlite-look]"),
    ("results-are-protected", None, "pass", ENCRYPTED + "test_signed_and_encrypted_jobs_run_and_so_are_their_results[sqlite-encrypt]"),
    ("results-are-protected", None, "pass", STORM + "test_every_waiter_gets_the_end_of_its_job_in_a_storm[sqlite-1]"),
    ("complete-encrypts", None, "stored = done", ENCRYPTED + "test_a_task_of_a_queue_with_options_knows_its_app[sqlite]"),
    ("unopened-result-is-none", None, "if False:", ENCRYPTED + "test_a_plain_result_is_none_where_plain_rows_are_refused[sqlite]"),
    ("results-of-steps-are-opened", None, "pass", ENCRYPTED + "test_a_step_refuses_a_changed_result[sqlite-sign]"),
    ("growth-is-protected", None, "pass", ENCRYPTED + "test_a_handler_sees_results_and_grows_its_flow[sqlite-sign]"),
    ("follow-ups-are-protected", None, "return new", ENCRYPTED + "test_callbacks_are_signed_whoever_writes_them[sqlite-sign]"),
    ("what-follows-the-unstarted-is-protected", "encryption_of(conn)", "None", ENCRYPTED + "test_callbacks_are_signed_whoever_writes_them[sqlite-sign]"),
    ("supervisor-has-the-keys", None, "self._database.encryption = None", STORM + "test_the_callback_of_a_job_whose_worker_died_is_signed[sqlite]"),
    ("schedules-are-protected", None, "pass", ENCRYPTED + "test_schedules_are_signed_when_they_are_stored[sqlite-sign]"),
    ("a-protected-schedule-stays", None, "if True:", ENCRYPTED + "test_a_deploy_rewrites_a_signed_schedule_only_where_it_differs[sqlite-encrypt]"),
    ("djangos-keys-are-shown-nowhere", "repr=False", "repr=True", "tests/faces/django/test_inside.py::test_in_memory[sqlite]"),
]
# fmt: on
