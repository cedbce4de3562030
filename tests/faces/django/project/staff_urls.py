from django.contrib import admin
from django.urls import include, path
from shop.urls import urlpatterns as shop

urlpatterns = [path("admin/", admin.site.urls), path("ops/sqlq/", include("sqlq.django.urls")), *shop]
