"""Jobs in Django's transactions, and what becomes of them in Django's tests."""

from functools import wraps

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase
from django.utils import translation
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy

import sqlq
from shop.models import Order
from shop.tasks import apay, fail, pay, pay_in_turn, remind
from sqlq.django import app
from sqlq.testing import assert_enqueued, assert_not_enqueued, drain, inline


def in_memory():
    return connection.vendor == "sqlite" and connection.is_in_memory_db()


def needs_a_file(test):
    @wraps(test)
    def run(self):
        if in_memory():
            self.skipTest("a database in memory is seen by Django's connection alone")
        test(self)

    return run


def count(table="jobs"):
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table}")
        return cursor.fetchone()[0]


class InATestsTransaction(TestCase):
    @classmethod
    def setUpTestData(cls):
        app.enqueue(pay.new(0))

    def test_a_job_of_one_test(self):
        app.enqueue(pay.new(1))
        self.assertEqual(count(), 2)

    def test_jobs_of_one_test_are_not_there_in_the_next(self):
        app.enqueue_many([pay.new(2), pay.new(3)])
        self.assertEqual(count(), 3)

    def test_the_parts_of_the_app_see_and_change_what_its_transaction_does(self):
        new = pay.new(7).set(batch="g", unique_key="k", delay="1h")
        job, other = app.enqueue(new), app.enqueue(fail.new().set(delay="1h"))
        self.assertEqual([each.id for each in app.jobs.list(batch="g")], [job.id])
        found = app.jobs.get_by_key("mail", "k")
        self.assertEqual((found.state, found.created_at.tzinfo is not None), ("scheduled", True))
        self.assertEqual([each.id for each in app.jobs.of_batch("g")], [job.id])
        self.assertEqual(app.jobs.counts(batch="g"), {"scheduled": 1})
        self.assertEqual(app.jobs.change([job], queue="bulk"), {job.id: "changed"})
        self.assertEqual(app.jobs.get(job.id).queue, "bulk")
        self.assertEqual(app.jobs.reschedule([job]), [job.id])
        self.assertEqual(app.jobs.cancel([job, 4711]), {job.id: "cancelled", 4711: "unknown"})
        self.assertEqual(app.jobs.get(job.id).reason, "cancelled on request")
        self.assertTrue(app.jobs.replay(job))
        self.assertEqual(app.jobs.delete([job]), [job.id])
        self.assertIn("it is due", " ".join(app.jobs.why(other)))
        self.assertEqual(app.queues.pause("mail"), ["mail"])
        self.assertTrue(next(each for each in app.queues.list() if each.queue == "mail").paused)
        self.assertEqual(app.queues.resume("mail"), ["mail"])
        app.schedules.add("hourly", pay.new(1), every="1h")
        self.assertEqual(app.schedules.get("hourly").state, "active")
        self.assertEqual(app.limits.set("stripe", running=2).running, 0)
        flow = app.enqueue(sqlq.chain(pay.new(1), fail.new()))
        self.assertEqual(set(app.flows.cancel(flow).values()), {"cancelled"})
        self.assertEqual(app.flows.get(flow).counts["cancelled"], 2)
        self.assertEqual((app.workers.list(), app.audit.list()), ([], []))

    def test_a_rollback_undoes_what_the_parts_of_the_app_do(self):
        job = app.enqueue(pay.new(1))
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            app.jobs.change([job], priority=7)
            app.jobs.cancel([job])
            app.queues.pause("mail")
            1 / 0
        self.assertEqual((app.jobs.get(job.id).state, app.jobs.get(job.id).priority), ("available", 0))
        self.assertNotIn("mail", app.queues.pauses())

    async def test_the_parts_of_the_app_join_in_asynchronous_code(self):
        job = await app.aenqueue(pay.new(1))
        self.assertEqual((await app.jobs.acancel([job.id])), {job.id: "cancelled"})
        self.assertEqual((await app.jobs.aget(job.id)).state, "cancelled")

    def test_a_view(self):
        self.assertEqual(app.jobs.get(self.client.get("/order").json()["job"]).task, "shop.tasks.pay")
        with self.assertRaises(RuntimeError):
            self.client.get("/order?fail")
        self.assertEqual((count(), Order.objects.count()), (2, 1))

    async def test_asynchronous_views(self):
        answer = await self.async_client.get("/aorder")
        self.assertEqual(Order.objects.filter(id=answer.json()["order"]).query is not None, True)
        (job,) = await app.aenqueue_many([apay.new(9)])
        self.assertEqual(job.id, answer.json()["job"] + 1)


class EagerlyAtTheCommit(TransactionTestCase):
    """As `eager` of the settings has it."""

    databases = "__all__"

    def enqueue(self):
        return app.enqueue(pay.new(Order.objects.create().id), eager=True)

    def paid(self):
        return Order.objects.filter(paid=True).count()

    def test_an_eager_job_runs_after_the_commit_or_at_once_without_a_transaction(self):
        with transaction.atomic():
            job = self.enqueue()
            order = Order.objects.get()
            self.assertEqual((job.state, app.jobs.get(job.id).args), ("available", [order.id]))
            with transaction.atomic():
                self.enqueue()
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                self.enqueue()
                1 / 0
            self.assertEqual(self.paid(), 0)
        self.assertEqual((self.paid(), count()), (2, 0))
        self.assertEqual(app.jobs.get(job.id).state, "finished")
        self.assertEqual((app.result(job), app.result(job.id)), (order.id, order.id))
        self.assertEqual((self.enqueue().state, self.paid()), ("finished", 3))

    def test_an_error_leaves_the_commit_and_other_hooks_alone(self):
        ran = []
        with self.assertLogs("sqlq", "ERROR") as logs, transaction.atomic():
            app.enqueue(fail.new(), eager=True)
            transaction.on_commit(lambda: ran.append(1))
        self.assertEqual((ran, len(logs.records)), ([1], 1))

    def test_a_job_enqueues_when_its_own_transaction_commits(self):
        with transaction.atomic():
            app.enqueue(pay_in_turn.new(Order.objects.create().id), eager=True)
        self.assertEqual(count(), 1, "by its own call it is not eager")

    async def test_asynchronous_callers(self):
        order = await Order.objects.acreate()
        job = await app.aenqueue(apay.new(order.id), eager=True)
        self.assertEqual(job.state, "finished")

        @transaction.atomic
        def place():
            app.enqueue(apay.new(Order.objects.create().id), eager=True)
            self.assertEqual(self.paid(), 1)

        await sync_to_async(place)()
        self.assertEqual(await sync_to_async(self.paid)(), 2)


class EagerlyInATestsTransaction(TestCase):
    def test_the_hooks_of_the_commit_are_captured(self):
        with self.captureOnCommitCallbacks() as callbacks:
            app.enqueue(pay.new(Order.objects.create().id), eager=True)
        self.assertEqual(len(callbacks), 1)
        with self.captureOnCommitCallbacks(execute=True):
            app.enqueue(pay.new(Order.objects.create().id), eager=True)
        self.assertEqual(Order.objects.filter(paid=True).count(), 1)


class LazyTexts(TestCase):
    def test_lazy_texts_are_stored_as_their_texts(self):
        job = remind.new(gettext_lazy("Yes"), [gettext_lazy("No")], name={"a": gettext_lazy("Yes")})
        self.assertEqual((job.args, job.kwargs), (["Yes", ["No"]], {"name": {"a": "Yes"}}))
        with translation.override("de"):
            new = remind.new(gettext_lazy("Yes")).set(headers={"a": gettext_lazy("No")})
            found = app.jobs.get(app.enqueue(new).id)
        self.assertEqual((found.args, found.kwargs, found.headers), (["Ja"], {}, {"a": "Nein"}))
        named = app.named("elsewhere").new(gettext_lazy("Yes"), [gettext_lazy("No")])
        self.assertEqual(named.args, ["Yes", ["No"]])
        assert_not_enqueued(remind, args=["Yes"], session=connection)
        assert_enqueued(remind, args=["Ja"], session=connection)

    def test_handlers_may_return_lazy_texts(self):
        with inline(app):
            job = app.enqueue(remind.new(gettext_lazy("Yes")))
            self.assertEqual(app.result(job), [True, "Yes", {}, "Yes"])

    def test_a_lazy_text_with_a_nul_is_refused(self):
        with self.assertRaisesMessage(sqlq.errors.ArgumentsError, "holds a NUL"):
            remind.new(format_lazy("a\0{}", "b"))


class InTransactionsOfTheirOwn(TransactionTestCase):
    def test_nothing_is_left_of_other_tests(self):
        self.assertEqual((count(), count("finished_jobs"), count("failed_jobs")), (0, 0, 0))

    @needs_a_file
    def test_a_step_behind_a_cancelled_one_is_unblocked_after_the_commit(self):
        flow = app.enqueue(sqlq.chain(pay.new(1), pay.new(2)))
        with transaction.atomic():
            self.assertEqual(app.jobs.cancel([flow.jobs[0]]), {flow.jobs[0].id: "cancelled"})
            self.assertEqual(app.jobs.get(flow.jobs[1].id).state, "blocked")
        self.assertEqual(app.jobs.get(flow.jobs[1].id).state, "cancelled")

    @needs_a_file
    def test_drain_runs_the_jobs(self):
        orders = [Order.objects.create() for _ in range(3)]
        for task, order in zip((pay, apay, pay_in_turn), orders, strict=True):
            app.enqueue(task.new(order.id))
        self.assertEqual(drain(app), sqlq.testing.Counts(finished=4))
        self.assertEqual(Order.objects.filter(paid=True).count(), 3)


class WhereTheAppIs(SimpleTestCase):
    databases = "__all__"

    def test_the_app_is_on_the_tests_database(self):
        place, name = str(app.url.database), str(connection.settings_dict["NAME"])
        self.assertEqual(place, name.partition("?")[0])
        self.assertIn("memory" if in_memory() else "test_", place)
