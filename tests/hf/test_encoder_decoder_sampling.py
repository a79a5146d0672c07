"""Sampled text of an encoder-decoder has exactly the distribution of the model."""

import functools

import pytest
import torch
from specdec_hf import Draft, ModelDrafter, generate
from support import encoder_models
from support.encoder_models import START
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.providers import SIGNIFICANCE, chi_square

VOCAB, LENGTH, GAMMA, TEXTS = 6, 3, 3, 1000
READ = torch.tensor([[3, 5, 4, 1]])


class Misreports(ModelDrafter):
    """Negative control: the distribution that it reports is not the one it drew from."""

    def propose(self, history, gamma):
        draft = super().propose(history, gamma)
        other = draft.distribution.logits.roll(1, dims=-1)
        return Draft(draft.tokens, draft.distribution._replace(logits=other), draft.counts)


@functools.cache
def target():
    """The model, and the probabilities of the first tokens of its texts."""
    model = encoder_models.build("t5", vocab_size=VOCAB)
    model.lm_head.weight.data /= 8  # so that no token is nearly certain
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    starts = torch.full((len(texts), 1), START)
    with torch.no_grad():
        logits = model(
            input_ids=READ.expand(len(texts), -1), decoder_input_ids=torch.cat([starts, texts], 1)
        ).logits[:, :-1]
    logprobs = logits.double().log_softmax(dim=-1).gather(2, texts[..., None])[..., 0]
    return model, logprobs.sum(dim=1).exp()


@functools.cache
def draft_model():
    model = encoder_models.build("t5", vocab_size=VOCAB, seed=3)
    model.lm_head.weight.data /= 8
    return model


def p_value(drafter, texts=TEXTS, **options):
    model, probs = target()
    out = generate(
        model, READ.expand(texts, -1), attention_mask=torch.ones(texts, READ.shape[1]),
        drafter=drafter, gamma=GAMMA, do_sample=True, top_k=0, seed=list(range(texts)),
        max_new_tokens=LENGTH + GAMMA, return_dict_in_generate=True, guard=False, **options,
    )  # fmt: skip
    assert 0 < out.stats.accepted < out.stats.drafted
    assert out.stats.cache == "aligned"
    first = out.sequences[:, 1 : LENGTH + 1]
    codes = (first * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return chi_square(codes, probs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    ["token", pytest.param("block", marks=pytest.mark.full),
     pytest.param("match", marks=pytest.mark.full)],
)  # fmt: skip
def test_the_first_tokens_have_the_targets_joint_distribution(rule):
    assert p_value(draft_model(), rule=rule) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.full)])
def test_a_drafter_that_reports_another_distribution_is_rejected(rule):
    assert p_value(Misreports(draft_model()), TEXTS // 2, rule=rule) < SIGNIFICANCE
