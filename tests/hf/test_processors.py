"""Logits processors see only prefixes that plain decoding could have made."""

from itertools import pairwise

import pytest
import torch
from specdec_hf import Draft, Drafter, generate
from support import hf_models


class Scattered(Drafter):
    """Drafts tokens that the grammar allows, then one that it forbids or an absent one."""

    name = "scattered"

    def propose(self, history, limits):
        gamma = int(limits.max())
        last = history.last(1)[:, 0]
        tokens = torch.from_numpy(last)[:, None] + torch.arange(1, gamma + 1)
        tokens = tokens % hf_models.VOCAB
        tokens[:, 2::3] = 5 if int(last[0]) % 2 else -1
        return Draft(tokens)


@pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_grammar_never_sees_a_forbidden_prefix(lengths, sampled):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    columns = inputs["input_ids"].shape[1]

    def allowed(b, ids):
        generated = ids[columns:].tolist()
        for before, after in pairwise(generated):
            if after != (before + 1) % hf_models.VOCAB:
                raise KeyError(f"no state after {generated}")
        last = int(ids[-1])
        return [(last + 1) % hf_models.VOCAB]

    kwargs = {
        "max_new_tokens": 20, "do_sample": sampled, "prefix_allowed_tokens_fn": allowed, "seed": 3,
    }  # fmt: skip
    plain = generate(model, **inputs, **kwargs, drafter=None)
    assert generate(model, **inputs, drafter=Scattered(), **kwargs).tolist() == plain.tolist()
