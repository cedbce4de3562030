"""The jobs that a flush of Django leaves, if it sends no signal."""

from django.test import TransactionTestCase

from shop.tasks import pay
from sqlq.django import app


class NothingIsLeft:
    def test_nothing_is_left_of_the_other_test(self):
        self.assertEqual(app.jobs.list(), [])
        app.enqueue(pay.new(1))

    test_nothing_is_left_of_the_first_test = test_nothing_is_left_of_the_other_test


class WithTheDataOfMigrations(NothingIsLeft, TransactionTestCase):
    serialized_rollback = True


class WithSomeApps(NothingIsLeft, TransactionTestCase):
    available_apps = ("shop", "sqlq.django")
