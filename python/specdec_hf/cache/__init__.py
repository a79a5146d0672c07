"""KV caches that forget rejected drafts, one length per sequence; protocol.py defines the terms."""
