"""Jobs, schedules, queues and workers in Django's admin."""

import re
from contextlib import ExitStack
from html import unescape
from unittest import mock

from django.contrib.auth.models import Permission, User
from django.db import connections, transaction
from django.test import TransactionTestCase
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import sqlq
from shop.tasks import fail, pay, remind
from sqlq.admin.verbs import VERBS, on_jobs, verb
from sqlq.django import app
from sqlq.django.models import Job, Queue, Schedule, Worker
from sqlq.testing import drain

MODELS = (Job, Schedule, Queue, Worker)


def address(model, page="changelist", *args):
    return reverse(f"admin:sqlq_{model._meta.model_name}_{page}", args=args)


class InTheAdmin(TransactionTestCase):
    databases = "__all__"

    def log_in(self, *permissions, **more):
        user = User.objects.create_user("ada", password="p", is_staff=True, **more)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        self.client.force_login(user)

    def page(self, url, **query):
        answer = self.client.get(url, query)
        self.assertEqual(answer.status_code, 200, answer.content)
        return unescape(answer.content.decode())

    def ids(self, model=Job, **query):
        page = self.page(address(model), **query)
        return [int(id) for id in re.findall(r'name="_selected_action" value="(\d+)"', page)]

    def act(self, model, verb, *keys, **more):
        """Choose an action of the list, and return the message of the next page."""
        form = {"action": verb, "_selected_action": keys, "index": 0, **more}
        answer = self.client.post(address(model), form, follow=True)
        self.assertEqual(answer.status_code, 200)
        said = re.findall(r'<li class="(?:success|error|warning)">(.*?)</li>', answer.content.decode())
        return unescape(" ".join(said)) or answer.content.decode()

    def actions(self, model):
        form = re.search(r'<select name="action".*?</select>', self.page(address(model)), re.DOTALL)
        return re.findall(r'<option value="([\w-]+)"', form[0]) if form else []


class Looking(InTheAdmin):
    def test_jobs_are_filtered_and_found(self):
        self.log_in(is_superuser=True)
        one = app.enqueue(pay.new(1).set(label="red", unique_key="k1")).id
        two = app.enqueue(remind.new("x").set(label="k1")).id
        app.enqueue(fail.new())
        drain(app, queues=["default"])
        self.assertEqual(self.ids(queue="mail"), [one])
        self.assertEqual(self.ids(task="shop.tasks.remind"), [two])
        self.assertEqual(self.ids(state="available"), [one])
        self.assertEqual(self.ids(state="available", task="shop.tasks.remind"), [])
        self.assertEqual(self.ids(q="red"), [one])
        self.assertEqual(self.ids(q="k1"), [two, one])
        self.assertEqual(self.ids(q=str(two)), [two])
        self.assertEqual(self.ids(q=str(two), state="available"), [])
        self.assertEqual(self.ids(q="nothing"), [])
        self.assertEqual(self.ids(queue="no such"), [])
        page = self.page(address(Job))
        self.assertIn('href="?queue=mail"', page)
        self.assertIn('href="?task=shop.tasks.apay"', page)
        self.assertEqual(self.ids(state="failed"), [two + 1])
        self.assertIn("is 'nonsense': it is one of blocked", self.page(address(Job), state="nonsense"))
        self.assertIn("id is 'x'", self.act(Job, "retry", "x"))

    def test_lists_have_pages_up_to_a_bound(self):
        self.log_in("view_job")
        ids = [job.id for job in app.enqueue_many([pay.new(i) for i in range(120)])][::-1]
        with mock.patch("sqlq.django.admin.LIST_LIMIT", 110):
            pages = [re.findall(r"/job/(\d+)/change/", self.page(address(Job), p=p)) for p in (1, 2, 3)]
            self.assertEqual([int(id) for page in pages for id in page], ids[:110])
            self.assertIn("110 jobs", self.page(address(Job)))
            self.assertEqual(self.client.get(address(Job), {"p": 4}).status_code, 302, "to the first one")

    def test_no_list_is_counted_or_read_by_the_orm(self):
        self.log_in(is_superuser=True)
        app.enqueue(pay.new(1))
        for model in MODELS:
            with ExitStack() as stack:
                seen = [stack.enter_context(CaptureQueriesContext(each)) for each in connections.all()]
                self.page(address(model))
                said = [each["sql"] for queries in seen for each in queries]
            found = [each for each in said if re.search(r"[\"`](sqlq_|\w*jobs[\"`]|queue_stats)", each)]
            self.assertEqual(found, [])
            self.assertEqual(list(model.objects.all()), [])

    def test_a_job_is_shown_without_its_secrets_and_cannot_be_written(self):
        self.log_in(is_superuser=True)
        id = app.enqueue(remind.new("<b>x</b>", password="s3cr3t").set(headers={"tenant": "t7"})).id
        page = self.client.get(address(Job, "change", id)).content.decode()
        self.assertIn("&lt;b&gt;x&lt;/b&gt;", page)
        self.assertIn("t7", page)
        self.assertNotIn("s3cr3t", page)
        self.assertIn("no worker", page, "why it does not run")
        self.assertNotRegex(page, r'name="_save"|deletelink')
        self.assertEqual(self.client.post(address(Job, "change", id), {"task": "x"}).status_code, 403)
        for nothing in ("0", "99", "x", "99999999999999999999"):
            self.assertEqual(self.client.get(address(Job, "change", nothing)).status_code, 302, nothing)
        self.assertEqual(self.client.get(address(Job, "add")).status_code, 403)
        self.assertEqual(self.client.post(address(Job, "delete", id), {"post": "yes"}).status_code, 403)

    def test_error_and_reason_come_first(self):
        self.log_in(is_superuser=True)
        failed = app.enqueue(fail.new()).id
        drain(app)
        app.enqueue(pay.new(7).set(limit=sqlq.Limit("bank", running=1)))
        blocked = app.enqueue(pay.new(7).set(limit=sqlq.Limit("bank", running=1))).id
        page = self.page(address(Job))
        columns = re.findall(r'class="field-(\w+)[^>]*>', page)[:4]
        self.assertEqual(columns, ["id", "state", "note", "task"])
        self.assertIn('field-note">LookupError: no such order<', page)
        self.assertIn('field-note">it waits for its limit bank<', page)
        for id in (failed, blocked):
            page = self.page(address(Job, "change", id))
            fields = re.findall(r"<label>(\w+):</label>", page)
            self.assertEqual(fields[:3], ["Error", "Why", "Id"])
        page = self.page(address(Job, "change", failed))
        self.assertIn('raise LookupError("no such order")', page)
        self.assertRegex(page, r"<pre>Traceback[^<]*\n  File")

    def test_schedules_queues_and_workers_are_listed(self):
        self.log_in(is_superuser=True)
        app.schedules.add("nightly/ä", pay.new(7), cron="0 3 * * *")
        self.addCleanup(app.schedules.remove, "nightly/ä")
        app.enqueue(pay.new(1))
        self.assertIn("0 3 * * *", self.page(address(Schedule)))
        from django.contrib.admin.utils import quote

        self.assertIn("shop.tasks.pay", self.page(address(Schedule, "change", quote("nightly/ä"))))
        page = self.page(address(Queue))
        self.assertRegex(page, r'field-queue"><a href="/admin/sqlq/queue/mail/change/[^"]*">mail<')
        self.assertRegex(page, r'field-available">1<')
        self.assertIn("mail", self.page(address(Queue, "change", "mail")))
        self.assertIn("0 workers", self.page(address(Worker)))

    def test_a_page_reports_a_query_that_timed_out(self):
        self.log_in(is_superuser=True)
        id = app.enqueue(pay.new(7)).id
        jobs = connections[app.configuration.database]
        if jobs.vendor != "postgresql":
            return  # there no lock keeps from reading
        with transaction.atomic(using=jobs.alias), jobs.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {app.database.schema}.jobs IN ACCESS EXCLUSIVE MODE")
            for url in (address(Queue), address(Job, "change", id)):
                page = self.client.get(url, follow=True).content.decode()
                self.assertIn("Too slow to count, or not to be read: canceling statement due to", page)
        self.assertEqual(self.client.get(address(Job, "change", id)).status_code, 200)


class Acting(InTheAdmin):
    def failed(self, number=2):
        ids = [app.enqueue(fail.new()).id for _ in range(number)]
        drain(app)
        return ids

    def state(self, id):
        return str(app.jobs.get(id).state)

    def test_permissions_decide_who_sees_and_who_acts(self):
        (id,) = self.failed(1)
        for permissions, jobs, actions in (
            (["view_job"], 200, []),
            (["change_job"], 200, ["retry", "cancel", "reschedule", "replay"]),
            (["view_job", "delete_job"], 200, []),
            (["change_schedule"], 403, []),
        ):
            with self.subTest(permissions=permissions):
                User.objects.all().delete()
                self.log_in(*permissions)
                self.assertEqual(self.client.get(address(Job)).status_code, jobs)
                if jobs == 200:
                    self.assertEqual(self.actions(Job), actions)
                for words in ("retry", "delete", "cancel") if not actions else ():
                    self.client.post(address(Job), {"action": words, "_selected_action": [id], "index": 0})
                self.assertEqual(self.state(id), "failed")

    def test_a_new_verb_is_an_action(self):
        done = []

        @verb("touch", states=("failed",), button="Touch")
        def touch(app, ids, **options):
            done.append(ids)
            return on_jobs("touched", ids, ids, options)

        self.addCleanup(VERBS.pop, "touch")
        (id,) = self.failed(1)
        self.log_in("change_job")
        self.assertEqual(self.actions(Job)[-1], "touch")
        self.assertIn(f"Touched 1 job: {id}.", self.act(Job, "touch", id))
        self.assertEqual(done, [[id]])

    def test_all_that_match_are_acted_on_when_all_are_chosen(self):
        ids = self.failed(3)
        other = app.enqueue(fail.new().set(label="other")).id
        drain(app)
        self.log_in("change_job")
        form = {"action": "retry", "_selected_action": [other], "index": 0, "select_across": "1"}
        self.client.post(f"{address(Job)}?q=other", form)
        self.assertEqual([self.state(id) for id in [*ids, other]], ["failed"] * 3 + ["available"])
        self.assertIn("Retried 3 jobs", self.act(Job, "retry", ids[0], select_across="1"))

    def test_the_verbs_are_actions_and_are_recorded_as_those_of_the_user(self):
        one, two = self.failed()
        app.schedules.add("nightly", pay.new(7), cron="0 3 * * *")
        self.addCleanup(app.schedules.remove, "nightly")
        self.addCleanup(app.queues.resume, "mail")
        self.log_in("change_job", "change_schedule", "change_queue")
        done = (
            (Job, "retry", one, "Retried 1 job"),
            (Job, "reschedule", one, "Rescheduled 1 job"),
            (Job, "cancel", one, "Cancelled 1 job"),
            (Job, "replay", two, "Replayed 1 job"),
            (Schedule, "schedules pause", "nightly", "Paused nightly."),
            (Schedule, "schedules resume", "nightly", "Resumed nightly."),
            (Schedule, "schedules run", "nightly", "Enqueued job "),
            (Queue, "queues pause", "mail", "Paused mail"),
            (Queue, "queues resume", "mail", "Resumed mail."),
        )
        for model, words, key, said in done:
            with self.subTest(words):
                self.assertIn(said, self.act(model, words, key))
        rows = app.audit.list(actor="ada")
        self.assertEqual([row.action for row in reversed(rows)], [words for _, words, *_ in done])
        self.assertEqual((self.state(one), self.state(two)), ("cancelled", "failed"))
        self.assertIn("nowhere", self.act(Schedule, "schedules pause", "nowhere", "nightly"))
        self.assertEqual(app.schedules.get("nightly").state, "paused", "the others are done")
