"""The Django app: what happens when a project with `sqlq.django` in INSTALLED_APPS starts."""

from __future__ import annotations

import sys
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from sqlq.config import command_hint
from sqlq.django.configuration import Configuration, check_settings
from sqlq.errors import ConfigurationError, SqlqError


class SqlqConfig(AppConfig):
    name = "sqlq.django"
    label = "sqlq"
    verbose_name = "sqlq"

    def ready(self) -> None:
        """Import the tasks of all installed apps, as the admin's `autodiscover` does with admin modules."""
        from sqlq.django.tables import after_migrate

        checks.register(check_settings, "sqlq")
        post_migrate.connect(after_migrate, sender=self, dispatch_uid="sqlq")
        if command_hint.current is None:
            from sqlq.django.application import InProject

            command_hint.current = InProject("python manage.py sqlq", "producer")
        try:
            modules = Configuration.read().task_modules
        except ConfigurationError as error:
            _end_command(error)
            modules = ()  # the check reports it, and so does any use of the App
        try:
            autodiscover_modules(*modules)
        except Exception as error:
            _end_command(error)
            raise


def _end_command(error: Exception) -> None:
    """End a command of manage.py in one sentence for a mistake in the settings or a task's options. Only
    `runserver` goes on: it shows the mistake by itself, and waits for the mend."""
    tasks: Any = sys.modules.get("django.tasks.exceptions")
    mistakes = (SqlqError, ImproperlyConfigured, *(() if tasks is None else (tasks.InvalidTask,)))
    is_command = sys.argv[0].endswith(("manage.py", "django-admin", "django/__main__.py"))
    if isinstance(error, mistakes) and is_command and sys.argv[1:2] != ["runserver"]:
        sys.exit(f"{command_hint.current.name if command_hint.current else 'sqlq'}: {error}")
