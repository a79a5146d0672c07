"""Drafters of trees: of draft models, of several drafters merged, or of a shape of their own."""
