"""Trained drafters: small modules that read the target's hidden states.

eagle3 is a kind: its module, its files and its drafters. base.py, files.py, placed.py,
speculators.py and the folder eagle_family hold what kinds share, those of specdec_papers too;
shipped.py finds the head of a target, auto.py drafts with it. specdec_lab trains heads.
"""
