"""The caches of the loop: lengths, prompts, given and returned caches, reads of a round."""

import numpy as np
import pytest
import torch
from hf.recorded_ops import spied_reads
from specdec_hf import EagleTree, TreeSpec, generate
from specdec_hf.drafters.growing_tree import GrowingTreeState
from specdec_hf.drafting import checks
from specdec_hf.extras import prompts_alone
from specdec_hf.loop import rounds
from specdec_hf.loop.begin import begin as begin_call
from specdec_hf.loop.commit import read_verdict
from specdec_hf.options import Options
from specdec_hf.request.entry import prepare_call
from specdec_hf.runner import spec_cache
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.protocol import CacheRequest, to_device
from specdec_hf.runner.self_check import LARGEST_WINDOW
from specdec_hf.runner.spec_runner import SpecRunner
from support import hf_models
from support.hf_models import head_folder

from specdec_kernels import Verdict

pytestmark = pytest.mark.quick

NEW = 16
RAGGED = (9, 4, 12)


def begin(model, inputs, **options):
    call = prepare_call(model, **inputs, max_new_tokens=NEW, do_sample=False)
    return begin_call(
        model,
        call,
        Options(**{"drafter": None, "guard": False, "num_assistant_tokens": 5, **options}),
    )


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        ("prompt_lookup", None), ("model", None), ("model", TreeSpec.branching((3, 2, 1))),
        ("model", EagleTree(width=3, depth=4, size=9)),
    ],
    ids=str,
)  # fmt: skip
def test_a_round_reads_from_the_device_once(drafter, tree):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    size = {} if tree is None else {"num_assistant_tokens": None, "tree": tree}
    session = begin(model, inputs, drafter=hf_models.drafter_for("llama", drafter), **size)
    # A draft's tokens are read where they are on the host, which this test's are.
    # Scores of a growing tree, accepted paths and prompts are too, and on a CPU alone.
    allowed = (
        (rounds, "read_verdict"), (checks, "read_chain"), (GrowingTreeState, "_continues"),
        (spec_cache, "_is_in_place"), (prompts_alone, "_without_padding"),
    )  # fmt: skip
    with spied_reads(*allowed) as (calls, others):
        while not session.done:
            rounds.step(session)
    assert others == []
    assert calls["read_verdict"] == session.stats.rounds == session.stats.device_reads > 1


@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
def test_lengths_count_committed_tokens(drafter):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    session = begin(model, inputs, drafter=hf_models.drafter_for("gemma2", drafter))
    while not session.done:
        before, active = session.history.lengths.copy(), session.history.active.copy()
        steps = rounds.step(session)
        assert (session.runner.lengths == session.history.lengths - 1).all()
        grown = session.history.lengths - before
        for appended in steps:
            accepted = sum(appended.from_draft)
            assert grown[appended.sequence] == len(appended.tokens)
            assert appended.finished or grown[appended.sequence] == accepted + 1
        assert (grown[~active] == 0).all()
        if drafter == "model":
            trailing = session.history.lengths - session.state.stepper.runner.lengths
            full = [s.sequence for s in steps if len(s.tokens) == 6 and s.kinds[-1] == "bonus"]
            assert (trailing[active] >= 1).all()
            assert all(trailing[b] == 2 for b in full)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", hf_models.NAMES)
def test_returned_cache_continues_in_plain_generate(name, lengths):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    whole = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for kind in ["spec", "dynamic"][: 2 if len(lengths) == 1 else 1]:
        drafter = hf_models.perturbed(name)
        first = hf_models.decode(model, lengths, max_new_tokens=7, cache=kind, drafter=drafter)
        assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
        rest = model.generate(
            first.sequences, attention_mask=first.attention_mask,
            past_key_values=first.past_key_values, max_new_tokens=NEW - 7, do_sample=False,
        )  # fmt: skip
        assert rest.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("name", "lengths", "cache"),
    [
        ("llama", (9,), "spec"), ("gpt2", (9,), "dynamic"), ("gpt2", RAGGED, "spec"),
        *(("gemma2", (14, 9, 12), cache) for cache in ("spec", "aligned", "dynamic")),
    ],
)  # fmt: skip
def test_given_cache_changes_nothing(name, lengths, cache):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    whole = model.generate(**inputs, max_new_tokens=NEW + 7, do_sample=False)
    first = model.generate(
        **inputs, max_new_tokens=7, do_sample=False, return_dict_in_generate=True
    )
    past = first.past_key_values
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 7, dtype=int)], dim=1)
    for drafter in ("prompt_lookup", hf_models.perturbed(name)):
        got = generate(
            model, first.sequences, attention_mask=mask, past_key_values=past, drafter=drafter,
            max_new_tokens=NEW, do_sample=False, cache=cache, guard=False,
        )  # fmt: skip
        assert got.tolist() == whole.tolist()
    assert past.get_seq_length() == first.sequences.shape[1] - 1
    for layer, (keys, values) in zip(past.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize(
    "mask",
    [
        [[0, 0, 1, 1, 1, 1]], [[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]],
        [[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1]],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.covering(test=1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_cache_returned_by_aligned_has_the_columns_of_the_sequences(name, mask):
    model, kwargs = hf_models.tiny(name), {"do_sample": False, "pad_token_id": hf_models.PAD}
    mask = torch.tensor(mask)
    ids = torch.arange(5, 11).repeat(len(mask), 1)
    first = generate(
        model, ids, attention_mask=mask, max_new_tokens=7, cache="aligned", guard=False,
        drafter=hf_models.perturbed(name), return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    own = model.generate(
        ids, attention_mask=mask, max_new_tokens=7, return_dict_in_generate=True, **kwargs
    )
    assert first.sequences.tolist() == own.sequences.tolist()
    held = first.attention_mask[:, :-1].bool()
    for got, expected in zip(first.past_key_values.layers, own.past_key_values.layers, strict=True):
        for pair in ((got.keys, expected.keys), (got.values, expected.values)):
            ours, plain = (x.transpose(1, 2)[held] for x in pair)
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_a_second_turn_continues_the_cache_of_sequences_that_ended_at_different_places():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    kwargs = {"do_sample": False, "eos_token_id": int(free[0, 3]), "pad_token_id": hf_models.PAD}
    drafter = hf_models.perturbed("llama")
    first = hf_models.decode(model, RAGGED, max_new_tokens=8, drafter=drafter, **kwargs)
    assert len({one.new_tokens for one in first.stats.sequences}) > 1
    turn = hf_models.prompts((4, 4, 4), seed=9)
    ids = torch.cat([first.sequences, turn["input_ids"]], dim=1)
    mask = torch.cat([first.attention_mask, turn["attention_mask"]], dim=1)
    rest = {"attention_mask": mask, "max_new_tokens": NEW, "drafter": "prompt_lookup", **kwargs}
    cold = generate(model, ids, **rest)
    warm = generate(model, ids, past_key_values=first.past_key_values, **rest)
    assert warm.tolist() == cold.tolist()


def test_a_cache_of_the_caller_may_be_called_cache_as_transformers_does():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    first = hf_models.decode(model, (9,), max_new_tokens=7, drafter=None)
    past, rest = first.past_key_values, {"max_new_tokens": 5, "do_sample": False}
    want = generate(model, first.sequences, past_key_values=past, **rest)
    assert generate(model, first.sequences, cache=past, **rest).tolist() == want.tolist()
    with pytest.raises(ValueError, match="past_key_values holds 15 tokens, but input_ids has 9"):
        generate(model, inputs["input_ids"], cache=past)
    two = first.sequences.repeat(2, 1)
    holes = torch.ones_like(two).index_fill(1, torch.tensor([3]), 0)
    for mask in (None, holes):  # with holes the model's own prefill reads the input
        with pytest.raises(ValueError, match="past_key_values must hold 2 sequences as input_ids"):
            generate(model, two, cache=past, attention_mask=mask)
    with pytest.raises(ValueError, match="cache and past_key_values are the same argument, got"):
        generate(model, first.sequences, cache=past, past_key_values=past)


def test_a_cache_of_lengths_is_continued_and_one_of_another_batch_is_refused():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    runner = SpecRunner(model, 3, 16)
    with torch.inference_mode():
        runner.forward(inputs["input_ids"], np.array(RAGGED) - max(RAGGED), 1)
    runner.truncate(np.array(RAGGED))
    longer = {name: torch.nn.functional.pad(x, (0, 1), value=1) for name, x in inputs.items()}
    how = {"max_new_tokens": NEW, "do_sample": False}
    warm = generate(model, **longer, **how, past_key_values=runner.cache)
    assert warm.tolist() == generate(model, **longer, **how).tolist()
    alone = {name: x[:1] for name, x in longer.items()}
    with pytest.raises(ValueError, match="must hold 1 sequences as input_ids does, got 3"):
        generate(model, **alone, **how, past_key_values=runner.cache)


def test_a_layer_without_a_cache_of_its_own_moves_nothing_and_those_after_it_move():
    device, entry = torch.device("cpu"), (torch.ones(1, 2, 3, 4), torch.full((1, 2, 3, 4), 2.0))
    given, taken = (
        spec_cache.SpecCache(hf_models.build("llama", layers=3).config, size, 8, device)
        for size in (1, 2)
    )
    given.move_cursor(torch.zeros(1, dtype=torch.int64), 0, 3)
    given.fill([entry, None, entry], np.array([3]))
    taken.take(1, given)
    assert taken.lengths.tolist() == [0, 3]
    first, none, last = taken.spec_layers
    assert not none.is_initialized
    for layer in (first, last):
        assert all(torch.equal(x[1:, :, :3], y) for x, y in zip(layer.buffers, entry, strict=True))


@pytest.mark.parametrize("cache", ["spec", "dynamic"])
@pytest.mark.filterwarnings("error::FutureWarning")
def test_no_forward_is_called_by_a_name_that_transformers_gives_up(cache):
    model, inputs = hf_models.build("llama"), hf_models.prompts((9,))
    kwargs = {"max_new_tokens": 7, "do_sample": False, "drafter": "prompt_lookup", "cache": cache}
    first = generate(model, **inputs, **kwargs, return_dict_in_generate=True)
    generate(model, first.sequences, past_key_values=first.past_key_values, **kwargs)


def test_lengths_on_the_device_stay_when_those_of_the_host_change():
    """The CPU is a device too; and what is written there does not reach the host's."""
    lengths = np.array([3, 7])
    moved = to_device(lengths, torch.device("cpu"))
    lengths += 1
    assert moved.tolist() == [3, 7]
    moved.zero_()
    assert lengths.tolist() == [4, 8]


def test_sequences_of_a_batch_equal_separate_forwards():
    for name in hf_models.NAMES:
        model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
        lengths = np.array(RAGGED)
        runner = SpecRunner(model, 3, 4)  # grows in both forwards
        with torch.inference_mode():
            got = runner.forward(inputs["input_ids"], lengths - max(RAGGED), 1)
            more = torch.tensor([[1, 2, 3]] * 3)
            got = runner.forward(more, lengths, 3)
            for b, length in enumerate(RAGGED):
                alone = torch.cat([inputs["input_ids"][b, -length:], more[b]])[None]
                expected = model(alone).logits[0, -3:]
                torch.testing.assert_close(got[b], expected, rtol=1e-4, atol=1e-4)


def test_a_forward_never_sees_all_slots():
    """Where it did, a compiled forward would be made again."""
    runner = SpecRunner(hf_models.build("llama"), 1, 8)
    runner.window(np.array([0]), 8)
    assert runner.cache.cursor.visible == 8 < runner.cache.cursor.capacity


def test_the_identities_hold_in_the_cache_of_a_batch():
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    drafter = hf_models.perturbed("gemma2")
    # The self-check would find a fault first, and another cache would take over.
    kwargs = {"max_new_tokens": NEW, "guard": False, "cache": "spec", "self_check": False}
    greedy = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert greedy.equal(generate(model, **inputs, **kwargs, do_sample=False, drafter=drafter))
    sampled = {"do_sample": True, "temperature": 0.8, "rule": "match", "seed": 3}
    plain = generate(model, **inputs, **kwargs, **sampled, drafter=None)
    assert plain.equal(generate(model, **inputs, **kwargs, **sampled, drafter=drafter))


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
@pytest.mark.parametrize(("window", "length"), [(200, 9), (200, 190), (12, 4), (12, 20)])
def test_a_window_is_masked_where_it_ends_or_the_self_check_passed_its_end(
    window, length, drafter, forwards
):
    model = hf_models.build("mistral", sliding_window=window)
    inputs = hf_models.prompts((length,))
    choose_cache(model, CacheRequest(1, "spec"))
    forwards.clear()
    settings = {"max_new_tokens": NEW, "do_sample": False}
    text = generate(model, **inputs, **settings, drafter=drafter, guard=False, compile=False)
    assert text.tolist() == model.generate(**inputs, **settings).tolist()
    for _, start, size, left_out in forwards:
        inside = window > LARGEST_WINDOW and start + size < window
        assert left_out == (inside and (start == 0 or size == 1))


UNLIKE, ALIKE = (9, 200, 5), (60, 64, 50)
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_each_prompt_is_read_alone_where_padding_would_cost_more(drafter):
    model, shapes = hf_models.build("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    inputs = hf_models.prompts(UNLIKE)
    plain = model.generate(**inputs, **SETTINGS)
    shapes.clear()
    out = generate(model, **inputs, **SETTINGS, drafter=drafter, self_check=False)
    assert torch.equal(out, plain)
    assert shapes[:3] == [(1, length) for length in UNLIKE]
    assert all(rows == 3 for rows, _ in shapes[3:])
    # Prompts of about one length are read together.
    shapes.clear()
    generate(model, **hf_models.prompts(ALIKE), **SETTINGS, drafter=drafter, self_check=False)
    assert shapes[0] == (3, max(ALIKE))


@pytest.mark.parametrize("drafter", [None, "eagle3"])
def test_a_prompt_of_several_sequences_is_read_once(drafter, tmp_path):
    model, shapes = hf_models.build("llama", layers=4), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    drafter = drafter and f"eagle3:{head_folder(model, tmp_path)}"
    prompts = [[8, 6, 7, 5, 3, 0, 9] * 9, [1, 6, 7, 5, 3, 0, 9] * 9, [0, 6], [6]]
    order = (0, 1, 0, 2, 0, 3)
    ids = torch.tensor([[0] * (63 - len(prompts[k])) + prompts[k] for k in order])
    mask = torch.tensor([[0] * (63 - len(prompts[k])) + [1] * len(prompts[k]) for k in order])
    options = {
        "max_new_tokens": 9, "do_sample": True, "rule": "match", "drafter": drafter, "guard": False,
        "num_assistant_tokens_schedule": "constant", "return_dict_in_generate": True,
        "self_check": False, "compile": False,
    }  # fmt: skip
    seeds = list(range(6))
    out = generate(model, ids, attention_mask=mask, seed=seeds, **options)
    assert shapes[:4] == [(1, 63), (1, 63), (1, 2), (1, 1)]
    for b, k in enumerate(order):
        ids = torch.tensor([prompts[k]])
        one = generate(model, ids, attention_mask=torch.ones_like(ids), seed=[b], **options)
        assert out.sequences[b, 63:].tolist() == one.sequences[0, len(prompts[k]) :].tolist()
        assert out.stats.sequences[b].to_dict() == one.stats.sequences[0].to_dict()
    shapes.clear()
    ids = torch.tensor([prompts[0]] * 4)  # without padding
    generate(model, ids, attention_mask=torch.ones_like(ids), seed=seeds[:4], **options)
    assert shapes[0] == (1, 63)
    assert shapes[1][0] == 4


class OnDevice(torch.Tensor):
    """A tensor on the host that calls itself one on a device, so that its read is packed."""

    device = torch.device("cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl  # results are plain tensors


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_a_round_is_read_as_its_tensors_hold_it(kind, ids):
    verdict = Verdict(
        tokens=torch.tensor([[11, 12, 13, -1], [21, -1, -1, -1]], dtype=ids),
        num_accepted=torch.tensor([2, 0], dtype=torch.int32),
        status=torch.tensor([4, 8], dtype=torch.int32),
        logprobs=torch.tensor([[-0.5, -1e-30, -torch.inf, 0], [-3.25, 0, 0, 0]]),
        accept_probs=torch.zeros(2, 3),
    )
    extra = torch.tensor([[31, 32], [33, 34]]), torch.tensor([[41], [42]], dtype=torch.int32)
    with spied_reads() as (_, reads):
        read = read_verdict(
            Verdict(*(x.as_subclass(kind) for x in verdict)),
            {str(n): x.as_subclass(kind) for n, x in enumerate(extra)},
        )
    assert (reads == ["cpu", "numpy"]) == (kind is OnDevice)
    for name in ("tokens", "num_accepted", "status", "logprobs"):
        assert getattr(read, name).tolist() == getattr(verdict, name).tolist()
    assert [x.tolist() for x in read.draft.values()] == [x.tolist() for x in extra]
    kinds = (read.tokens, read.num_accepted, *read.draft.values())
    assert {str(x.dtype) for x in kinds} == {"int64"}
