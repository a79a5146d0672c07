"""Expected against measured tokens per round on models whose acceptance is i.i.d. (Equation 1).

Three standard errors bound the difference, for the ops and for the loop.
"""

import copy
import math

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from support import hf_models

from specdec_kernels import sample, verify_chain
from specdec_kernels.analysis import acceptance_rate, expected_tokens

B, V, TEMPERATURE = 4000, 23, 0.7


def deviation(counts, alpha, gamma):
    """Measured less expected tokens per round, in standard errors."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    error = float(counts.std()) / math.sqrt(len(counts))
    return (float(counts.mean()) - expected_tokens(alpha, gamma)) / error


@pytest.mark.parametrize("gamma", [1, 3, 5, 8])
def test_tokens_of_the_op_are_those_of_the_formula(gamma):
    generator = torch.Generator().manual_seed(gamma)
    target, noise = torch.randn(2, V, generator=generator)
    rows = target + 0.5 * noise
    alpha = float(acceptance_rate(target.softmax(-1), rows.softmax(-1)))
    assert 0.7 < alpha < 0.9
    many = torch.arange(B * gamma)
    drafts = sample(rows.expand(B * gamma, V), seeds=many + 10**7, positions=many).tokens
    verdict = verify_chain(
        target.expand(B, gamma + 1, V), drafts.view(B, gamma), rows.expand(B, gamma, V),
        seeds=torch.arange(B), positions=torch.zeros(B, dtype=torch.int64),
    )  # fmt: skip
    counts = verdict.num_accepted + 1
    assert abs(deviation(counts, alpha, gamma)) < 3
    # Negative controls: no token after the drafts, and 90 % of the acceptance rate.
    assert abs(deviation(counts, alpha, gamma - 1)) > 3
    assert abs(deviation(counts, 0.9 * alpha, gamma)) > 3


def indifferent(model):
    """The model with one embedding for all tokens, so that it gives the same logits everywhere."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[1].clone())
    return model


@pytest.mark.full
def test_tokens_of_the_loop_are_those_of_the_formula():
    target, drafter = (indifferent(hf_models.build("llama", seed=seed)) for seed in (0, 4))
    with torch.no_grad():  # the same body, and another head that is close to the target's
        drafter.load_state_dict(target.state_dict())
        head = drafter.get_output_embeddings().weight
        head.add_(0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1)))
    inputs, gamma = hf_models.prompts((5, 9, 7) * 4), 4
    with torch.no_grad():
        rows = [m(**inputs).logits[0, -1].double() / TEMPERATURE for m in (target, drafter)]
    p, q = (row.softmax(-1) for row in rows)
    alpha = float(acceptance_rate(p, q))
    assert 0.3 < alpha < 0.9
    decoder = SpeculativeDecoder(
        drafter, num_assistant_tokens=gamma, rule="token", guard=False, seed=11
    )
    left = [120] * len(inputs["input_ids"])
    counts = []
    for step in decoder.stream(
        target, **inputs, max_new_tokens=120, do_sample=True, temperature=TEMPERATURE, top_k=0
    ):
        if left[step.sequence] > gamma:  # later rounds draft less than gamma tokens
            counts.append(len(step.tokens))
        left[step.sequence] -= len(step.tokens)
    assert len(counts) > 300
    assert abs(deviation(counts, alpha, gamma)) < 3
    assert abs(deviation(counts, 0.85 * alpha, gamma)) > 3
