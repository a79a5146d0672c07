"""Measurements of speculative decoding on real text, as in Leviathan et al. 2023, and pictures.

The arithmetic is in `specdec_kernels.analysis`.
"""
