"""Where drafts come from; registry.py lists the drafters that have a name."""
