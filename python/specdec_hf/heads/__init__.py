"""Trained drafters: small modules that read the target's hidden states.

Each kind has a file, or a folder, with its module, its files and its drafter. base.py, files.py,
placed.py, parallel.py, speculators.py and the folders pairs and blocks hold what kinds share;
shipped.py finds the head of a target, and auto.py drafts with it. How heads are trained is in
lab/training.
"""
