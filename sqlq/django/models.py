"""Models for Django's permissions and its admin alone: sqlq's tables are made by migrations of its own.

None of these has a table. So `makemigrations`, `dumpdata` and `flush` find nothing. The admin shows what the
App has read, which knows the database and the schema of the jobs.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class _Empty(models.Manager):
    """Finds nothing, so that `dumpdata` and its like read no table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class _Row(models.Model):
    """A row as the App has read it."""

    objects = _Empty()

    class Meta:
        abstract = True

    @classmethod
    def of(cls, row: Any, **texts: Any) -> Any:
        """Return what the App has read, with some fields in other words."""
        names = {field.name for field in cls._meta.concrete_fields} - texts.keys()
        return cls(**texts, **{name: getattr(row, name) for name in names})

    def __str__(self) -> str:
        return f"{self._meta.verbose_name} {self.pk}"


FLAGS = ("paused", "served")
"""The fields that the admin shows as icons."""


def _model(name: str, key: str, fields: str, *permissions: str) -> Any:
    """Return a model with these fields, of which one is the key, and permissions to do these things."""
    columns = {
        each: models.BooleanField() if each in FLAGS else models.TextField(primary_key=each == key)
        for each in fields.split()
    }
    meta = {"managed": False, "base_manager_name": "objects", "default_permissions": permissions}
    return type(name, (_Row,), {**columns, "Meta": type("Meta", (), meta), "__module__": __name__})


Job = _model(
    "Job",
    "id",
    "error why id state task queue label attempts priority unique_key created_at available_at reserved_at "
    "ended_at payload headers result traceback history",
    "view",
    "change",
    "delete",
)
Schedule = _model(
    "Schedule",
    "name",
    "name state plan task queue next_at last_at ticks skipped payload error created_at",
    "view",
    "change",
)
Queue = _model(
    "Queue", "queue", "queue available scheduled blocked running failed paused served", "view", "change"
)
Worker = _model(
    "Worker",
    "id",
    "id name host pid version state queues concurrency jobs started_at seen_at",
    "view",
)
