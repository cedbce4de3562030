"""The dashboard under a path of the project's: `path("sqlq/", include("sqlq.django.urls"))`."""

from django.urls import re_path

from sqlq.django.web import dashboard

app_name = "sqlq"
urlpatterns = [re_path(r"^(?P<path>.*)\Z", dashboard, name="dashboard")]
