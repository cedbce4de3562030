"""The log of workers."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines have fields: `log.info("stopped", event="stopped")`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        fields = {name: kwargs.pop(name) for name in kwargs.keys() - {"exc_info", "stacklevel"}}
        return msg, {**kwargs, "extra": fields}


log = Log(logging.getLogger("sqlq.worker"))
