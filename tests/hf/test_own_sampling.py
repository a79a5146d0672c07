"""A draft model with sampling parameters of its own: exact text, and what it drafts."""

import itertools

import proofs
import pytest
import torch
from proofs.toy_chain import distributions
from specdec_hf import EagleTree, ModelDrafter
from specdec_hf.arguments import split_options
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.parsed import SAMPLING, sampling_of
from specdec_hf.runner.module_copy import copied
from specdec_hf.runner.packed.blocks import rounded_linear
from support.drafter_proof import (
    PROMPTS,
    VOCAB,
    begun,
    draft_model,
    history_of,
    propose,
    target,
)

from specdec_kernels import SampledDraft, verify_chain

PROMPT, GAMMA = PROMPTS[2], 2
CALL = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def drafted(drafter, size=400, prompt=PROMPT, **fields):
    call = {"rule": "token", **CALL, "seeds": torch.arange(size), **fields}
    state = begun(drafter, size, model=target()[0], **call)
    return propose(state, history_of(*[prompt] * size), GAMMA)


def rounded(model):
    """What a draft model drafts with."""
    return copied(model, rounded_linear)


def logits_after(model, length):
    """The model's logits [V] * (length + 1) after the prompt and each text of this length."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)), dtype=torch.int64)
    with torch.no_grad():
        ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], dim=1)
        rows = model(ids).logits[:, -1]
    return rows.view([VOCAB] * (length + 1))


def tables(model, count, **filters):
    """The exact conditionals of `count` tokens after the prompt."""
    return distributions([logits_after(model, n) for n in range(count)], **filters)


OWN = [{"temperature": 0.4}, {"temperature": 3.0, "top_k": 3}, {"top_p": 0.6}, {"temperature": 0.0}]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("own", OWN, ids=str)
def test_the_emitted_distribution_is_the_targets(own, rule):
    """Every draft by its exact probability, and every cell of the uniforms of the real op."""
    model = draft_model(target()[0])
    draft = drafted(ModelDrafter(model, **own), rule=rule)
    rows = {first: b for b, (first, _) in enumerate(draft.tokens.tolist())}
    filters = {**CALL, **own} if own.get("temperature") != 0 else {**CALL, "top_k": 1}
    q, p = tables(rounded(model), GAMMA, **filters), tables(target()[0], GAMMA + 1, **CALL)
    raw = [logits_after(target()[0], length) for length in range(GAMMA + 1)]

    def verify(drafts, uniforms):
        chosen = torch.tensor([rows[first] for first, _ in drafts.tolist()])
        handed = draft.drawn.at(CALL["temperature"])
        first, second = drafts.T
        target_rows = torch.stack(
            [raw[0].expand(len(drafts), -1), raw[1][first], raw[2][first, second]], dim=1
        )
        zeros = torch.zeros(len(drafts), dtype=torch.int64)
        verdict = verify_chain(
            target_rows, drafts, SampledDraft(*(x[chosen] for x in handed[:3]), handed.temperature),
            rule=rule, **CALL, seeds=zeros, positions=zeros, uniforms=uniforms,
        )  # fmt: skip
        return verdict.tokens, verdict.num_accepted

    realized = proofs.enumerate_distribution(verify, q, p)
    torch.testing.assert_close(realized.joint, proofs.joint_distribution(p), atol=1e-6, rtol=0)
    assert 0.2 < realized.mean_accepted < GAMMA


def test_drafts_are_drawn_from_their_own_distribution():
    model = draft_model(target()[0])
    for own in OWN[:3]:
        draft = drafted(ModelDrafter(model, **own), size=2000)
        expected = tables(rounded(model), 1, **{**CALL, **own})[0]
        found = torch.bincount(draft.tokens[:, 0], minlength=VOCAB) / 2000
        assert (found - expected).abs().max() < 0.05
        others = tables(rounded(model), 1, **CALL)[
            0
        ]  # the control: those of the call are far from these
        assert (found - others).abs().max() > 0.1
    greedy = drafted(ModelDrafter(model, temperature=0.0), size=50).tokens[:, 0]
    assert greedy.unique().tolist() == [int(logits_after(rounded(model), 0).argmax())]


def test_greedy_sequences_draft_the_most_likely_tokens():
    model = draft_model(target()[0])
    mixed, seen = torch.tensor([0.0, 1.0, 0.0]), set()
    for prompt, own in itertools.product(
        (*PROMPTS, [1], [3]), ({"temperature": 5.0}, {"temperature": 0.0}, {"top_p": 0.1})
    ):
        greedy = {"size": 1, "prompt": prompt, "temperature": 0.0, "rule": "greedy"}
        most_likely = drafted(ModelDrafter(model), **greedy).tokens
        assert drafted(ModelDrafter(model, **own), **greedy).tokens.equal(most_likely)
        beside = drafted(ModelDrafter(model, **own), 3, prompt, temperature=mixed)
        assert beside.tokens[::2].equal(most_likely.expand(2, -1))
        seen.update(most_likely.flatten().tolist())
    assert len(seen) > 1  # a row of equal logits drafts token 0


def test_trees_that_draw_nothing_take_no_parameters():
    drafter = ModelDrafter(draft_model(target()[0]), temperature=0.5)
    with pytest.raises(
        ValueError, match=r"EagleTree, which draws nothing, got .'temperature': 0.5"
    ):
        resolve_drafter(drafter, EagleTree(2, 3, 5), target()[0])


def test_a_name_is_followed_by_parameters():
    drafter = resolve_drafter("layers:1,temperature=0.5,top_k=7", None, target()[0])
    assert (drafter.layers, drafter.sampling) == (1, {"temperature": 0.5, "top_k": 7})
    assert split_options("a/b:c,d:top_p=0.5", SAMPLING) == ("a/b:c,d", {"top_p": "0.5"})
    with pytest.raises(ValueError, match=r"top_p must be given once, got 'a:top_p=0.5,top_p=0.5'"):
        split_options("a:top_p=0.5,top_p=0.5", SAMPLING)
    with pytest.raises(ValueError, match=r"top_k of a drafter must be an integer, got '1\.5'"):
        sampling_of({"top_k": "1.5"})
