"""Beam search whose steps a draft model drafts (Leviathan et al., arXiv 2211.17192, A.4)."""
