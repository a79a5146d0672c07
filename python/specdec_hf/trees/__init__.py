"""Layouts of draft trees.

Terms: the root is the pending token, which is not a node. A node is a drafted token; its parent is
the token before it, its path the nodes from the root down to it, its depth the length of the path.
Siblings are the children of one parent. A trial is the comparison of one child with the target.
"""
