"""Advice for names that an App does not have: those of other job queues, and those that it had before."""

from typing import Final

_JOBS = (
    *("get", "list", "cancel", "replay", "prune", "get_by_key"),
    *("aget", "alist", "acancel", "areplay", "aget_by_key"),
)

ADVICE: Final = {
    **dict.fromkeys(("apply_async", "send_task", "queue_task"), "app.enqueue(app.named(name).new(…))"),
    **dict.fromkeys(("enqueue_at", "enqueue_in"), 'app.enqueue(task.new(…).set(delay="1m"))'),
    "actor": "@app.task",
    "AsyncResult": "app.jobs.get(id), or app.result(id)",
    **dict.fromkeys(("add_periodic_task", "periodic_task"), '@app.task(schedule="0 3 * * *")'),
    "autodiscover_tasks": "imports of the modules that define tasks, in the one that --app names",
    **{name: f"app.jobs.{name}" for name in _JOBS},
    "retry_failed": "app.jobs.retry",
    "aretry_failed": "app.jobs.aretry",
    "flow": "app.flows.get",
    "aflow": "app.flows.aget",
    "pause": "app.queues.pause",
    "resume": "app.queues.resume",
    "pause_all": "app.queues.pause(all=True)",
    "resume_all": "app.queues.resume(all=True)",
    "fleet": "app.workers.pause(*names), resume, stop or restart",
    "stored_result": "app.result(job, raw=True)",
    "admin": (
        "app.jobs (listing, failures, move_back, delete), app.queues (status, vitals, pauses, unknown), "
        "app.flows (list, cancel, retry, skip), app.limits (list, set, clear) or app.workers (list), and "
        "DatabaseCollector(app)"
    ),
    "address": "app.url or app.schema",
}
"""The new spelling of each name."""
