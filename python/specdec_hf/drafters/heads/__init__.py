"""Drafters whose module was trained for the target; see specdec_hf/heads."""
