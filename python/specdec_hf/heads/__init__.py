"""Trained drafters: small modules that read the target's hidden states.

A head has a file with its module, in this package, and a file with its drafter, in drafters/heads;
lab/training trains it. What heads share is in the other files.
"""
