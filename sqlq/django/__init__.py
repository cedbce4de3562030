"""sqlq in a Django project: an App on the project's own database, in its own transactions.

    INSTALLED_APPS = [..., "sqlq.django"]                  # settings.py

    from sqlq.django import app                            # shop/tasks.py

    @app.task(queue="mail")
    def send_receipt(order_id: int) -> None: ...

    with transaction.atomic():                             # shop/views.py
        order.save()
        app.enqueue(send_receipt.new(order.id))            # exists exactly if the order does

    python manage.py migrate && python manage.py sqlq work

`app` is made of the settings when it is first used. Django 6 projects may use `django.tasks` instead of, or
beside, `app.task`: `SqlqBackend` is its backend.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlq.django.application import DjangoApp
    from sqlq.django.backend import SqlqBackend

    app: DjangoApp

__all__ = ["SqlqBackend", "app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from sqlq.django.application import project_app

        return project_app()
    if name == "SqlqBackend":
        from sqlq.django.backend import SqlqBackend

        return SqlqBackend
    raise AttributeError(f"module 'sqlq.django' has no attribute {name!r}")
