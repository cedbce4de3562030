"""Models for Django's permissions and its admin alone: sqlq's tables are made by migrations of its own.

None of these has a table. So `makemigrations`, `dumpdata` and `flush` find nothing. The admin shows what the
App has read, which knows the database and the schema of the jobs.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class _Nothing(models.Manager):
    """Finds nothing, so that `dumpdata` and its like read no table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class _Shown(models.Model):
    """A row as the App has read it."""

    objects = _Nothing()

    class Meta:
        abstract = True

    @classmethod
    def of(cls, read: Any, **more: Any) -> Any:
        """Return what the App has read, with some fields in other words."""
        names = [field.name for field in cls._meta.concrete_fields]
        return cls(**{name: more[name] if name in more else getattr(read, name) for name in names})

    def __str__(self) -> str:
        return f"{self._meta.verbose_name} {self.pk}"


def _model(name: str, base: Any, fields: str, *may: str, **meta: Any) -> Any:
    """Return a model with these fields, the key first, and permissions to do these things."""
    columns = {each: models.TextField(primary_key=not place) for place, each in enumerate(fields.split())}
    meta = {"managed": False, "base_manager_name": "objects", "default_permissions": may, **meta}
    return type(name, (base,), {**columns, "Meta": type("Meta", (), meta), "__module__": __name__})


Job = _model(
    *("Job", _Shown),
    "id state task queue label attempts priority unique_key created_at available_at reserved_at ended_at "
    "error why payload headers result traceback history",
    *("view", "change", "delete"),
)
FailedJob = _model("FailedJob", Job, "", proxy=True, verbose_name="failed job")
"""The same rows, by the same permissions, in a list of their own."""
Schedule = _model(
    *("Schedule", _Shown),
    "name state plan task queue next_at last_at ticks skipped payload error created_at",
    *("view", "change"),
)
Queue = _model(
    *("Queue", _Shown), "queue available scheduled blocked running failed paused served", *("view", "change")
)
Worker = _model(
    *("Worker", _Shown),
    "id name host pid version state queues concurrency jobs started_at seen_at",
    "view",
)
