"""What a handler returned, as the row of its job takes it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from sqlq.codec import as_text
from sqlq.job import ClaimedJob
from sqlq.outcome import Completed
from sqlq.retry import scrubbed
from sqlq.settings import RESULT_BYTES

if TYPE_CHECKING:
    from sqlq.task import Task

log = logging.getLogger("sqlq.worker")


def completion(result: Any, job: ClaimedJob, task: Task[..., Any] | None) -> Completed:
    """Return the outcome of a handler that returned `result`, as JSON: as its return annotation says, if it
    says something.

    The job is done whatever it returned: of a result that is not JSON, or too large, null is stored with a
    note that says why, which the row and the log keep.
    """
    if result is None:
        return Completed()
    try:
        if task is not None and (conversion := task.result_conversion) is not None:
            result = conversion.shown(result)
        text = json.dumps(result, ensure_ascii=False, allow_nan=False, default=as_text)
        if "\\u0000" in text or any("\ud800" <= c <= "\udfff" for c in text):
            text = json.dumps(_storable(result), ensure_ascii=False, allow_nan=False, default=as_text)
    except Exception as error:
        why = f"is not JSON ({scrubbed(str(error), 200)})"
    else:
        size = len(text.encode())
        if size <= RESULT_BYTES:
            return Completed(text)
        why = f"takes {size:,} bytes as JSON, more than {RESULT_BYTES:,}"
    log.warning(
        "job %d: %s finished, but its result %s; null is stored",
        *(job.id, job.task, why),
        extra={
            "job_id": job.id,
            "task": job.task,
            "queue": job.queue,
            "attempt": job.attempts,
            "event": "result_dropped",
        },
    )
    return Completed(None, f"its result {why}; null is stored")


def _storable(value: Any) -> Any:
    match value:
        case str():
            return scrubbed(value, max(len(value) * 4, 64))
        case dict():
            return {(_storable(k) if isinstance(k, str) else k): _storable(v) for k, v in value.items()}
        case list() | tuple():
            return [_storable(v) for v in value]
        case _:
            return value
