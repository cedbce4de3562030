"""`manage.py flush` as Django's. In tests it empties sqlq's tables, too. Django calls it after each
TransactionTestCase, and with `serialized_rollback` or `available_apps` it sends no signal."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush


class Command(flush.Command):
    def handle(self, **options: Any) -> None:
        from sqlq.django.tables import before_flush

        before_flush(options["database"])
        super().handle(**options)
