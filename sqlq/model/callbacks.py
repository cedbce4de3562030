"""Callbacks: the job that follows the end of another, enqueued in the transaction that ends that one.

The row of a job names its follow-ups itself, as JSON in `on_success` and `on_failure`; that of a cancel is
inside `on_failure`. So a supervisor, or a worker that finds the job's owner gone, ends the job without its
task and its code.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Row

from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.errors import ArgumentsError
from sqlq.model.checks import checked_name, checked_priority, checked_queue, refusing_by
from sqlq.model.history import AttemptTimes
from sqlq.model.job import ClaimedJob, JobOutcome, NewJob
from sqlq.model.outcome import Cancelled, Failed, Finished, Outcome, Settlement
from sqlq.payload.encryption import Encryption
from sqlq.payload.headers import decode

log = logging.getLogger("sqlq.worker")


Ending: TypeAlias = "ClaimedJob | Row[Any]"
"""A job that ends, as a worker holds it or as a rescue finds its row."""


class Follower(NamedTuple):
    """A task that follows the end of a job, as the job's row names it.

    Other options of the task count as for any job that SQL inserts. They take effect when a worker that knows
    the task claims the follow-up.
    """

    task: str
    queue: str = DEFAULT_QUEUE
    priority: int = 0

    def as_text(self) -> str:
        """Return the JSON for the row, without default values."""
        named = {name: value for name, value in self._asdict().items() if value != _DEFAULTS.get(name)}
        return json.dumps(named, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str, column: str) -> Follower | None:
        """Return the task that a row names in a column; None where the row has `null`, after which none
        follows.

        Keys that are not known here are another release's, and left alone. Raises `ArgumentsError` for text
        that names no task, in a queue, with a priority.
        """
        try:
            named = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentsError(f"{column} is not JSON: {error}") from None
        if isinstance(named, dict) and column == "on_cancel":
            named = named.get("on_cancel")
        if named is None or (isinstance(named, dict) and named.keys() == {"on_cancel"}):
            return None
        if not isinstance(named, dict):
            raise ArgumentsError(
                f'{column} is not an object that names a task, as in {{"task": "shop.alarm", "queue": "ops"}}'
            )
        with refusing_by(ArgumentsError):
            return cls(
                checked_name(named.get("task", ""), f"the task in {column}"),
                checked_queue(named.get("queue", DEFAULT_QUEUE), f"the queue in {column}"),
                checked_priority(named.get("priority", 0)),
            )


_DEFAULTS = Follower._field_defaults


def follow_up(job: Ending, outcome: Outcome, encryption: Encryption | None = None) -> NewJob | None:
    """Return the job that follows one that ends with this outcome, signed or encrypted where there are keys.
    None where none follows, as after an attempt that did not end its job, and after a bad signature. It has
    the headers of the job it follows."""
    about = {"job_id": job.id, "task": job.task}
    try:
        return _following(job, outcome, encryption)
    except ArgumentsError as error:
        # guard: bad-callback-fails-alone
        log.error("job %d: no job follows it: %s", job.id, error, extra=about)
    except Exception:
        # guard: a-follow-up-that-cannot-be-made-stops-no-other
        log.exception("job %d: no job follows it, for what follows cannot be made", job.id, extra=about)
    return None


def _following(job: Ending, outcome: Outcome, encryption: Encryption | None) -> NewJob | None:
    # SQLite lets in bytes, which JSON does not have
    names = str(job.task), str(job.queue)  # guard: callback-names-are-text
    label = None if job.label is None else str(job.label)
    ended = JobOutcome(job.id, *names, "finished", job.attempts, label=label)
    text, column = job.on_failure, "on_failure"
    match outcome:
        case Finished():
            text, column = job.on_success, "on_success"
        case Failed("bad_signature"):  # guard: nothing-follows-a-bad-signature
            return None
        case Failed(reason, error):
            ended = replace(ended, outcome="failed", reason=reason)
            ended = replace(ended, exception=error.exception, message=error.message)
        case Cancelled(why):
            column = "on_cancel"
            ended = replace(ended, outcome="cancelled", message=why)
        case _:
            return None
    if text is None or (follower := Follower.from_text(text, column)) is None:
        return None
    payload = json.dumps({"args": [asdict(ended)]}, ensure_ascii=False)
    new: NewJob = NewJob(follower.task, payload, follower.queue, None, follower.priority)
    new = replace(new, headers_text=_passed_on(job.headers))
    return new if encryption is None else new._protected_by(encryption)  # guard: follow-ups-are-protected


def _passed_on(headers: str | None) -> str | None:
    """Return the headers that a follow-up has from the job it follows: so a correlation id goes on. Those
    that no handler could be given are left out, since the follow-up would fail of them."""
    if headers is None:
        return None
    try:
        decode(headers)
    except ArgumentsError:
        return None  # guard: bad-headers-are-not-passed-on
    return headers


def as_trusted(job: ClaimedJob, encryption: Encryption | None) -> ClaimedJob:
    """Return a job as its row has it, unopened. Where its signature is bad, it has no follow-up: that would
    get, with a good signature, text that anybody may have written."""
    if job.on_failure is None or encryption is None or encryption.opens(job.task, job.queue, job.payload):
        return job
    return job._replace(on_failure=None)  # guard: the-unstarted-are-trusted-by-signature


def settlement(
    job: ClaimedJob,
    outcome: Outcome,
    course: AttemptTimes | None = None,
    *,
    encryption: Encryption | None = None,
) -> Settlement:
    """Return the settlement of an attempt that ended with this outcome, with the follow-up of its job if that
    ends with it. Its result and the follow-up are signed or encrypted where there are keys."""
    if encryption is not None and type(outcome) is Finished:
        outcome = outcome.protected_by(encryption, job.task, job.queue)  # guard: results-are-protected
    follows = None
    if job.on_success is not None or job.on_failure is not None:
        follows = follow_up(job, outcome, encryption)
    return Settlement(job.id, job.lease_token, job.attempts, outcome, follows, job.limit_key, course)


def check_follow_ups(job: Ending) -> None:
    """Raise `ArgumentsError` where a job's row has a follow-up that cannot be read."""
    failure = job.on_failure
    for text, column in ((job.on_success, "on_success"), (failure, "on_failure"), (failure, "on_cancel")):
        if text is not None:
            Follower.from_text(text, column)
