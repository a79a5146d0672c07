"""Where drafts come from.

- drafter.py, tree_drafter.py: the protocols of drafters of chains and of trees. context.py: what
  the loop tells a drafter. checks.py: checks of what it returns.
- registry.py: the drafters that have a name. resolve.py: from the argument ``drafter`` to a
  drafter.
- model_free/: drafters that copy or count tokens. models/: drafters that run a model, such as a
  draft model or some layers of the target, and cascades. trees/: drafters of trees.
  heads/: drafters whose module was trained for the target.
"""
