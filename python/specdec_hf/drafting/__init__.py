"""The contract of drafters, and what the loop needs to know of them.

- drafter.py: `Drafter`, the `State` that it begins for a call, `Draft` and `Round`. call.py: what a
  drafter is told of a call, and the one way to draw. context.py: committed tokens and states.
- checks.py: checks of what a state returns. sampling.py: statistics of drawn drafts.
- registry.py: the drafters that have a name.
"""
