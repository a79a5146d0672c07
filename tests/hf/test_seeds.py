"""Seeds: what is random without one, what one repeats, and which seed each sequence has."""

import copy
import json

import numpy as np
import pytest
import torch
from specdec_hf import ModelDrafter, SpeculativeDecoder, TrieTree, generate
from specdec_hf.loop.streaming import run_stream
from specdec_hf.request.sampling import derived_seed, sequence_seeds
from support import hf_models
from support.drafter_proof import with_states
from support.hf_models import Clock, SlowLookup

pytestmark = pytest.mark.quick

NEW = 16
SAMPLED = {"do_sample": True, "temperature": 0.9, "return_dict_in_generate": True}


def equal_prompts(count):
    return {key: value.repeat(count, 1) for key, value in hf_models.prompts((9,)).items()}


def texts(out):
    return [tuple(ids) for ids in out.sequences[:, -NEW:].tolist()]


def entry(name, model, inputs, seed=None, **kwargs):
    ours = {"drafter": None}
    ours |= {key: kwargs.pop(key) for key in ("drafter", "rule") if key in kwargs}
    kwargs = {"max_new_tokens": NEW, **SAMPLED, **kwargs}
    if name == "generate":
        return generate(model, **inputs, **kwargs, **ours, seed=seed)
    decoder = SpeculativeDecoder(**ours)
    if name == "custom_generate":
        return model.generate(**inputs, **kwargs, custom_generate=decoder, seed=seed)
    steps = decoder.stream(model, **inputs, **kwargs, seed=seed)
    return run_stream(steps, lambda step: None)[1]


ENTRIES = ("generate", "custom_generate", "stream")


@pytest.mark.parametrize("name", ENTRIES)
def test_without_a_seed_sampling_is_random_as_torch_is(name):
    model, inputs = hf_models.tiny("llama"), equal_prompts(3)
    torch.manual_seed(0)
    first, second = (entry(name, model, inputs) for _ in range(2))
    assert len({*texts(first), *texts(second)}) == 6
    assert len({*first.stats.seeds, *second.stats.seeds}) == 6
    torch.manual_seed(0)
    again = entry(name, model, inputs)
    assert texts(again) == texts(first)
    assert again.stats.seeds == first.stats.seeds
    assert json.loads(json.dumps(again.stats.to_dict()))["seeds"] == first.stats.seeds


def test_a_sampled_call_takes_one_draw_from_torch_and_a_greedy_one_none():
    model, inputs = hf_models.tiny("llama"), equal_prompts(3)
    for kwargs, draws in (
        ({"do_sample": False}, 0),
        ({"do_sample": True}, 1),
        ({"do_sample": True, "seed": 1}, 0),
    ):
        torch.manual_seed(5)
        generate(model, **inputs, max_new_tokens=2, drafter=hf_models.perturbed("llama"), **kwargs)
        after = torch.get_rng_state()
        torch.manual_seed(5)
        for _ in range(draws):
            torch.empty(3, dtype=torch.int64).random_(-(2**63), None)
        assert torch.equal(torch.get_rng_state(), after)


def test_an_integer_seed_gives_each_sequence_its_own():
    seeds = sequence_seeds(5, 4)
    assert seeds[0] == 5
    assert seeds == [derived_seed(5, b) for b in range(4)]
    assert derived_seed(-3, 7) == -2383670009907484387, (
        "seeds that were recorded must stay what they are"
    )
    model, inputs = hf_models.tiny("llama"), equal_prompts(4)
    out = generate(model, **inputs, **SAMPLED, drafter=None, max_new_tokens=NEW, seed=5)
    assert out.stats.seeds == seeds
    assert len(set(texts(out))) == 4


def test_neighbouring_seeds_share_no_sequence():
    rows = [sequence_seeds(s, 1000) for s in (0, 1, 2, -1, 2**63 - 1, -(2**63))]
    # A seed that was derived may be given to another call.
    rows += [sequence_seeds(s, 1000)[1:] for s in rows[0][1:4]]
    assert len({seed for row in rows for seed in row}) == sum(map(len, rows))
    assert all(-(2**63) <= seed < 2**63 for row in rows for seed in row)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_num_return_sequences_gives_different_texts_in_the_order_of_transformers(name):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    drafter = hf_models.perturbed("llama")
    out = entry(name, model, inputs, num_return_sequences=3, drafter=drafter)
    assert len(set(texts(out))) == len(set(out.stats.seeds)) == 6
    width = inputs["input_ids"].shape[1]
    for key, got in (("input_ids", out.sequences), ("attention_mask", out.attention_mask)):
        assert torch.equal(got[:, :width], inputs[key].repeat_interleave(3, dim=0))
    again = entry(
        name, model, inputs, num_return_sequences=3, drafter=drafter, seed=out.stats.seeds
    )
    assert texts(again) == texts(out)
    several = {key: value.repeat_interleave(3, dim=0) for key, value in inputs.items()}
    assert texts(entry(name, model, several, drafter=drafter, seed=out.stats.seeds)) == texts(out)
    # One seed a prompt: its first sequence keeps it.
    got = entry(name, model, inputs, num_return_sequences=3, drafter=drafter, seed=[7, 8])
    assert got.stats.seeds == [derived_seed(s, k) for s in (7, 8) for k in range(3)]


def test_num_return_sequences_repeats_parameters_of_prompts():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    kwargs = {**SAMPLED, "drafter": None, "max_new_tokens": NEW, "num_return_sequences": 2}
    kwargs["temperature"] = [0.0, 0.9]
    out = generate(model, **inputs, **kwargs)
    first, second, third, fourth = texts(out)
    assert first == second
    assert third != fourth
    seen = []

    def allowed(b, ids):
        seen.append(b)
        return range(1, 9)

    generate(model, **inputs, **kwargs, prefix_allowed_tokens_fn=allowed)
    assert set(seen) == {0, 1, 2, 3}


def test_a_seed_of_one_call_precedes_that_of_the_decoder():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    decoder = SpeculativeDecoder(None, seed=4)
    for seed in (None, 0, 3):
        out = model.generate(
            **inputs, **SAMPLED, max_new_tokens=4, custom_generate=decoder, seed=seed
        )
        assert out.stats.seeds == [4 if seed is None else seed]


def slow_and_fast(inputs, guard, **kwargs):
    """The same call with a drafter that takes a hundred seconds, and with one that takes none: it
    gives back the second that the clock counts for every phase.
    """
    for seconds in (100.0, -1.0):
        clock = Clock()
        yield generate(
            hf_models.tiny("llama"), **inputs, **SAMPLED, drafter=SlowLookup(clock, seconds),
            clock=clock, guard=copy.deepcopy(guard),
            **{"max_new_tokens": 60, "seed": [1, 2], "rule": "token", **kwargs},
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block", "match", "target_only"])
def test_by_default_the_clock_never_changes_a_text(rule):
    """A pause cannot change the text of rule match, nor that of trees without a distribution."""
    tree = TrieTree(2, 3) if rule == "target_only" else None
    slow, fast = slow_and_fast(hf_models.prompts((9, 12)), None, rule=rule, tree=tree)
    assert slow.sequences.tolist() == fast.sequences.tolist()
    stopped = any("drafting pauses" in note for note in slow.stats.notes)
    assert stopped == (rule in ("match", "target_only"))
    assert not any("timing" in note for note in slow.stats.notes)
    if not stopped:
        assert any("drafting goes on" in note for note in slow.stats.notes)
        assert slow.stats.gammas.count(0) == fast.stats.gammas.count(0)


def late_for_ones(state, call):
    """Drafts nothing in the second round for prompts that begin with token 1."""
    propose = state.propose

    def late(texts, limits):
        late = (texts.tokens[:, 0] == 1) & (texts.lengths < 5)
        draft = None if late.all() else propose(texts, limits)
        if draft is not None:
            draft.counts = np.where(late, 0, draft.counts)
        return draft

    state.propose = late


def test_the_plain_round_of_the_guard_does_not_depend_on_the_batch():
    """Alone, the sequences have rounds without drafts before the guard compares."""
    model = hf_models.tiny("llama")
    drafter = with_states(ModelDrafter(hf_models.perturbed("llama")), late_for_ones)
    ids = torch.tensor([[1, 2, 3], [2, 3, 1]]).repeat_interleave(8, dim=0)
    kwargs = {**SAMPLED, "drafter": drafter, "rule": "token", "gamma": 2, "max_new_tokens": 20}
    together = generate(model, ids, **kwargs, seed=list(range(16)))
    alone = generate(model, ids[:8], **kwargs, seed=list(range(8)))
    assert together.stats.gammas[:6] == [0, 2, 2, 2, 2, 0]
    assert alone.stats.gammas[1] == alone.stats.gammas[5] == 0
    assert alone.sequences.tolist() == together.sequences[:8].tolist()
