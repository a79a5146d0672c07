"""A default dtype or device that the caller set for torch changes no op and no text."""

import contextlib

import pytest
import torch
from hf.test_generate import RAGGED, SAMPLED, run
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.hf_trees import drafters
from support.providers import assert_all_equal, run_case
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from specdec_kernels import _library, testing

DEFAULTS = pytest.mark.parametrize("default", [torch.float64, "meta"], ids=str)
OF_LOOP = {
    "plain": (None, None),
    "prompt lookup": ("prompt_lookup", None),
    "model": (hf_models.perturbed("llama"), None),
    **{name: drafters("llama")[name] for name in ("branching", "eagle")},
    "trie of all": drafters("llama")["trie of all"],
}


@contextlib.contextmanager
def torch_default(value):
    """Tensors on the device "meta" hold nothing: whatever is made there by mistake is an error."""
    before = torch.get_default_dtype()
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    try:
        with torch.device(value) if value == "meta" else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


@DEFAULTS
@pytest.mark.parametrize("op", _library.OPS)
def test_ops_do_not_depend_on_them(op, default):
    case = testing.cases(op)[0]
    want = run_case(case)
    args = case.args()
    with torch_default(default):
        got = run_case(case, args=args)
    assert_all_equal(got, want)


class Words(BaseStreamer):
    """Reads every token on the host."""

    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        pass


@DEFAULTS
@pytest.mark.covering(test=1)
@pytest.mark.parametrize("kind", OF_LOOP)
def test_the_text_does_not_depend_on_them(kind, default):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    drafter, tree = OF_LOOP[kind]

    def never(ids, scores, **kwargs):
        return False if len(ids) == 1 else torch.zeros(len(ids), dtype=torch.bool, device="cpu")

    kwargs = {"drafter": drafter, "tree": tree, "max_new_tokens": 8}
    per_sequence = {"temperature": [0.7, 0.0, 0.9], "repetition_penalty": 1.3}
    for sampling in ({}, SAMPLED, {**SAMPLED, **per_sequence}):
        want = run(model, inputs, **kwargs, **sampling)
        criteria = StoppingCriteriaList([never])
        with torch_default(default):
            got = run(model, inputs, **kwargs, **sampling, stopping_criteria=criteria)
        assert got.sequences.tolist() == want.sequences.tolist()
        assert_all_equal([got.logprobs, got.attention_mask], [want.logprobs, want.attention_mask])


@DEFAULTS
def test_a_streamer_reads_tokens_on_the_host(default):
    model, inputs, streamer = hf_models.tiny("llama"), hf_models.prompts((9,)), Words()
    with torch_default(default):
        got = run(model, inputs, drafter="prompt_lookup", streamer=streamer, max_new_tokens=8)
    assert got.sequences[0].tolist() == streamer.ids
