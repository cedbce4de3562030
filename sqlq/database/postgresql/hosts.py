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

    def move(host: tuple[str, str] | None, place: int) -> None:
        if host in order:
            order.remove(host)
            order.insert(place, host)

    @event.listens_for(engine, "do_connect")
    def arrange(dialect: Any, record: Any, arguments: Any, parameters: dict[str, Any]) -> None:
        hosts = str(parameters.get("host", "")).split(",")
        if len(hosts) == 1 or not parameters.keys().isdisjoint(("hostaddr", "load_balance_hosts")):
            return
        ports = str(parameters.get("port", "")).split(",")
        if not order:
            order.extend(zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False))
        parameters["host"], parameters["port"] = (",".join(each) for each in zip(*order, strict=True))

    @event.listens_for(engine, "connect")
    def note(connection: Any, record: Any) -> None:
        if order:
            info = connection.info
            record.info[_HOST] = next(
                (each for each in order if each in ((info.host, str(info.port)), (info.host, ""))), None
            )
            move(record.info[_HOST], 0)  # guard: the-host-that-answers-is-first

    @event.listens_for(engine, "invalidate")
    def leave(connection: Any, record: Any, error: Any) -> None:
        move(record.info.pop(_HOST, None), len(order))  # guard: a-lost-host-is-tried-last
