"""How fast sqlq is, beside hand-written SQL and beside its peers: `python -m benchmarks`."""
