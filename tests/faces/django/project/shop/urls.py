from django.urls import path

from shop.views import aorder, order

urlpatterns = [path("order", order), path("aorder", aorder)]
