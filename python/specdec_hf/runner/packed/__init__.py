"""A model's forwards on packed weights, which is how they run on a CPU by default; see model.py."""
