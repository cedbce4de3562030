"""Claimed jobs whose payloads are sealed: opened before anything else is done with them, or failed."""

from __future__ import annotations

from collections.abc import Iterable

from sqlq.errors import SealError
from sqlq.job import ClaimedJob
from sqlq.outcome import Failed
from sqlq.retry import describe
from sqlq.seal import Seal
from sqlq.store.flows import Filled


def opened_by(seal: Seal, claimed: Iterable[ClaimedJob]) -> Filled:
    """Return claimed jobs with their payloads opened, and those whose seal is bad, with how they end: their
    rows keep the text as it is, and nothing behind them is held up."""
    done = Filled([], [])
    for job in claimed:
        try:
            payload = seal.opened("payload", job.task, job.queue, job.payload)
        except SealError as error:
            done.unready.append((job, Failed("bad_signature", describe(error))))  # guard: a-bad-seal-fails
        else:
            done.ready.append(job._replace(payload=payload))
    return done
