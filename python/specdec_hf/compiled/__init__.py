"""Forwards of a model on packed weights and compiled layers, over the buffers of `SpecCache`."""
