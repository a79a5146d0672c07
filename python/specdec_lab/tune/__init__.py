"""The search for the drafts that pay on one's own prompts and machine; see docs/choosing.md."""
