"""Drafters of chains that run a model: a draft model, layers of the target, or a cascade."""
