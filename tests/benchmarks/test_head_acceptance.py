"""The rounds of a head that are counted on a greedy text are those of a call."""

import pytest
import torch
from specdec_hf import generate
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.lab.training.unrolled import loss_of
from support import heads, hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.drafter_acceptance import Text
from bench.head_acceptance import GAMMAS, count, read

pytestmark = pytest.mark.build

PROMPT, NEW = 9, 40


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=40)


@pytest.fixture(scope="module")
def text(target):
    inputs = hf_models.prompts((PROMPT,), vocab_size=40)
    out = generate(target, **inputs, drafter=None, max_new_tokens=NEW, do_sample=False)
    return Text("", out[0].tolist(), PROMPT)


@pytest.fixture(scope="module")
def folder(target, text, tmp_path_factory):
    """A head after a few steps on the text, so that it drafts some of it."""
    head = heads.head_for(target)
    batch = heads.text_batch(target, head.config.layers, text.tokens)
    optimizer = torch.optim.Adam(head.parameters(), 0.003)
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(head, batch, 2)[0].backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("head")
    save_head(head, path, torch.float32)
    return path


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_rounds_are_those_of_a_call(gamma, target, text, folder):
    counts = count(load_head(folder), target, text, read(target, text))
    out = generate(
        target, torch.tensor([text.tokens[:PROMPT]]), drafter=f"eagle3_chain:{folder}",
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", guard=False,
        max_new_tokens=len(text.tokens) - PROMPT, do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences[0].tolist() == text.tokens
    stats = out.stats
    assert 0 < stats.accepted < stats.drafted
    assert counts.rounds[gamma] == stats.rounds - 1  # the first reads the prompt
    assert counts.tokens[gamma] == stats.accepted + stats.rounds - 1


def test_the_places_are_those_of_the_answer(target, text, folder):
    """The draft of each of its tokens at every step, and of the one after the last."""
    counts = count(load_head(folder), target, text, read(target, text))
    assert counts.places.tolist() == [len(text.tokens) - PROMPT + 1] * 5
    assert all(0 <= share <= 1 for share in counts.greedy + counts.drawn)
