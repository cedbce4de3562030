"""A real browser for the dashboard: Debian's Chromium, headless, driven by Selenium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

SECONDS = 30
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
)


class Browser:
    """A window of the browser, with words for what a person does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        """Return an element, as soon as it is there."""
        found: WebElement = self.wait(lambda: self.driver.find_element(By.CSS_SELECTOR, selector))
        return found

    def text(self, selector: str = "main") -> str:
        return self.find(selector).text

    def sees(self, said: str, selector: str = "main") -> None:
        """Wait until a text stands in an element: the page before may still be there."""
        self.wait(lambda: said in self.text(selector))

    def press(self, button: str, within: str = "main") -> None:
        """Press the button, or open the anchor, that has this text."""

        def press() -> bool:
            for element in self.driver.find_elements(By.CSS_SELECTOR, f"{within} button, {within} a"):
                if element.text.strip() == button:
                    element.click()
                    return True
            return False

        self.wait(press)

    def wait(self, look: Any) -> Any:
        """Return what `look` returns, as soon as it is something; the page may be drawn anew meanwhile."""
        ignored = (Exception,)
        return WebDriverWait(self.driver, SECONDS, 0.1, ignored_exceptions=ignored).until(lambda _: look())

    def choose_scheme(self, scheme: str) -> None:
        """Have pages be light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def faults(self) -> list[str]:
        """Return the serious faults that axe-core finds: people who cannot see or point stumble there."""
        axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
        self.driver.execute_script(axe)
        found: Any = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        return [
            f"{fault['id']}: {fault['nodes'][0]['html'][:200]} {fault['nodes'][0]['failureSummary'][:300]}"
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
        ]

    def console(self) -> list[str]:
        """Return the lines of the console since the last call."""
        return [line["message"] for line in self._log("browser")]

    def hosts(self) -> set[str]:
        """Return the hosts that the browser sent requests to since the last call."""
        events = [json.loads(line["message"])["message"] for line in self._log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [str(each["request"]["url"]) for each in sent]
        return {urlsplit(url).netloc for url in urls if url.startswith("http")}

    def _log(self, kind: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return found


@contextmanager
def chromium(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Start a browser with an empty profile."""
    program, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if program is None or driver is None:
        raise AssertionError("install the Debian packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(found)
    finally:
        found.quit()
