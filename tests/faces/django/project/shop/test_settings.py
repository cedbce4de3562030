"""The settings that are allowed, and the errors for those that are not."""

from pathlib import Path
from unittest import mock

import django
from django.core import checks
from django.db import connections
from django.test import SimpleTestCase, override_settings

from sqlq.config.urls import in_memory, masked
from sqlq.django.application import DjangoApp
from sqlq.django.configuration import url_of
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError
from sqlq.payload.encryption import Key, new_key

POSTGRESQL = "django.db.backends.postgresql"
SQLITE = "django.db.backends.sqlite3"
KEY = new_key()
IN_SQLQ = "SQLQ in the settings:"


def database(**given):
    """The alias "other" leads to this database meanwhile."""
    plain = {"NAME": "", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}, "TIME_ZONE": None}
    other = {**connections.settings["default"], **plain, **given}
    return mock.patch.dict(connections.settings, {"other": other})


def url(**given):
    with database(**given):
        return url_of("other")


def connects_with(**given):
    """Return the arguments that psycopg is called with."""
    made = url(ENGINE=POSTGRESQL, **given)
    args, parameters = made.get_dialect()().create_connect_args(made)
    assert not args
    return parameters


class Urls(SimpleTestCase):
    def test_postgresql(self):
        given = {"NAME": "shop", "USER": "me", "PASSWORD": "p w/@:", "HOST": "db.test", "PORT": "5433"}
        names = {"NAME": "dbname"}
        parameters = {names.get(name, name.lower()): value for name, value in given.items()}
        self.assertEqual(connects_with(**given), parameters)
        self.assertNotIn("p w", masked(url(ENGINE=POSTGRESQL, **given)))

    def test_options_reach_libpq_and_those_of_djangos_own_do_not(self):
        djangos = {"isolation_level": 2, "server_side_binding": True, "pool": False, "prepare_threshold": 5}
        options = {"sslmode": "verify-full", "connect_timeout": 3, "options": "-c search_path=shop"}
        found = connects_with(NAME="shop", OPTIONS={**options, **djangos, "assume_role": "the owner"})
        options |= {"connect_timeout": "3", "options": r"-c search_path=shop -c role=the\ owner"}
        self.assertEqual(found, {"dbname": "shop", **options})

    def test_sockets_services_and_several_hosts(self):
        self.assertEqual(connects_with(NAME="shop", HOST="/run/pg", PORT=5433)["host"], "/run/pg")
        several = connects_with(NAME="shop", HOST="a,b", PORT="5432,5433")
        self.assertEqual((several["host"], several["port"]), ("a,b", "5432,5433"))
        service = {"service": "shop", "passfile": ".pgpass"}
        self.assertEqual(connects_with(OPTIONS=service), service)

    def test_sqlite(self):
        self.assertEqual(url(ENGINE=SQLITE, NAME=Path("/srv/shop.db")).database, "/srv/shop.db")
        self.assertTrue(in_memory(url(ENGINE=SQLITE, NAME=":memory:")))
        self.assertTrue(in_memory(url(ENGINE=SQLITE, NAME="file:shop?mode=memory&cache=shared")))
        found = url(ENGINE=SQLITE, NAME="file:/srv/shop.db?mode=ro")
        args, _ = found.get_dialect()().create_connect_args(found)
        self.assertEqual(args, ["file:/srv/shop.db?mode=ro"])

    def test_other_databases(self):
        with self.assertRaisesMessage(UnsupportedDatabaseError, "DATABASES['other'] has the ENGINE"):
            url(ENGINE="django.db.backends.dummy")
        with self.assertRaisesMessage(ConfigurationError, "DATABASES['other'] cannot be used"):
            url(ENGINE=POSTGRESQL)


class Checks(SimpleTestCase):
    def found(self, **given):
        with override_settings(SQLQ=given):
            return [(each.id, each.msg) for each in checks.run_checks(tags=["sqlq"])]

    def test_right_settings_pass_the_checks(self):
        self.assertEqual(self.found(), [])
        modules = ["tasks", "emails"]
        self.assertEqual(self.found(database="default", retention="30d", task_modules=modules), [])

    def test_a_wrong_setting_is_named_in_one_line(self):
        for given, said in (
            (
                {"databse": "default"},
                "SQLQ in the settings has the key 'databse': it may have database, schema",
            ),
            ({"database": "jobs"}, "SQLQ[\"database\"] is 'jobs': it is a key of DATABASES"),
            ({"migrate_with_django": "no"}, "it is True or False"),
            ({"concurrency": 0}, f"{IN_SQLQ} concurrency is 0: it must be a whole number from 1 to 1,000"),
            ({"defaults": {"timeuot": "5m"}}, f"{IN_SQLQ} defaults has no option 'timeuot'; it has queue"),
            ({"keys": [KEY, "c2hvcnQ"]}, f"{IN_SQLQ} keys[1] is no key: a key is 32 random bytes"),
            ({"task_modules": "tasks"}, 'it is a list of names, as in ["tasks", "emails"]'),
        ):
            with self.subTest(given):
                ((id, message),) = self.found(**given)
                self.assertEqual(id, "sqlq.E001")
                self.assertIn(said, message)
                self.assertNotIn("\n", message)
                self.assertNotIn(KEY, message)
        with override_settings(SQLQ="default"):
            (error,) = checks.run_checks(tags=["sqlq"])
        self.assertIn("it is a dict", error.msg)

    def test_databases(self):
        with database(ENGINE="django.db.backends.dummy"):
            ((id, message),) = self.found(database="other")
            self.assertEqual(id, "sqlq.E001")
            self.assertIn("DATABASES['other'] has the ENGINE", message)
        with database(ENGINE=SQLITE, NAME="shop.db"):
            self.assertEqual([id for id, _ in self.found(database="other")], ["sqlq.W001"])
        with database(ENGINE=SQLITE, NAME="shop.db", OPTIONS={"transaction_mode": "immediate"}):
            self.assertEqual(self.found(database="other"), [])

    def test_options_are_those_of_the_app(self):
        given = {"defaults": {"max_attempts": 1, "timeout": "5m"}, "queues": {"mail": {"timeout": "30s"}}}
        more = {"database": "default", "service": "shop", "eager": True, "direct_calls": "refuse"}
        with override_settings(SQLQ={**given, **more}):
            app = DjangoApp()
        self.addCleanup(app.close)
        mail, other = (app.task(name=queue, queue=queue)(lambda: 7) for queue in ("mail", "other"))
        self.assertEqual((mail.timeout_ms, other.timeout_ms, other.max_attempts), (30_000, 300_000, 1))
        self.assertEqual((app._eager, app._direct_calls), (True, "refuse"))
        self.assertEqual(app._schedules.service, "shop")
        self.assertEqual(other(), 7, "which tests may call")

    def test_keys_of_the_settings_encrypt_and_are_not_shown(self):
        with override_settings(SQLQ={"keys": [KEY], "encryption": "encrypt", "plain": ["hooks"]}):
            app = DjangoApp()
        self.assertEqual(list(app.database.encryption.keys), [Key(KEY, "").id])
        self.assertEqual(app.database.encryption.how, "encrypt")
        self.assertFalse(app.database.encryption.refuses_plain("hooks"))
        self.assertNotIn(KEY, repr(app.configuration))
        app.close()


class TheBackend(SimpleTestCase):
    def test_older_releases_of_django_have_no_tasks(self):
        if django.VERSION >= (6,):
            self.skipTest("this one has")
        with self.assertRaisesMessage(ImportError, "needs django.tasks, which came with Django 6.0"):
            from sqlq.django import SqlqBackend  # noqa: F401
