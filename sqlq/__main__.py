"""`python -m sqlq` is `sqlq`."""

from sqlq.cli import main

if __name__ == "__main__":
    main()
