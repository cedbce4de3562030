"""Claimed jobs whose payloads are sealed: opened before anything else is done with them, or failed, or put
back for a worker that has their key."""

from __future__ import annotations

from collections.abc import Iterable

from sqlq.errors import SealError
from sqlq.job import ClaimedJob
from sqlq.outcome import Failed
from sqlq.retry import describe, put_off_without_key
from sqlq.seal import Seal, opened_without_keys
from sqlq.store.flows import Filled


def opened_by(seal: Seal | None, claimed: Iterable[ClaimedJob]) -> Filled:
    """Return claimed jobs with their payloads opened, and those that are not opened here, with how their
    attempts end: their rows keep the text as it is, and nothing behind them is held up."""
    done = Filled([], [])
    for job in claimed:
        try:
            if seal is None:
                opened_without_keys("payload", job.payload)
            else:
                job = job._replace(payload=seal.opened("payload", job.task, job.queue, job.payload))
        except SealError as error:
            bad = Failed("bad_signature", describe(error))  # guard: a-bad-seal-fails
            done.unready.append((job, put_off_without_key(job, error) if error.lacks_key else bad))
        else:
            done.ready.append(job)
    return done
