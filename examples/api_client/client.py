"""A client of an API that allows 20 requests a second, 3 at a time. `python client.py 60` enqueues 60."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

import sqlq

URL = os.environ.get("API_URL", "http://127.0.0.1:8765")

app = sqlq.App()
app.limit("api", running=3, rate="19/1s")  # a little less than is allowed: the network may bring two closer


@app.task(name="client.ask", limit="api", max_attempts=10, backoff="200ms", timeout="30s")
def ask(number: int) -> str:
    """Send a request to the API. Where the API is busy, the job runs again in its turn."""
    try:
        with urllib.request.urlopen(f"{URL}/{number}", timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 503:
            raise sqlq.Retry from None
        raise


def main() -> None:
    jobs = app.enqueue_many([ask.new(number) for number in range(int(sys.argv[1]))])
    print(f"{len(jobs)} requests wait for their turn")
    app.close()


if __name__ == "__main__":
    main()
