"""The dashboard in a real browser: `sqlq web` and `sqlq work` as processes, and what a person does."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sqlq
from tests.faces.web import shop
from tests.kit import end, execute, failed, needs, wait_until
from tests.kit.browser import Browser, chromium

pytestmark = [
    pytest.mark.debian,
    needs("postgresql"),
    # Selenium's sockets are closed when its process ends
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).parents[3]
PAGES = ["", "jobs", "failures", "queues", "workers", "flows", "schedules", "limits", "audit"]


@contextmanager
def command(*words: str, database_url: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command of sqlq for as long as the block does."""
    line = [sys.executable, "-m", "sqlq", "-a", "tests.faces.web.shop:app", "-d", database_url, *words]
    with log.open("w") as out, subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=out, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Desk:
    """An operator at the dashboard, who has logged in by the URL."""

    def __init__(self, browser: Browser, base: str, app: sqlq.App) -> None:
        self.browser, self.base, self.app = browser, base, app

    def open(self, path: str = "") -> Browser:
        self.browser.open(f"{self.base}{path}")
        return self.browser


@pytest.fixture
def desk(window: Browser, app: sqlq.App, database_url: str, tmp_path: Path) -> Iterator[Desk]:
    log = tmp_path / "web.log"
    with command("web", "--port", "0", database_url=database_url, log=log):
        (link, *_) = wait_until(lambda: re.findall(r"http://\S+/\?token=\S+", log.read_text()))
        window.driver.delete_all_cookies()
        window.open(link)
        window.console()
        window.hosts()
        yield Desk(window, link.partition("?")[0], app)


def fill(app: sqlq.App) -> None:
    """Jobs in each state, with errors that are alike."""
    app.enqueue_many([shop.send_receipt.new(i) for i in range(6)])
    for i in range(3):
        end(app, failed(f"no mailbox for order {i}"), queue="mail")
    app.enqueue(shop.charge.new(7).set(delay="1h", label="tenant-7"))
    flow = sqlq.Flow("import")
    flow.add(shop.step.new(2), after=[flow.add(shop.step.new(1))])
    app.enqueue(flow)
    app.schedules.add("nightly", shop.export.new(3), sqlq.Schedule(cron="0 3 * * *"))
    app.limits.set("bank", running=2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_passes_the_accessibility_checks(desk: Desk, scheme: str) -> None:
    fill(desk.app)
    desk.browser.choose_scheme(scheme)
    faults: dict[str, list[str]] = {}
    for path in [*PAGES, f"jobs/{desk.app.jobs.list(state='failed')[0].id}", "flows/1"]:
        browser = desk.open(path)
        assert browser.find("h1").text
        faults[path] = browser.faults()
    assert {path: found for path, found in faults.items() if found} == {}
    assert desk.browser.console() == []
    assert desk.browser.hosts() == {desk.base.split("/")[2]}


def test_jobs_are_filtered_and_cancelled(desk: Desk) -> None:
    fill(desk.app)
    browser = desk.open("jobs")
    browser.find("input[name=label]").send_keys("tenant-7\n")
    browser.wait(lambda: "label=tenant-7" in browser.driver.current_url)
    browser.find("[data-all]").click()
    browser.press("Cancel…")
    browser.sees("1 job would be acted on")
    browser.press("Cancel")
    browser.sees("cancelled 1 job", ".said")
    assert "label=tenant-7" in browser.driver.current_url, "back where the form was sent from"


def test_buttons_for_jobs_stand_above_the_list_and_stick(desk: Desk) -> None:
    desk.app.enqueue_many([shop.send_receipt.new(i) for i in range(60)])
    browser = desk.open("jobs?queue=mail")
    buttons, bar = browser.find(".bulk .acts"), browser.find(".bulk")
    assert bar.location["y"] < browser.find("table.jobs").location["y"]
    box = browser.find("tbody input[name=id]")
    shown = [buttons.is_displayed()]
    for _ in range(2):
        box.click()
        shown.append(buttons.is_displayed())
    assert shown == [False, True, False], "as long as a job is chosen"
    browser.find("input[name=matching]").click()
    browser.driver.execute_script("scrollTo(0, document.body.scrollHeight)")
    edges: Any = browser.driver.execute_script(
        "return [document.querySelector('.top').getBoundingClientRect().bottom, "
        "document.querySelector('.bulk').getBoundingClientRect().top]"
    )
    assert abs(edges[0] - edges[1]) < 1, "the bar sticks below the header"
    browser.press("Cancel…")
    browser.sees("60 available jobs in queue mail would be acted on")


def test_the_line_of_an_action_moves_and_stops_it(desk: Desk) -> None:
    action = "('eve', 'retry', 'retry --all', 1200)"
    insert = f"INSERT INTO sqlq_audit (actor, action, target, number) VALUES {action}"
    execute(desk.app.database.engine, insert)
    browser = desk.open("failures")
    browser.sees("1,200 until now", "#actions")
    execute(desk.app.database.engine, "UPDATE sqlq_audit SET number = 2400, seen_at = statement_timestamp()")
    browser.sees("2,400 until now", "#actions")
    browser.press("Stop", within="#actions")
    browser.sees("stops after its batch", ".said")
    browser.sees("2,400 until now, stopping", "#actions")
    assert desk.app.audit.list()[-1].state == "stopping"


def test_progress_moves_and_a_running_job_is_cancelled(desk: Desk, database_url: str, tmp_path: Path) -> None:
    job = desk.app.enqueue(shop.export.new(600))
    with command("work", database_url=database_url, log=tmp_path / "work.log"):
        browser = desk.open(f"jobs/{job.id}")
        seen = float(browser.find("progress").get_attribute("value") or 0)
        browser.wait(lambda: float(browser.find("progress").get_attribute("value") or 0) > seen)
        browser.press("Cancel…")
        browser.press("Cancel")
        browser.sees("asked 1 running job", ".said")
        browser.wait(lambda: browser.find("#state").text == "cancelled")
    assert desk.app.jobs.get(job.id).reason == "an operator asked for it"


def test_a_page_shows_that_it_is_stale_while_the_server_is_away(desk: Desk, window: Browser) -> None:
    fill(desk.app)
    browser = desk.open("queues")
    browser.driver.set_network_conditions(offline=True, latency=0, throughput=0)
    try:
        browser.wait(lambda: "not up to date" in browser.text("#stale"))
    finally:
        browser.driver.delete_network_conditions()
    browser.wait(lambda: not browser.find("#stale").is_displayed())
    browser.console()


def crowd(app: sqlq.App) -> None:
    """Many failed jobs with long errors, a pause, a batch, and long names."""
    fill(app)
    name = "a_name_without_any_space_" * 3
    app.enqueue(shop.export.new(1).set(queue=name, label=name[:60], batch=name[:60]))
    app.schedules.add(name, shop.export.new(3), sqlq.Schedule(every="1h"))
    app.limits.set(name, running=2, rate="100/1m")
    app.enqueue_many([shop.export.new(i) for i in range(30)])
    for i in range(25):
        end(app, failed(f"order {i} at https://warehouse.example.com/{'orders/' * 12}{i}"), queue="reports")
    app.enqueue_many([shop.charge.new(i).set(batch="import-42", queue=f"q{i}") for i in range(4)])
    with app.acting_as("ada"):
        app.queues.pause("q1", duration="2h")
    app.jobs.cancel([app.jobs.list(queue="q2")[0].id])


@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_keeps_its_layout(desk: Desk, width: int) -> None:
    crowd(desk.app)
    layout = Path(__file__).with_name("layout.js").read_text()
    group = desk.app.jobs.failures()[0][0].fingerprint
    driver, id = desk.browser.driver, desk.app.jobs.list(state="failed")[0].id
    metrics: dict[str, Any] = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == 390}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    more = ["jobs?state=failed", f"jobs/{id}", "flows/1", "schedules/nightly", f"failures/{group}"]
    faults: dict[str, list[str]] = {}
    try:
        for path in (*PAGES, "database", *more):
            desk.open(path).find("h1")
            faults[path] = driver.execute_script(layout)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert {path: found for path, found in faults.items() if found} == {}


def test_the_menu_of_a_phone_folds_without_a_script(desk: Desk) -> None:
    driver = desk.browser.driver
    metrics: dict[str, Any] = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser = desk.open("queues")
        assert browser.find(".top").size["height"] < 100
        assert not browser.find(".top nav").is_displayed()
        browser.find("label.menu").click()
        browser.press("Limits", within="nav")
        browser.sees("Limits", "h1")
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
