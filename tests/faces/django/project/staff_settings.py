"""The settings of the project with its staff's pages: Django's admin, and the dashboard."""

import json
import os
from typing import Any

from settings import *  # noqa: F403
from settings import DATABASES, INSTALLED_APPS

INSTALLED_APPS = [
    *(f"django.contrib.{name}" for name in ("admin", "auth", "sessions", "messages")),
    *INSTALLED_APPS,
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES: list[dict[str, Any]] = [
    {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {}}
]
TEMPLATES[0]["OPTIONS"]["context_processors"] = [
    "django.template.context_processors.request",
    *(f"django.contrib.{name}.context_processors.{name}" for name in ("auth", "messages")),
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STATIC_URL = "static/"
ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "staff_urls"
for alias in json.loads(os.environ.get("SHOP_ATOMIC", "[]")):
    DATABASES[alias]["ATOMIC_REQUESTS"] = True
