"""The dashboard as a view of Django's."""

import re
from html import unescape

from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission, User
from django.test import AsyncClient, Client, TransactionTestCase, override_settings
from django.urls import reverse

from shop.tasks import fail
from sqlq.admin.verbs import VERBS
from sqlq.django import app
from sqlq.django.web import _site
from sqlq.testing import drain

ROOT = "/ops/sqlq/"
FROM_HERE = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}


def somebody(*permissions, staff=True, **more):
    user = User.objects.create_user("ada", password="p", is_staff=staff, **more)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


def form_of(page, verb):
    """The address and the fields of a form, as a browser sends them."""
    action, body = re.search(rf'action="([^"]+/act/{verb})">(.*?)</form>', page, re.DOTALL).groups()
    fields = re.findall(r'name="(\w+)" value="([^"]*)"', body)
    return action, {name: unescape(value) for name, value in fields}


class OfStaff(TransactionTestCase):
    databases = "__all__"

    def setUp(self):
        self.job = app.enqueue(fail.new())
        drain(app)
        self.client = Client(enforce_csrf_checks=True)

    def log_in(self, *permissions, **more):
        self.client.force_login(somebody(*permissions, **more))

    def page(self, path=""):
        answer = self.client.get(f"{ROOT}{path}")
        self.assertEqual(answer.status_code, 200, answer.content)
        return answer.content.decode()

    def test_an_anonymous_user_is_sent_to_the_login(self):
        answer = self.client.get(f"{ROOT}jobs?queue=mail")
        self.assertRedirects(answer, f"/admin/login/?next={ROOT}jobs%3Fqueue%3Dmail")
        answer = self.client.post(f"{ROOT}act/retry", {"id": self.job.id}, headers=FROM_HERE)
        self.assertRedirects(answer, f"/admin/login/?next={ROOT}")
        self.assertEqual(self.client.get(f"{ROOT}static/style.css").status_code, 302)
        self.check_that_all_is_refused()

    def test_users_without_permissions_are_refused(self):
        for permissions, more in (
            ([], {}),
            (["view_schedule"], {}),
            (["delete_job"], {"staff": False}),
            (["view_job"], {"is_active": False, "staff": True}),
        ):
            with self.subTest(permissions=permissions, **more):
                User.objects.all().delete()
                self.log_in(*permissions, **more)
                self.check_that_all_is_refused(seen="schedule" if "view_schedule" in permissions else None)

    def check_that_all_is_refused(self, seen=None):
        """Send each request that the dashboard, and the admin's pages of jobs, know."""
        urls = _site()._map.bind("localhost", script_name=ROOT)
        paths = [
            urls.build(rule.endpoint, {name: verb if name == "verb" else 1 for name in rule.arguments})
            for rule in _site()._map.iter_rules()
            for verb in (VERBS if "verb" in rule.arguments else [""])
        ]
        for model in {"job", "schedule", "queue", "worker"} - {seen}:
            paths += [f"/admin/sqlq/{model}/{page}" for page in ("", f"{self.job.id}/change/", "add/")]
        self.assertGreater(len(paths), 50)
        form = {"id": self.job.id, "action": "retry", "_selected_action": self.job.id, "index": 0}
        for path in paths:
            for answer in (self.client.get(path), self.client.post(path, form, headers=FROM_HERE)):
                self.assertIn(answer.status_code, (302, 403), path)
                self.assertNotIn("shop.tasks", answer.content.decode(), path)
        self.assertEqual(app.jobs.get(self.job.id).state, "failed")

    def test_permissions_are_roles(self):
        for permissions, superuser, role in (
            (["view_job"], False, "viewer"),
            (["change_job"], False, "operator"),
            (["delete_job"], False, "admin"),
            ([], True, "admin"),
        ):
            with self.subTest(role=role, permissions=permissions):
                User.objects.all().delete()
                self.log_in(*permissions, is_superuser=superuser)
                page = self.page(f"jobs/{self.job.id}")
                self.assertIn(f'title="role: {role}">ada<', page)
                self.assertEqual("/act/retry" in page, role != "viewer")
                self.assertEqual("/act/delete" in page, role == "admin")

    def test_a_form_acts_and_needs_no_token_of_djangos(self):
        self.log_in("change_job")
        action, fields = form_of(self.page(f"jobs/{self.job.id}?x=%C3%A4"), "retry")
        self.assertEqual(action, f"{ROOT}act/retry")
        answer = self.client.post(action, fields, headers=FROM_HERE)
        self.assertEqual(answer.status_code, 303)
        self.assertEqual(answer["Location"], f"{ROOT}jobs/{self.job.id}?x=%C3%A4")
        self.assertIn("retried 1 job", self.page(answer["Location"].removeprefix(ROOT)))
        self.assertNotIn("retried 1 job", self.page(), "which is said once")
        self.assertEqual(app.jobs.get(self.job.id).state, "available")

    def test_urls_and_cookies_stay_under_the_prefix(self):
        self.log_in("delete_job")
        answer = self.client.get(ROOT)
        links = re.findall(r'(?:href|src|action)="([^"#?][^"#]*)"', answer.content.decode())
        outside = [link for link in links if not link.startswith(ROOT)]
        self.assertEqual(outside, ["/admin/sqlq/", "/admin/logout/"])
        cookie = answer.cookies["sqlq_form"]
        self.assertEqual((cookie["path"], cookie["httponly"], cookie["samesite"]), (ROOT, True, "Strict"))
        self.assertEqual(answer["X-Frame-Options"], "DENY")
        self.assertIn("default-src 'none'", answer["Content-Security-Policy"])
        self.assertEqual(reverse("sqlq:dashboard", args=["jobs"]), f"{ROOT}jobs")
        self.assertRedirects(self.client.get(ROOT[:-1]), ROOT, 301)
        self.assertEqual(self.client.get(f"{ROOT}no/such").status_code, 404)

    def test_a_page_logs_out_and_leads_to_the_admin(self):
        self.log_in("view_job")
        page = self.page(f"jobs/{self.job.id}")
        self.assertEqual(self.client.get(re.search(r'href="([^"]+)">job', page)[1]).status_code, 200)
        field = 'action="/admin/logout/"><input type="hidden" name="csrfmiddlewaretoken" value="'
        token = {"csrfmiddlewaretoken": page.partition(field)[2].partition('"')[0]}
        self.assertEqual(self.client.post("/admin/logout/", token).status_code, 200)
        self.assertEqual(self.client.get(ROOT).status_code, 302)

    def test_the_site_is_behind_a_proxy(self):
        self.log_in("view_job")
        with override_settings(SECURE_PROXY_SSL_HEADER=("HTTP_X_PROTO", "https"), USE_X_FORWARDED_HOST=True):
            answer = self.client.get(ROOT, headers={"X-Proto": "https", "X-Forwarded-Host": "testserver"})
        self.assertTrue(answer.cookies["sqlq_form"]["secure"])
        with override_settings(FORCE_SCRIPT_NAME="/shop"):
            page = self.client.get(ROOT).content.decode()
        self.assertIn(f'href="/shop{ROOT}jobs"', page)

    def test_a_message_with_special_characters_arrives_unchanged(self):
        self.log_in("change_job")
        action, fields = form_of(self.page("queues"), "queues%20pause")
        del fields["all"]
        answer = self.client.post(action, {**fields, "name": 'ä "q"; x,y'}, headers=FROM_HERE)
        self.assertEqual(answer.status_code, 303)
        self.assertIn('paused ä "q"; x,y', unescape(self.page("queues")))
        app.queues.resume('ä "q"; x,y')


class OnALoop(TransactionTestCase):
    databases = "__all__"

    async def test_asgi(self):
        job = await app.aenqueue(fail.new())
        client = AsyncClient(enforce_csrf_checks=True)
        self.assertEqual((await client.get(ROOT)).status_code, 302)
        await client.aforce_login(await sync_to_async(somebody)("change_job"))
        answer = await client.get(f"{ROOT}jobs/{job.id}")
        self.assertEqual(answer.status_code, 200)
        action, fields = form_of(answer.content.decode(), "cancel")
        fields |= {"confirmed": "yes"}
        answer = await client.post(action, fields, headers=FROM_HERE)
        self.assertEqual((answer.status_code, answer["Location"]), (303, f"{ROOT}jobs/{job.id}"))
        self.assertEqual((await app.jobs.aget(job.id)).state, "cancelled")
