"""The check of a prefill with inputs other than text: when it runs, and what it leaves alone."""

import pytest
import torch
from specdec_hf import generate
from specdec_hf.request import prefill
from specdec_hf.runner.fit import Fit, forget_fits
from support import hf_models


@pytest.fixture(autouse=True)
def forgetful():
    forget_fits()
    yield
    forget_fits()


def embedded(model, rows):
    ids = torch.arange(1, 9).expand(rows, -1)
    with torch.no_grad():
        return {"inputs_embeds": model.get_input_embeddings()(ids), "max_new_tokens": 3}


def test_a_single_sequence_proves_nothing_for_a_batch(monkeypatch):
    checked = []
    measure = prefill._compare

    def counted(model, cache, *args):
        checked.append(len(cache.lengths))
        return measure(model, cache, *args)

    monkeypatch.setattr(prefill, "_compare", counted)
    model = hf_models.tiny("llama")
    for rows in (1, 1, 3, 3):
        generate(model, **embedded(model, rows), drafter="prompt_lookup")
    assert checked == [1, 3]


def test_a_model_whose_trees_fit_no_cache_is_refused_them_after_a_prefill(monkeypatch):
    reason = "its logits differ in a tree"

    def check(model, kind, *, padded=True, tree=False):
        return Fit(reason=reason if tree else None)

    monkeypatch.setattr(prefill, "check_fit", check)
    model = hf_models.tiny("llama")
    with pytest.raises(ValueError, match=reason):
        generate(model, **embedded(model, 1), drafter="prompt_lookup", tree=(2, 1))
    generate(model, **embedded(model, 1), drafter="prompt_lookup")
