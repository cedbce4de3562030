"""The Django app: what happens when a project with `sqlq.django` in INSTALLED_APPS starts."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from sqlq import commandline
from sqlq.django.checks import check_settings


class SqlqConfig(AppConfig):
    name = "sqlq.django"
    label = "sqlq"
    verbose_name = "sqlq"

    def ready(self) -> None:
        """Import the tasks of all installed apps, as the admin's `autodiscover` does with admin modules."""
        from sqlq.django.configuration import Configuration
        from sqlq.django.tables import after_migrate
        from sqlq.errors import ConfigurationError

        checks.register(check_settings, "sqlq")
        post_migrate.connect(after_migrate, sender=self, dispatch_uid="sqlq")
        if commandline.current is None:
            from sqlq.django.application import InProject

            commandline.current = InProject()
        try:
            modules = Configuration.read().task_modules
        except ConfigurationError:  # the check says it, and so does whatever uses the App
            modules = ()
        autodiscover_modules(*modules)
