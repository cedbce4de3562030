"""The settings of the project. The tests set its database and other differences in the environment."""

import importlib.util
import json
import os
from typing import Any

import django

if importlib.util.find_spec("MySQLdb") is None:
    import pymysql

    pymysql.install_as_MySQLdb()

SECRET_KEY = "of a test"
USE_TZ = True
TIME_ZONE = "UTC"
INSTALLED_APPS = ["django.contrib.contenttypes", "sqlq.django", "shop"]
DATABASES: dict[str, Any] = {"default": json.loads(os.environ["SHOP_DATABASE"])}
if other := os.environ.get("SHOP_OTHER"):
    DATABASES["other"] = json.loads(other)
SQLQ = json.loads(os.environ.get("SHOP_SQLQ", "{}"))
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "shop.urls"
if django.VERSION >= (6,):
    TASKS = {
        "default": {"BACKEND": "sqlq.django.SqlqBackend", "QUEUES": [], "OPTIONS": {"backoff": "0s"}},
        "once": {"BACKEND": "sqlq.django.SqlqBackend", "OPTIONS": {"max_attempts": 1}},
    }
    SQLQ["task_modules"] = ["tasks", "django_tasks"]
