"""The order in which the hosts of a URL are tried, for engines of sqlq's own.

libpq tries them as they are listed. One that is frozen takes the whole connect timeout, for each connection
anew, before the next one has its turn.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event

_HOST = "sqlq_host"
"""The key under which a pooled connection keeps its host and port."""


def follow_hosts(engine: Engine) -> None:
    """Try the host of the last connection first, and one whose connection broke last."""
    order: list[tuple[str, str]] = []

    def move(host: tuple[str, str] | None, *, first: bool) -> None:
        if host in order:
            others = [each for each in order if each != host]
            # in one step: other threads read the list, and move hosts
            order[:] = [host, *others] if first else [*others, host]

    @event.listens_for(engine, "do_connect")
    def arrange(dialect: Any, record: Any, arguments: Any, parameters: dict[str, Any]) -> None:
        hosts = str(parameters.get("host", "")).split(",")
        if len(hosts) == 1 or not parameters.keys().isdisjoint(("hostaddr", "load_balance_hosts")):
            return
        ports = str(parameters.get("port", "")).split(",")
        if not order:
            order[:] = zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False)
        names, numbers = (",".join(each) for each in zip(*order, strict=True))
        parameters["host"] = names
        if "port" in parameters:  # guard: no-port-is-for-libpq-to-find
            parameters["port"] = numbers

    @event.listens_for(engine, "connect")
    def note(connection: Any, record: Any) -> None:
        if order:
            info = connection.info
            names = ((info.host, str(info.port)), (info.host, ""))
            record.info[_HOST] = next((each for each in names if each in order), None)
            move(record.info[_HOST], first=True)  # guard: the-host-that-answers-is-first

    @event.listens_for(engine, "invalidate")
    def leave(connection: Any, record: Any, error: Any) -> None:
        move(record.info.pop(_HOST, None), first=False)  # guard: a-lost-host-is-tried-last
