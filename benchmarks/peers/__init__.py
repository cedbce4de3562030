"""Every subject by its name. The module of a subject is imported when it is needed, in its environment."""

from __future__ import annotations

import importlib

from benchmarks.subject import Subject

OURS = ("sqlq", "sqlq-async", "limit", "lean")
PEERS = ("procrastinate", "pgqueuer", "chancy", "saq", "django-tasks-db", "huey", "celery", "dramatiq", "rq")

_MODULES = {
    "sqlq": "benchmarks.own",
    "sqlq-async": "benchmarks.own",
    "sqlq-lines": "benchmarks.own",
    "limit": "benchmarks.limit",
    "lean": "benchmarks.limit",
}


def find(name: str) -> Subject:
    """Return the subject of that name."""
    module = importlib.import_module(_MODULES.get(name) or f"benchmarks.peers.with_{name.replace('-', '_')}")
    for subject in module.SUBJECTS:
        if subject.name == name:
            found: Subject = subject()
            return found
    raise LookupError(f"{module.__name__} has no subject named {name}")
