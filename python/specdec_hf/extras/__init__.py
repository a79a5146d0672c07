"""What few calls ask for: other inputs, caches and rules, batches that grow, and CUDA graphs.

The loop imports nothing of it before a call asks for it.
"""
