"""A server of somebody else's, on loopback: it notes what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service:
    """Answers each request with the next of its codes, and then with 200."""

    def __init__(self, *codes: int) -> None:
        service, self.codes = self, list(codes)
        self.requests: list[tuple[str, dict[str, str], str]] = []
        """The path, the headers and the body of each."""

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                said = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
                headers = {name.lower(): value for name, value in self.headers.items()}
                service.requests.append((self.path, headers, said))
                self.send_response(service.codes.pop(0) if service.codes else 200)
                self.send_header("retry-after", "0")
                self.send_header("content-length", "0")
                self.end_headers()

            do_PUT = do_POST  # noqa: N815 - named after the method

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Service]:
        thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
