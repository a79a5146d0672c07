"""Cache book-keeping: reads per round, lengths, given and returned caches, and faults that show."""

import numpy as np
import pytest
import torch
from specdec_hf import SpecCache, generate
from specdec_hf.cache import rows as cache_module
from specdec_hf.cache.rows import make_cache
from specdec_hf.decode import rounds
from specdec_hf.decode.forward import forward_window
from specdec_hf.hf_arguments.call import prepare_call
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import DynamicCache

NEW = 16
RAGGED = (9, 4, 12)


def begin(model, inputs, **options):
    call = prepare_call(model, **inputs, max_new_tokens=NEW, do_sample=False)
    return rounds.begin(model, call, rounds.Options(guard=False, **options))


@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
def test_one_device_read_per_round(drafter, monkeypatch):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    session = begin(model, inputs, drafter=hf_models.drafter_for("llama", drafter))
    packed, other = [], []
    original = rounds.read_round
    allowed = []

    def read_round(verdict):
        allowed.append(True)
        try:
            packed.append(1)
            return original(verdict)
        finally:
            allowed.pop()

    monkeypatch.setattr(rounds, "read_round", read_round)
    reads = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")
    for name in reads:
        method = getattr(torch.Tensor, name)

        def spied(self, *args, _method=method, _name=name, **kwargs):
            if not allowed:
                other.append(_name)
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spied)
    while not session.done:
        rounds.step(session)
    monkeypatch.undo()
    assert other == []
    assert len(packed) == session.stats.rounds == session.stats.device_reads > 1


@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
def test_lengths_count_committed_tokens(drafter):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    session = begin(model, inputs, drafter=hf_models.drafter_for("gemma2", drafter))
    while not session.done:
        before, active = session.history.lengths.copy(), session.history.active.copy()
        steps = rounds.step(session)
        assert (session.cache.lengths == session.history.lengths - 1).all()
        grown = session.history.lengths - before
        for made in steps:
            accepted = sum(made.from_draft)
            assert grown[made.row] == len(made.tokens)
            assert made.finished or grown[made.row] == accepted + 1
        assert (grown[~active] == 0).all()
        if drafter == "model":
            trailing = session.history.lengths - session.drafter._draft.cache.lengths
            full = [m.row for m in steps if len(m.tokens) == 6 and m.kinds[-1] == "bonus"]
            assert (trailing[active] >= 1).all()
            assert all(trailing[row] == 2 for row in full)


@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", hf_models.NAMES)
def test_returned_cache_continues_in_plain_generate(name, lengths):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    whole = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for kind in ["spec", "dynamic"][: 2 if len(lengths) == 1 else 1]:
        first = generate(
            model, **inputs, max_new_tokens=7, do_sample=False, cache=kind,
            drafter=hf_models.perturbed(name), return_dict_in_generate=True,
        )  # fmt: skip
        assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
        rest = model.generate(
            first.sequences, attention_mask=first.attention_mask,
            past_key_values=first.past_key_values, max_new_tokens=NEW - 7, do_sample=False,
        )  # fmt: skip
        assert rest.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("lengths", "cache"), [((9,), "spec"), ((9,), "dynamic"), (RAGGED, "spec")], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_given_cache_changes_nothing(name, lengths, cache):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    whole = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    first = model.generate(
        **inputs, max_new_tokens=7, do_sample=False, return_dict_in_generate=True
    )
    past = first.past_key_values
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 7, dtype=int)], dim=1)
    for drafter in ("prompt_lookup", hf_models.perturbed(name)):
        got = generate(
            model, first.sequences, attention_mask=mask, past_key_values=past, drafter=drafter,
            max_new_tokens=NEW - 7, do_sample=False, cache=cache,
        )  # fmt: skip
        assert got.tolist() == whole.tolist()
    assert past.get_seq_length() == first.sequences.shape[1] - 1
    for layer, (keys, values) in zip(past.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_a_conversation_through_ragged_caches():
    """Rows that ended at different places, a second turn, and the cache of the first."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    kwargs = {"do_sample": False, "eos_token_id": int(free[0, 3]), "pad_token_id": hf_models.PAD}
    first = generate(
        model, **inputs, max_new_tokens=8, drafter=hf_models.perturbed("llama"),
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    assert len({row.new_tokens for row in first.stats.rows}) > 1
    turn = hf_models.prompts((4, 4, 4), seed=9)
    ids = torch.cat([first.sequences, turn["input_ids"]], dim=1)
    mask = torch.cat([first.attention_mask, turn["attention_mask"]], dim=1)
    rest = {"attention_mask": mask, "max_new_tokens": NEW, "drafter": "prompt_lookup", **kwargs}
    cold = generate(model, ids, **rest)
    warm = generate(model, ids, past_key_values=first.past_key_values, **rest)
    assert warm.tolist() == cold.tolist()


def test_rows_of_a_batch_equal_separate_forwards():
    for name in hf_models.NAMES:
        model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
        lengths = np.array(RAGGED)
        cache = SpecCache(model, 3, 4)
        with torch.inference_mode():
            got = forward_window(model, cache, inputs["input_ids"], lengths - max(RAGGED), keep=1)
            more = torch.tensor([[1, 2, 3]] * 3)
            got = forward_window(model, cache, more, lengths, keep=3)
            for row, length in enumerate(RAGGED):
                alone = torch.cat([inputs["input_ids"][row, -length:], more[row]])[None]
                expected = model(alone).logits[0, -3:]
                torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-4)


def test_cache_grows():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    expected = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    session = begin(model, inputs, drafter="prompt_lookup")
    session.cache = SpecCache(model, 1, 2)
    session.budgets[:] = 60
    session.sequences = np.zeros((1, 69), dtype=np.int64)
    session.sequences[:, :9] = inputs["input_ids"].numpy()
    session.history.tokens = np.pad(session.history.tokens, ((0, 0), (0, 60)))
    session.call.max_new_tokens = 60
    while not session.done:
        rounds.step(session)
    assert session.sequences.tolist() == expected.tolist()


def test_cache_errors():
    model = hf_models.tiny("llama")
    with pytest.raises(ValueError, match="cache must be 'auto', 'spec' or 'dynamic', got 'static'"):
        make_cache(model, 1, 8, "static")
    with pytest.raises(ValueError, match="cache='dynamic' needs batch size 1, got 2"):
        make_cache(model, 2, 8, "dynamic")
    cache = SpecCache(model, 1, 8)
    with pytest.raises(ValueError, match="truncate cannot grow a row"):
        cache.truncate(np.array([1]))
    inputs = hf_models.prompts((9,))
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"], past_key_values=past)
    with pytest.raises(ValueError, match="holds 9 tokens, but input_ids has 9 columns"):
        generate(model, **inputs, past_key_values=past, max_new_tokens=2)


def identity_holds(name="gemma2"):
    """Whether batched greedy and match output equal plain decoding, on one short run."""
    model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
    drafter = hf_models.perturbed(name)
    kwargs = {"max_new_tokens": NEW, "guard": False}
    greedy = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    sampled = {"do_sample": True, "temperature": 0.8, "acceptance": "match", "seed": 3}
    plain = generate(model, **inputs, **kwargs, **sampled)
    return (
        greedy.equal(generate(model, **inputs, **kwargs, do_sample=False, drafter=drafter)),
        plain.equal(generate(model, **inputs, **kwargs, **sampled, drafter=drafter)),
    )


def test_control_without_fault():
    assert identity_holds() == (True, True)


@pytest.mark.parametrize("fault", ["stale entry", "shifted position", "no rollback in the mask"])
def test_a_wrong_rollback_is_detected(fault, monkeypatch):
    """Negative controls: the identity tests must reject each of these."""
    if fault == "stale entry":
        # A rejected draft's entry stays where the pending token's belongs.
        def append(caches, entries, positions):
            skip = 1 if entries[0].shape[2] > 1 and int(positions.max()) > 0 else 0
            cache_module_append(caches, [x[:, :, skip:] for x in entries], positions + skip)

        cache_module_append = cache_module.kv_append_
        monkeypatch.setattr(cache_module, "kv_append_", append)
    elif fault == "shifted position":
        window = SpecCache.window

        def shifted(self, starts, size):
            inputs = window(self, starts, size)
            late = self.lengths > 14
            inputs["position_ids"] = inputs["position_ids"] + torch.from_numpy(late)[:, None]
            return inputs

        monkeypatch.setattr(SpecCache, "window", shifted)
    else:
        mask = SpecCache._mask
        monkeypatch.setattr(
            SpecCache, "_mask", lambda self, ids, visible: mask(self, ids + ids.shape[1], visible)
        )
    assert identity_holds() != (True, True)
