"""Benchmarks: `make bench` on pytest-benchmark, `python -m bench.sweep` over a grid of sizes."""
