"""Every kind of tree drafter with the layouts that it can draft."""

import torch
from specdec_hf import (
    Draft,
    Drafter,
    EagleTree,
    ModelDrafter,
    PromptLookupDrafter,
    TreeSpec,
    TrieTree,
)
from support import hf_models


class Repeats(Drafter):
    """Proposes the last tokens once more, with absent tokens in every other sequence."""

    name = "repeats"

    def propose(self, history, limits):
        gamma = int(limits.max())
        tokens = torch.from_numpy(history.last(3))[:, :gamma]
        tokens[::2, 1:2] = -1
        return Draft(tokens)


def drafters(name):
    """The arguments ``drafter`` and ``tree`` of `generate`, by kind."""
    good, bad = hf_models.perturbed(name), hf_models.perturbed(name, 0.2)
    return {
        "chain": (good, TreeSpec.chain(4)),
        "branching": (good, (3, 2, 1)),
        "medusa": (good, TreeSpec.medusa((2, 2), 3, [[0.3, 0.6], [0.2, 0.7]])),
        "sequoia": (ModelDrafter(good), TreeSpec.sequoia([0.6, 0.2, 0.1], 9)),
        "wide": (good, (hf_models.VOCAB - 3,)),
        "two models": ([good, bad], (2, 1, 1)),
        "three models": ([bad, good, bad], TreeSpec((-1, -1, 0, 1, 1))),
        "eagle": (good, EagleTree(width=3, depth=4, size=9)),
        "eagle of the largest sizes": (good, EagleTree(width=64, depth=1, size=1024)),
        "lookup": (PromptLookupDrafter(4, 1), TrieTree(sequences=3, depth=4)),
        "lookup in a spec": ("prompt_lookup", (2, 2)),
        "trie of models": ([good, bad], TrieTree(depth=4)),
        "trie of all": ([good, PromptLookupDrafter(4, 1), Repeats()], TrieTree(2, 4, size=8)),
    }


KINDS = list(drafters("llama"))
