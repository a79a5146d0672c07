"""A default dtype or device that the caller set for torch changes no op and no text."""

import contextlib

import proofs
import pytest
import torch
from proofs import assert_all_equal
from support import hf_models
from support.drafter_proof import tree_drafters
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.providers import run_case
from transformers import StoppingCriteriaList

from specdec_kernels import _library

DEFAULTS = pytest.mark.parametrize("default", [torch.float64, "meta"], ids=str)
OF_LOOP = {
    "prompt lookup": ("prompt_lookup", None),
    "model": (hf_models.perturbed("llama"), None),
    "eagle": tree_drafters("llama")["eagle"],
    "trie of all": tree_drafters("llama")["trie of all"],
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
    case = proofs.cases(op)[0]
    want = run_case(case)
    args = case.args()
    with torch_default(default):
        got = run_case(case, args=args)
    assert_all_equal(got, want)


@pytest.mark.slow
@DEFAULTS
@pytest.mark.covering(test=1)
@pytest.mark.parametrize("kind", OF_LOOP)
def test_the_text_does_not_depend_on_them(kind, default):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(hf_models.RAGGED)
    drafter, tree = OF_LOOP[kind]

    def never(ids, scores, **kwargs):
        return False if len(ids) == 1 else torch.zeros(len(ids), dtype=torch.bool, device="cpu")

    kwargs = {"drafter": drafter, "tree": tree, "max_new_tokens": 8}
    per_sequence = {"temperature": [0.7, 0.0, 0.9], "repetition_penalty": 1.3}
    for sampling in ({}, {**hf_models.SAMPLED, **per_sequence}):
        want = hf_models.run(model, inputs, **kwargs, **sampling)
        criteria = StoppingCriteriaList([never])
        with torch_default(default):
            got = hf_models.run(model, inputs, **kwargs, **sampling, stopping_criteria=criteria)
        assert got.sequences.tolist() == want.sequences.tolist()
        assert_all_equal([got.logprobs, got.attention_mask], [want.logprobs, want.attention_mask])
