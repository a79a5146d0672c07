"""The drafters of EAGLE-3 heads."""

from __future__ import annotations

from specdec_hf.heads.eagle3.files import load_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.eagle_family.drafter import PairChainDrafter, PairTreeDrafter


class Eagle3Drafter(PairTreeDrafter[Eagle3Head], entry="eagle3"):
    """A trained head that reads the target's hidden states; see `specdec_hf.heads.eagle3.head`.

    Its arguments and errors are those of `PairTreeDrafter`.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    kind, load = Eagle3Head, staticmethod(load_head)


class Eagle3ChainDrafter(PairChainDrafter[Eagle3Head], entry="eagle3_chain"):
    """A trained head that drafts token by token, each with the distribution it was drawn from.

    Its arguments and errors are those of `HeadDrafter`.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    kind, load = Eagle3Head, staticmethod(load_head)
