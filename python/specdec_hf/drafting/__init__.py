"""The contract of drafters, and what the loop needs to know of them.

- drafter.py: `Draft`, `Drafter` and `DraftOutcome`. context.py: what the loop tells a drafter.
  checks.py: checks of what it returns. sampling.py: drafts drawn from rows of logits.
- registry.py: the drafters that have a name. lease.py: a drafter serves one call at a time.
"""
