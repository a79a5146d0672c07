"""Trained drafters: small modules that read the target's hidden states, and how they are trained.

A head has a file with its module, in this package; a file with its drafter, in drafters/heads; and
a file with its loss, in heads/training. What heads share is in the other files.
"""
