"""The files of examples/deploy: the command line parses their commands, and their parts fit together."""

from __future__ import annotations

import configparser
import importlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import NullPool, create_engine, make_url

from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command_line
from sqlq.metrics.collectors import OF_THE_DATABASE
from tests.kit import needs
from tests.kit.pages import Desk
from tests.kit.postgresql import PostgreSQL

pytestmark = pytest.mark.integration

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
GRACE_SECONDS = 25
yaml: Any = importlib.import_module("yaml")
SERVICES = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
OBJECTS = {
    (found["kind"], found["metadata"]["name"]): found
    for path in (*sorted((DEPLOY / "kubernetes").glob("*.yml")), DEPLOY / "keda" / "scaledobject.yml")
    for found in yaml.safe_load_all(path.read_text())
}
PODS = {
    name: found["spec"]["template"]["spec"]
    for (kind, name), found in OBJECTS.items()
    if kind in ("Deployment", "Job")
}
ROLES = {"migrate": "owner", "worker": "worker", "metrics": "reader", "web": "operator"}
"""The role of each process."""
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
    programs = [shlex.split(unit(path)["Service"]["ExecStart"].replace("%i", "1")) for path in UNITS]
    words = [[Path(program).name, *rest] for program, *rest in programs]
    words += [each["command"] for each in SERVICES.values() if "command" in each]
    words += [each["command"] for each in CONTAINERS]
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    words += [yaml.safe_load(line) for line in re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)]
    assert len(words) == 17
    scripts = [Path(each.pop()).name for each in words if each[0] == "sh"]
    assert scripts == ["migrate.sh"] * 3
    words = [each for each in words if each[0] == "sqlq"]
    script = (DEPLOY / "migrate.sh").read_text().replace("$role", "worker")
    in_script = [shlex.split(line) for line in script.splitlines() if "sqlq" in line]
    assert [each[1] for each in in_script] == ["migrate", "grants"]
    for each in words + in_script:
        parse(each)
    assert {each[1] for each in words} == {"migrate", "work", "web", "metrics"}


def test_each_process_has_the_environment_of_its_role() -> None:
    """The superuser's is for the database's own container alone, and no other file names a user."""
    roles = ROLES | {"database": "superuser", "worker-eu": "worker", "worker-us": "worker"}
    files = {name: each["env_file"] for name, each in SERVICES.items()}
    assert files == {name: f"{role}.env" for name, role in roles.items()}
    for path in UNITS:
        name = path.name.removeprefix("shop-").partition(".")[0].rstrip("@")
        role = {"shard": "worker-%i"}.get(name) or ROLES[name]
        assert unit(path)["Service"]["EnvironmentFile"] == f"/etc/shop/{role}.env"
    for name, pod in PODS.items():
        role = ROLES[name.removeprefix("shop-").removesuffix("-1")]
        for each in pod.get("initContainers", []) + pod["containers"]:
            assert each["envFrom"] == [{"secretRef": {"name": f"shop-{role}"}}]
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.suffix in (".yml", ".service", ".md")]
    assert not [text for text in texts if "://postgres" in text or "://shop_" in text]


@needs("roles")
def test_each_role_does_its_own_work_and_no_other(
    desk: Desk, database_url: str, postgresql: PostgreSQL
) -> None:
    psql = shutil.which("psql", path=f"{getattr(postgresql, '_binaries', '')}:{os.environ['PATH']}")
    if psql is None:
        pytest.skip("there is no psql: apt-get install postgresql-client")
    bare = make_url(postgresql.create_database())
    mark = uuid4().hex[:12]  # roles belong to the whole server
    for path in (DEPLOY / "environments.sh", DEPLOY / "roles.sql", DEPLOY / "migrate.sh"):
        text = path.read_text().replace("shop_$role", f"shop_{mark}_$role")
        text = re.sub("shop_(owner|worker|reader|operator)", rf"shop_{mark}_\1", text)
        (desk.directory / path.name).write_text(text)
    desk.run(f"sh environments.sh {bare.host}:{bare.port}")
    assert {path.stat().st_mode & 0o777 for path in desk.directory.glob("*.env")} == {0o600}
    urls = {}
    for role in (*ROLES.values(), "superuser"):
        lines = dict(line.split("=", 1) for line in (desk.directory / f"{role}.env").read_text().splitlines())
        urls[role] = lines.get("SQLQ_DATABASE_URL", "").removesuffix("shop") + str(bare.database)
        assert role == "superuser" or make_url(urls[role]).username == f"shop_{mark}_{role}"
    url = bare.set(drivername="postgresql").render_as_string(hide_password=False)
    desk.run(f"set -a; . ./superuser.env; {psql} -v ON_ERROR_STOP=1 -q -d '{url}' -f roles.sql")
    (desk.directory / "apart.py").write_text(
        "import sqlq\n\napp = sqlq.App()\n\n\n@app.task(queue='mail')\ndef send(n: int) -> None: ...\n"
    )
    try:
        desk.run("sh migrate.sh; sh migrate.sh", SQLQ_DATABASE_URL=urls["owner"])

        def run(role: str, command: str, ends_with: int = 0) -> str:
            return desk.run(f"sqlq {command}", ends_with, SQLQ_DATABASE_URL=urls[role], SQLQ_APP="apart:app")

        for role in ROLES.values():
            run(role, "migrate --check")
        run("operator", "enqueue apart.send 7")
        assert 'sqlq_jobs{queue="mail",state="available"} 1.0' in run("reader", "metrics")
        run("worker", "work --drain")
        assert "finished" in run("reader", "jobs --json")
        run("operator", "queues pause mail")
        for role, refused in (
            ("reader", "queues resume mail"),
            ("reader", "enqueue apart.send 7"),
            ("worker", f"grants shop_{mark}_reader --as worker --apply"),
            ("operator", "migrate --down base --force"),
        ):
            run(role, refused, ends_with=1)
    finally:
        owned = create_engine(postgresql.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with owned.connect() as conn:
            conn.exec_driver_sql(f"DROP DATABASE {bare.database} WITH (FORCE)")
            for role in ROLES.values():
                conn.exec_driver_sql(f"DROP ROLE shop_{mark}_{role}")


def test_a_worker_has_time_to_stop_and_a_probe() -> None:
    workers = [unit(path) for path in UNITS if "sqlq work " in path.read_text()]
    assert len(workers) == 2
    for each in workers:
        worker = each["Service"]
        assert (worker["Restart"], worker["Type"], worker["WatchdogSec"]) == ("always", "notify", "60")
        (health,) = re.findall("--health-file (\\S+)/alive", worker["ExecStart"])
        assert health == f"/run/{worker['RuntimeDirectory']}"
    (first,) = [each["Unit"] for each in workers if "shop-migrate.service" in each["Unit"]["After"]]
    assert "shop-migrate.service" in first["Wants"]
    stops = [each["Service"]["TimeoutStopSec"] for each in workers]
    stops += [SERVICES["worker"]["stop_grace_period"].removesuffix("s")]
    stops.append(PODS["shop-worker"]["terminationGracePeriodSeconds"])
    assert all(int(seconds) >= GRACE_SECONDS + 10 for seconds in stops)
    (pod,) = PODS["shop-worker"]["containers"]
    for command, probe in (
        (pod["command"], pod["livenessProbe"]["exec"]["command"]),
        (SERVICES["worker"]["command"], SERVICES["worker"]["healthcheck"]["test"][1:]),
    ):
        assert parse(probe)["file"] == parse(command)["health_file"]


def test_references_between_kubernetes_objects_resolve() -> None:
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
    own = "".join(path.read_text() for path in (DEPLOY / "kubernetes").iterdir())
    # `kubectl apply -f kubernetes/` fails at a kind that the cluster does not know, as KEDA's
    assert set(re.findall("^kind: (.+)", own, re.MULTILINE)) == {"Deployment", "Service", "Job"}


def test_prometheus_scrapes_the_ports_that_processes_serve() -> None:
    jobs = yaml.safe_load((DEPLOY.parent / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in jobs for each in job["static_configs"] for target in each["targets"]]
    scraped = {target.split(":")[1] for target in targets}
    published = {port.split(":")[1] for name in ("worker", "metrics") for port in SERVICES[name]["ports"]}
    assert scraped == published == {"9464", "9465"}
    options = (("worker", "metrics_port"), ("metrics", "port"))
    assert published == {str(parse(SERVICES[name]["command"])[option]) for name, option in options}


def test_probes_read_the_health_of_the_dashboard_and_the_metrics() -> None:
    for name in ("shop-web", "shop-metrics"):
        (container,) = PODS[name]["containers"]
        (port,) = container["ports"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
        service = SERVICES[name.removeprefix("shop-")]
        assert service["ports"] == [f"127.0.0.1:{port['containerPort']}:{port['containerPort']}"]
        assert f"//127.0.0.1:{port['containerPort']}/healthz" in service["healthcheck"]["test"][-1]


def test_no_container_has_more_rights_than_it_needs() -> None:
    for pod in PODS.values():
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["automountServiceAccountToken"] is False
    context = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    for container in CONTAINERS:
        assert container["securityContext"] == context | {"capabilities": {"drop": ["ALL"]}}
    user = re.findall("^USER (\\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user == ["65534"], "not root, and a number"
    for name, service in SERVICES.items():
        if name != "database":
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
            assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("broken", [None, "shop-worker@2.service"])
def test_a_rolling_restart_ends_when_a_worker_does_not_work_again(tmp_path: Path, broken: str | None) -> None:
    """systemctl fails where a unit is not ready in time; it is played here."""
    names = [f"shop-worker@{number}.service" for number in (1, 2, 3)]
    listed = "".join(f"{name} loaded active running sqlq worker\n" for name in names)
    (tmp_path / "list").write_text(listed)
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\nif [ "$1" = list-units ]; then cat {tmp_path}/list; exit; fi\n'
        f'echo "$*" >> {tmp_path}/did; [ "$2" != "{broken}" ]\n'
    )
    systemctl.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code = subprocess.call(["sh", DEPLOY / "systemd" / "rolling-restart.sh"], env=path)
    restarted = names[: names.index(broken) + 1] if broken else names
    assert code == bool(broken)
    assert (tmp_path / "did").read_text().splitlines() == [f"restart {name}" for name in restarted]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_verifies_the_units_and_finds_them_hardened(tmp_path: Path) -> None:
    def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)

    shutil.copytree(DEPLOY / "systemd", tmp_path / "etc" / "systemd" / "system")
    names = [path.name.replace("@", "@1") for path in UNITS]
    done = analyze("security", "--offline=true", "--threshold=30", f"--root={tmp_path}", *names)
    levels = re.findall(r"exposure level for (\S+): (\S+)", done.stdout)
    assert sorted(name for name, _ in levels) == sorted(names), done.stderr
    assert max(float(level) for _, level in levels) < 3
    assert done.returncode == 0
    place = tmp_path / "units"
    shutil.copytree(DEPLOY / "systemd", place)
    for path in [*place.glob("*.service"), *place.glob("*/*.conf")]:
        text = path.read_text().replace("/srv/shop/.venv/bin/sqlq", "/bin/true")
        text = text.replace("User=shop", "User=root").replace("=/srv/shop\n", "=/\n")
        path.write_text(text)
    for path in sorted(place.glob("*.service")):
        done = analyze("verify", "--man=no", str(path.rename(str(path).replace("@", "@1"))))
        assert (done.returncode, done.stderr) == (0, ""), path.name
