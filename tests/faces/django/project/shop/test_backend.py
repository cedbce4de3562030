"""SqlqBackend, in the manner of Django's tests of its own backends."""

import datetime as dt
import pickle
import sys
from functools import partial
from unittest import mock

from django.core import checks
from django.db import connection, transaction
from django.tasks import TaskResultStatus, default_task_backend, task_backends
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings
from django.utils import timezone

from shop import django_tasks, tasks
from shop.models import Order
from shop.test_enqueue import count, needs_a_file
from sqlq.django import SqlqBackend, app
from sqlq.django.backend import _STATUS
from sqlq.errors import ConfigurationError
from sqlq.model.job import State
from sqlq.testing import assert_enqueued, assert_not_enqueued, drain, inline

BACKEND = "sqlq.django.SqlqBackend"


class TheBackend(SimpleTestCase):
    def test_the_backend_is_that_of_the_settings_and_has_every_optional_feature(self):
        self.assertIsInstance(task_backends["default"], SqlqBackend)
        for what in ("defer", "async_task", "get_result", "priority"):
            self.assertTrue(getattr(default_task_backend, f"supports_{what}"), what)
        self.assertEqual(app.tasks["shop.django_tasks.fail"].max_attempts, 1)

    def test_checks(self):
        self.assertEqual(list(default_task_backend.check()), [])
        wrong = {"default": {"BACKEND": BACKEND, "OPTIONS": {"nonsense": 1}}}
        with override_settings(TASKS=wrong):
            (error,) = checks.run_checks()
        self.assertEqual(error.id, "sqlq.E002")
        self.assertIn("not nonsense", error.msg)
        wrong["default"]["OPTIONS"] = {"max_attempts": 0}
        with override_settings(TASKS=wrong):
            (error,) = checks.run_checks()
        self.assertIn("max_attempts", error.msg)
        none_yet = mock.patch("sqlq.django.application._apps", [])
        with none_yet, self.modify_settings(INSTALLED_APPS={"remove": ["sqlq.django"]}):
            (error,) = default_task_backend.check()
        self.assertIn("add it to INSTALLED_APPS", error.msg)


class Enqueue(TestCase):
    def test_a_result_that_is_ready(self):
        for task in (django_tasks.echo, django_tasks.apay):
            with self.subTest(task):
                result = task.enqueue(1)
                self.assertEqual((result.status, result.is_finished), (TaskResultStatus.READY, False))
                self.assertIsNotNone(result.enqueued_at)
                times = (result.started_at, result.last_attempted_at, result.finished_at)
                self.assertEqual(times, (None, None, None))
                self.assertEqual((result.task, result.args, result.kwargs), (task, [1], {}))
                self.assertEqual((result.attempts, result.errors, result.worker_ids), (0, [], []))
                self.assertEqual(result.backend, "default")
                with self.assertRaisesMessage(ValueError, "Task has not finished yet"):
                    result.return_value

    async def test_the_asynchronous_methods_of_the_backend(self):
        result = await django_tasks.echo.aenqueue(1, two=3)
        self.assertEqual(result.status, TaskResultStatus.READY)
        found = await default_task_backend.aget_result(result.id)
        self.assertEqual((found.args, found.kwargs), ([1], {"two": 3}))
        await result.arefresh()
        with self.assertRaises(TaskResultDoesNotExist):
            await default_task_backend.aget_result("123456789")

    def test_get_result_sees_an_uncommitted_job(self):
        result = django_tasks.echo.enqueue("é", two=(3,), data=b"x")
        found = django_tasks.echo.get_result(result.id)
        self.assertEqual(found, result)
        self.assertEqual(found.kwargs, {"two": [3], "data": "x"})
        self.assertLess(abs(found.enqueued_at - timezone.now()), dt.timedelta(minutes=1))
        self.assertEqual(pickle.loads(pickle.dumps(found)), found)
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.READY)

    def test_missing_results(self):
        foreign = app.enqueue(tasks.pay.new(7))
        for id in ("123456789", "", "nonsense", "-1", "9" * 40, 123456789, str(foreign.id)):
            with self.subTest(id), self.assertRaises(TaskResultDoesNotExist):
                default_task_backend.get_result(id)
        with self.assertRaisesMessage(TaskResultMismatch, "shop.django_tasks.echo"):
            django_tasks.pay.get_result(django_tasks.echo.enqueue().id)

    def test_priority_queue_and_time(self):
        moment = timezone.now() + dt.timedelta(days=1)
        task = django_tasks.echo.using(priority=7, queue_name="mail", run_after=moment)
        found = default_task_backend.get_result(task.enqueue().id)
        self.assertEqual((found.task.priority, found.task.queue_name), (7, "mail"))
        self.assertLess(abs(found.task.run_after - moment), dt.timedelta(milliseconds=1))
        self.assertEqual(found.status, TaskResultStatus.READY)
        job = app.jobs.get(int(found.id))
        self.assertEqual((job.state, job.priority, job.queue), ("scheduled", 7, "mail"))
        self.assertEqual(app.jobs.get(int(django_tasks.aabout_itself.enqueue().id)).queue, "mail")
        found = app.jobs.get(int(django_tasks.echo.using(backend="once").enqueue().id))
        self.assertEqual(found.max_attempts, 1)

    def test_a_blocked_job_has_the_status_ready(self):
        result = django_tasks.bill.enqueue("t1")
        self.assertEqual(app.jobs.get(int(result.id)).state, "blocked")
        for found in (result, default_task_backend.get_result(result.id)):
            self.assertEqual((found.status, found.attempts), (TaskResultStatus.READY, 0))
            self.assertIsNone(found.task.run_after)
        self.assertEqual(set(_STATUS), set(State), "all there is has a status")
        moment = timezone.now() + dt.timedelta(days=1)
        later = django_tasks.bill.using(run_after=moment).enqueue("t1")
        self.assertEqual(later.status, TaskResultStatus.READY)
        self.assertLess(abs(later.task.run_after - moment), dt.timedelta(milliseconds=1))

    def test_the_backend_refuses_bad_arguments_and_options(self):
        before = count()
        naive = dt.datetime(2030, 1, 1)  # noqa: DTZ001
        for task, args, options, kind, said in (
            (django_tasks.echo, [naive], {}, TypeError, "Unsupported type"),
            (django_tasks.pay, [], {}, TypeError, "missing a required argument: 'order_id'"),
            (django_tasks.echo, ["\0"], {}, InvalidTask, "NUL"),
            (django_tasks.echo, [], {"run_after": naive}, InvalidTask, "must be an aware datetime."),
            (django_tasks.echo, [], {"priority": 101}, InvalidTask, "priority must be a whole number"),
            (django_tasks.echo, [], {"queue_name": "a,b"}, InvalidTask, "comma"),
        ):
            with self.assertRaisesMessage(kind, said):
                task.using(**options).enqueue(*args)
        self.assertEqual(count(), before)

    def test_signals_and_logs(self):
        heard = []
        receiver = lambda sender, task_result, **kwargs: heard.append((sender, task_result))  # noqa: E731
        task_enqueued.connect(receiver)
        self.addCleanup(task_enqueued.disconnect, receiver)
        with self.assertLogs("django.tasks", level="DEBUG") as logs:
            result = django_tasks.echo.enqueue()
        self.assertEqual(heard, [(SqlqBackend, result)])
        self.assertEqual(len(logs.output), 1)
        self.assertIn("enqueued", logs.output[0])
        self.assertIn(result.id, logs.output[0])

    def test_assert_enqueued_takes_tasks_of_django(self):
        with self.assertRaisesMessage(AssertionError, "of this task there is:\n  nothing"):
            assert_enqueued(django_tasks.pay, session=connection)
        django_tasks.pay.enqueue(7)
        for given in ({"args": [7]}, {"kwargs": {"order_id": 7}}):
            assert_enqueued(django_tasks.pay, **given, session=connection)
        assert_not_enqueued(django_tasks.pay, args=[8], session=connection)
        with self.assertRaisesMessage(AssertionError, "enqueued, but should not be"):
            assert_not_enqueued(django_tasks.pay.using(priority=3), session=connection)
        for wrong in (Order, django_tasks.pay.func, None, 7):
            for look in (assert_enqueued, assert_not_enqueued):
                with self.assertRaisesMessage(ConfigurationError, "give the task itself, or its name"):
                    look(wrong, session=connection)


class WithoutARow(TransactionTestCase):
    """Jobs that run in this process."""

    def look_at(self, result):
        self.assertEqual((result.status, result.return_value), (TaskResultStatus.SUCCESSFUL, [3, {"b": 4}]))
        self.assertEqual((result.args, result.kwargs, result.attempts), ([3], {"b": 4}, 1))
        self.assertLessEqual(result.enqueued_at, result.started_at)
        self.assertLessEqual(result.started_at, result.finished_at)
        self.assertLess(abs(result.enqueued_at - timezone.now()), dt.timedelta(minutes=1))

    def eagerly(self):
        return mock.patch.object(app, "_eager", True)

    def test_inline_and_eagerly(self):
        for block in (inline(app), inline(app, at="commit"), self.eagerly()):
            with self.subTest(block), block:
                result = django_tasks.echo.enqueue(3, b=4)
                self.look_at(result)
                before = pickle.dumps(result)
                result.refresh()
                self.assertEqual(pickle.dumps(result), before)
                self.assertEqual(django_tasks.echo.get_result(result.id), result)
                about = django_tasks.about_itself.using(queue_name="mail").enqueue()
                self.assertEqual(about.return_value, [about.id, 1, "RUNNING", 0, []])
                self.assertEqual((about.task.queue_name, about.task.priority), ("mail", 0))
        self.assertEqual(count(), 0)

    def test_at_the_commit(self):
        for block in (inline(app, at="commit"), self.eagerly()):
            with self.subTest(block), block:
                with transaction.atomic():
                    result = django_tasks.echo.enqueue(3, b=4)
                    later = django_tasks.echo.using(run_after=timezone.now() + dt.timedelta(days=1)).enqueue()
                    for _ in range(2):
                        self.assertEqual((result.status, result.attempts), (TaskResultStatus.READY, 0))
                        result.refresh()
                    self.assertIsNotNone(later.task.run_after)
                result.refresh()
                self.look_at(result)


class Work(TransactionTestCase):
    @override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo")
    def test_naive_times_are_in_the_time_zone_of_the_settings(self):
        connection.close()  # a connection keeps the time zone that it was made with
        self.addCleanup(connection.close)
        moment = dt.datetime(2040, 1, 2, 3, 4)  # noqa: DTZ001
        found = default_task_backend.get_result(django_tasks.echo.using(run_after=moment).enqueue().id)
        self.assertEqual(found.task.run_after, moment)
        self.assertTrue(timezone.is_naive(found.enqueued_at))
        self.assertLess(abs(found.enqueued_at - timezone.now()), dt.timedelta(minutes=1))

    @needs_a_file
    def test_success(self):
        order = Order.objects.create()
        for task in (django_tasks.pay, django_tasks.apay):
            with self.subTest(task):
                result = task.enqueue(order.id)
                self.assertEqual(drain(app).finished, 1)
                result.refresh()
                self.assertEqual((result.status, result.is_finished), (TaskResultStatus.SUCCESSFUL, True))
                self.assertEqual(result.return_value, order.id)
                self.assertGreaterEqual(result.started_at, result.enqueued_at)
                self.assertEqual(result.started_at, result.last_attempted_at)
                self.assertGreaterEqual(result.finished_at, result.started_at)
                self.assertEqual((result.attempts, len(set(result.worker_ids)), result.errors), (1, 1, []))
                self.assertEqual(task.get_result(result.id).task, task)

    @needs_a_file
    def test_failure(self):
        for task, args, kind, text in (
            (django_tasks.fail, ["no such order"], ValueError, "ValueError: no such order\n"),
            (django_tasks.exit_at_once, [], SystemExit, "SystemExit: this task has left\n"),
        ):
            with self.subTest(task), self.assertLogs("django.tasks", level="ERROR") as logs:
                result = task.enqueue(*args)
                self.assertEqual(drain(app).failed, 1)
                self.assertEqual(len(logs.output), 1)
                self.assertIn(text.strip(), logs.output[0])
                result.refresh()
                self.assertEqual(result.status, TaskResultStatus.FAILED)
                with self.assertRaisesMessage(ValueError, "Task failed"):
                    result.return_value
                (error,) = result.errors
                self.assertIs(error.exception_class, kind)
                self.assertTrue(error.traceback.startswith("Traceback (most recent call last)"))
                self.assertTrue(error.traceback.endswith(text), error.traceback)
                self.assertGreaterEqual(result.finished_at, result.started_at)

    @needs_a_file
    def test_attempts(self):
        result = django_tasks.about_itself.enqueue(fail_until=3)
        while drain(app).retried:
            result.refresh()
            if result.errors:
                self.assertIn(result.status, (TaskResultStatus.READY, TaskResultStatus.SUCCESSFUL))
        result.refresh()
        self.assertEqual(result.return_value, [result.id, 3, "RUNNING", 2, []])
        self.assertEqual((result.attempts, result.worker_ids[:2]), (3, ["unknown", "unknown"]))
        self.assertEqual([error.exception_class for error in result.errors], [LookupError, LookupError])
        self.assertEqual(result.errors[0].traceback, "LookupError: attempt 1\n")
        self.assertGreaterEqual(result.last_attempted_at, result.started_at)

    @needs_a_file
    def test_a_result_that_is_not_json_fails_without_another_attempt(self):
        result = django_tasks.useless.enqueue()
        with self.assertLogs("django.tasks", level="ERROR"):
            self.assertEqual(drain(app).failed, 1)
        result.refresh()
        self.assertEqual((result.status, result.attempts), (TaskResultStatus.FAILED, 1))
        self.assertIs(result.errors[0].exception_class, TypeError)
        self.assertIn("Unsupported type", result.errors[0].traceback)

    @needs_a_file
    def test_a_cancelled_job(self):
        result = django_tasks.echo.enqueue()
        app.jobs.cancel([int(result.id)])
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.FAILED)
        self.assertTrue(issubclass(result.errors[0].exception_class, Exception))

    @needs_a_file
    def test_signals(self):
        heard = []

        def receive(name, sender, task_result, **kwargs):
            error = sys.exc_info()[1]
            heard.append((name, sender, task_result.id, task_result.status, error and str(error)))
            with connection.cursor() as cursor:  # receivers may use the ORM
                cursor.execute("SELECT 1")

        def broken(**kwargs):
            raise LookupError("a receiver of a test's")

        for name, signal in (("started", task_started), ("finished", task_finished)):
            for receiver in (partial(receive, name), broken):
                signal.connect(receiver, weak=False, dispatch_uid=(name, receiver))
                self.addCleanup(signal.disconnect, dispatch_uid=(name, receiver))
        good, bad = django_tasks.echo.enqueue(), django_tasks.fail.enqueue("no")
        again = django_tasks.about_itself.enqueue(fail_until=2)
        with self.assertLogs("django.dispatch", level="ERROR"):
            while drain(app).retried:
                pass
        of = {
            id: [(n, str(status), error) for n, sender, found, status, error in heard if found == id]
            for id in (good.id, bad.id, again.id)
        }
        self.assertEqual({sender for _, sender, *_ in heard}, {SqlqBackend})
        self.assertEqual(of[good.id], [("started", "RUNNING", None), ("finished", "SUCCESSFUL", None)])
        self.assertEqual(of[bad.id], [("started", "RUNNING", None), ("finished", "FAILED", "no")])
        self.assertEqual([n for n, *_ in of[again.id]], ["started", "started", "finished"])
