"""Tiny random models of every class of Transformers that generates text."""
