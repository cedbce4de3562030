"""The files of examples/deploy: the command line parses their `sqlq` commands, and their workers start and
stop as processes.

systemd's own checker reads the units where it is installed.
"""

from __future__ import annotations

import configparser
import importlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command_line
from sqlq.metrics.collectors import OF_THE_DATABASE
from tests.faces.pages import Desk

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
GRACE_SECONDS = 25
yaml: Any = importlib.import_module("yaml")
SERVICES = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
OBJECTS = {
    (found["kind"], found["metadata"]["name"]): found
    for path in sorted((DEPLOY / "kubernetes").glob("*.yml"))
    for found in yaml.safe_load_all(path.read_text())
}
PODS = {
    name: found["spec"]["template"]["spec"]
    for (kind, name), found in OBJECTS.items()
    if kind in ("Deployment", "Job")
}
CONTAINERS = [each for pod in PODS.values() for each in pod.get("initContainers", []) + pod["containers"]]


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def parse(words: list[str]) -> dict[str, Any]:
    """Have the command line parse a command, and return the values of its options. Nothing is run."""
    program, name, *rest = words
    assert program == "sqlq"
    command = command_line.commands[name]
    with command_line.make_context("sqlq", [], obj=Context(), resilient_parsing=True) as parent:
        return command.make_context(name, rest, parent=parent).params


def test_each_command_is_parsed_by_sqlq() -> None:
    programs = [unit(path)["Service"]["ExecStart"] for path in UNITS]
    words = [["sqlq", *shlex.split(program)[1:]] for program in programs]
    words += [each["command"] for each in SERVICES.values() if "command" in each]
    words += [each["command"] for each in CONTAINERS]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    words += [yaml.safe_load(line) for line in re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)]
    assert len(words) == 16
    for each in words:
        parse(each)
    assert {each[1] for each in words} == {"migrate", "work", "web", "metrics"}


def test_each_shard_has_a_worker() -> None:
    of_shards = [each["command"] for each in SERVICES.values() if "profiles" in each]
    assert of_shards == [["sqlq", "work", "--app", f"shards:apps.{name}"] for name in ("eu", "us")]
    (worker,) = [unit(path)["Service"] for path in UNITS if path.name.startswith("shard-worker")]
    assert "sqlq work --app shards:apps.%i --name %i" in worker["ExecStart"]


def test_a_worker_has_time_to_stop_and_a_probe() -> None:
    (worker,) = [unit(path)["Service"] for path in UNITS if path.name.startswith("shop-worker")]
    assert worker["ExecStartPre"] == "/srv/shop/.venv/bin/sqlq migrate"
    assert worker["Restart"] == "always"
    stops = [worker["TimeoutStopSec"], SERVICES["worker"]["stop_grace_period"].removesuffix("s")]
    stops.append(PODS["shop-worker"]["terminationGracePeriodSeconds"])
    assert all(int(seconds) >= GRACE_SECONDS + 10 for seconds in stops)
    (pod,) = PODS["shop-worker"]["containers"]
    for command, probe in (
        (pod["command"], pod["livenessProbe"]["exec"]["command"]),
        (SERVICES["worker"]["command"], SERVICES["worker"]["healthcheck"]["test"][1:]),
    ):
        assert parse(probe)["file"] == parse(command)["health_file"]


def test_references_between_kubernetes_objects_resolve() -> None:
    """A selector has its labels, a Service its port, an autoscaler its Deployment and its metric."""
    for (kind, name), found in OBJECTS.items():
        match kind:
            case "Deployment":
                labels = found["spec"]["template"]["metadata"]["labels"]
                assert found["spec"]["selector"]["matchLabels"] == labels, name
            case "Service":
                (port,) = found["spec"]["ports"]
                (container,) = PODS[name]["containers"]
                assert port["targetPort"] in [each["name"] for each in container["ports"]]
                if "--port" in container["command"]:
                    assert str(port["port"]) in container["command"]
            case "ScaledObject":
                assert ("Deployment", found["spec"]["scaleTargetRef"]["name"]) in OBJECTS
                (trigger,) = found["spec"]["triggers"]
                metric, labels = trigger["metadata"]["valueLocation"].rstrip("}").split("{")
                (known,) = [each for each in OF_THE_DATABASE if each.name == metric]
                assert re.findall(r'(\w+)="\w+"', labels) == list(known.labels)
                assert trigger["metadata"]["url"] == "http://shop-metrics.default.svc:9465/metrics"
    assert {each["image"] for each in CONTAINERS} == {"shop:1"}


@pytest.mark.integration
def test_workers_start_and_stop(desk: Desk) -> None:
    desk.run("sqlq migrate", SQLQ_APP="shop:app")
    alive = str(desk.directory / "alive")
    (pod,) = PODS["shop-worker"]["containers"]
    for command in (pod["command"], SERVICES["worker"]["command"]):
        words = [{"/tmp/alive": alive, "9464": "0"}.get(word, word) for word in command]
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=desk.directory,
            env=desk.environment | {"SQLQ_APP": "shop:app"},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr
        assert any("working on" in line for line in iter(process.stderr.readline, ""))
        desk.run(f"sqlq health {alive}")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_verifies_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace("/srv/shop/.venv/bin/sqlq", "/bin/true")
        place = tmp_path / path.name.replace("@", "@1")
        place.write_text(text.replace("User=shop", "User=root").replace("/srv/shop", "/"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(place)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), path.name
