"""Drafters, schedules and peers in turns with ``model.generate``; see docs/benchmarks.md."""
