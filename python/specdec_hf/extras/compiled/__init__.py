"""Forwards of a runner on packed weights and compiled layers, over the buffers of `SpecCache`."""
