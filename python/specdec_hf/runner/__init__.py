"""Runners of a model's forward, and the caches that they cut; protocol.py defines the terms."""
