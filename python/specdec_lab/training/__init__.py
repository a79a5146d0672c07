"""Training of heads: texts of the target, its hidden states over them, and the loop."""
