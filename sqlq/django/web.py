"""The dashboard as a view of Django's, by its session and its permissions."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import cache
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import get_token
from django.urls import NoReverseMatch, reverse
from django.views.decorators.csrf import csrf_exempt

from sqlq.django.application import project_app
from sqlq.web import Role, User, wsgi
from sqlq.web.site import required  # which names packages that are not there

USER = "sqlq.django.user"


# The dashboard's forms have a token of their own, and it refuses those that another site has sent. None has
# the token that Django looks for. A transaction around requests (ATOMIC_REQUESTS) would keep what a form
# does waiting.
@csrf_exempt
@transaction.non_atomic_requests  # guard: no-transaction-around-forms
def dashboard(request: HttpRequest, path: str) -> HttpResponse:
    """Answer a request for the dashboard, under whatever prefix the project's URLs have put it."""
    root = request.path[: len(request.path) - len(path)].rstrip("/")
    user = user_of(request.user)
    if user is None:
        if request.user.is_authenticated:
            raise PermissionDenied
        # the admin's page, or LOGIN_URL of the settings
        return redirect_to_login(
            request.get_full_path() if request.method == "GET" else f"{root}/", _address("admin:login")
        )
    environ = {
        **request.META,  # which has the headers, under ASGI, too
        USER: user,
        "sqlq.host": {
            "home": _address("admin:index"),
            "logout": _address("admin:logout", "logout"),
            "token": get_token(request),
        },
        "SCRIPT_NAME": root.encode().decode("latin-1"),
        "PATH_INFO": f"/{path}".encode().decode("latin-1"),
        "HTTP_HOST": request.get_host(),  # which Django has checked
        "wsgi.url_scheme": request.scheme,
        "wsgi.input": io.BytesIO(request.body),
        "CONTENT_LENGTH": str(len(request.body)),
    }
    answer = required("werkzeug").Response.from_app(_site(), environ, buffered=True)
    response = HttpResponse(answer.get_data(), status=answer.status_code)
    for name, value in answer.headers:
        if name == "Set-Cookie":  # several, of which a response of Django's keeps one
            response.cookies.load(value)
        else:
            response.headers[name] = value
    return response


def user_of(user: Any) -> User | None:
    """Return who a user of Django's is to the dashboard: nobody, unless staff with a permission."""
    if not (user.is_active and user.is_staff):  # guard: only-staff-sees-jobs
        return None
    roles: dict[str, Role] = {"delete": "admin", "change": "operator", "view": "viewer"}
    for permission, role in roles.items():
        if user.has_perm(f"sqlq.{permission}_job"):  # as superusers have
            return User(str(user.get_username()), role)
    return None


@cache
def _site() -> Any:
    return wsgi(project_app(), authorize=lambda request: request.environ[USER])


def _address(*names: str) -> str | None:
    """Return the path of the first of these views that the project has."""
    for name in names:
        with suppress(NoReverseMatch):
            return str(reverse(name))
    return None
