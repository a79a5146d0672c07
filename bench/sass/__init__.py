"""Counts instructions of the CUDA kernels in their machine code, which needs no GPU.

Terms used in this folder:
path: the basic blocks that a warp passes through in one iteration of a loop.
work: what an iteration does for some entries of a row, by which its loop is found.
ceiling: what a loop or a kernel costs now; a test fails where it costs more.
goal: what it should cost.
"""
