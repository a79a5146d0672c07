"""Drafters, schedules and peers in turns with plain generation; see docs/benchmarks.md."""
