"""`python order.py 7` writes order 7 and its flow, in one transaction."""

from __future__ import annotations

import sys

from shop import Model, engine_of_the_shop, place
from sqlalchemy.orm import Session


def main() -> None:
    engine = engine_of_the_shop()
    Model.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        flow = place(session, int(sys.argv[1]))
        print(f"flow {flow.id}: {len(flow.jobs)} steps")
    engine.dispose()


if __name__ == "__main__":
    main()
