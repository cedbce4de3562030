"""An API that allows 20 requests a second, 3 at a time. `--check` prints how many it has received."""

from __future__ import annotations

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PER_SECOND, AT_A_TIME, SECONDS = 20, 3, 0.05
ASKED = Path("asked.txt")
"""One line for each request: when it came, how many were there then, and what it was answered."""


class Bucket:
    """Twenty tokens, refilled by twenty a second: so many requests may come at once after a rest, and on and
    on no more than that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tokens, self.filled_at = float(PER_SECOND), time.monotonic()
        self.here = self.number = 0

    def enter(self) -> int:
        """Note a request, and return what it is answered."""
        with self.lock:
            moment = time.monotonic()
            refilled = self.tokens + (moment - self.filled_at) * PER_SECOND
            self.tokens, self.filled_at = min(PER_SECOND, refilled) - 1, moment
            self.here += 1
            self.number += 1
            too_much = self.here > AT_A_TIME or self.tokens < 0
            code = 429 if too_much else 503 if self.number % 10 == 5 else 200
            with ASKED.open("a") as file:
                file.write(f"{moment} {self.here} {code}\n")
            return code

    def leave(self) -> None:
        with self.lock:
            self.here -= 1


bucket = Bucket()


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code = bucket.enter()
        threading.Event().wait(SECONDS)  # what answering takes
        bucket.leave()
        self.send_response(code)
        self.end_headers()
        self.wfile.write(f"answer {self.path}".encode())

    def log_message(self, *_: object) -> None:
        """Log nothing: `asked.txt` has each request."""


def check() -> int:
    rows = [line.split() for line in ASKED.read_text().splitlines()]
    answered, busy, refused = (sum(row[2] == code for row in rows) for code in ("200", "503", "429"))
    print(f"{answered} answered, {busy} asked again, {refused} turned away")
    seconds = float(rows[-1][0]) - float(rows[0][0])
    print(f"at most {max(int(row[1]) for row in rows)} at a time, {len(rows)} in {seconds:.1f} s")
    return int(refused > 0)


def main() -> int:
    if "--check" in sys.argv:
        return check()
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("API_PORT", "8765"))), Api)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
