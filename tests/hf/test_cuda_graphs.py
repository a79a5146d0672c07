"""Forwards that are replayed: their text, how few are recorded, and what refuses them.

Recorded ops of the CPU take the place of CUDA graphs; they keep tensors and numbers as these do.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hf import recorded_ops
from specdec_hf import PromptLookupDrafter, SpeculativeDecoder, generate
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafting.drafter import Needs
from specdec_hf.extras.compiled import compiled_call, cuda_graphs, verification
from specdec_hf.loop import begin
from specdec_hf.runner import forwards
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.protocol import CACHE_NAME
from support.hf_models import build, decode, prompts, with_noise
from torch.nn.functional import linear

WIDTHS = len(recorded_ops.FEW_WIDTHS)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    recorded_ops.record_ops(monkeypatch)


@pytest.fixture
def llama():
    return build("llama", layers=1)


def fast(model, lengths=(9,), **settings):
    return decode(model, lengths, compile=True, **settings)


@pytest.mark.parametrize("kind", ["chain", "window", "tree"])
def test_the_text_is_that_without_graphs(kind):
    """Graphs of chains read tokens and lengths alone, and make positions and masks themselves."""
    window = {"sliding_window": 6} if kind == "window" else {}
    model = build("mistral" if window else "llama", layers=1, **window)
    lengths = (9,) if kind == "chain" else (12, 4, 7)
    settings = {"drafter": ModelDrafter(with_noise(model, 0.05))}
    if kind == "tree":
        settings = {"drafter": with_noise(model, 0.05), "tree": (2, 1, 1)}
    eager = decode(model, lengths, **settings)
    for _ in range(2):
        out = fast(model, lengths, **settings)
        made = out.stats.compiled
        assert torch.equal(out.sequences, eager.sequences)
        assert (made.eager, made.without_cuda_graphs) == ("", "")
        assert out.stats.notes == eager.stats.notes
        assert made.replayed == out.stats.rounds
        assert made.cuda_graphs == WIDTHS + (kind == "window")  # of verification, in long texts
        for graph in graphs_of(model)._made.values():
            assert sum(isinstance(x, torch.Tensor) for x in graph._inputs) == 2 + 2 * (
                kind == "tree"
            )
        for draft in made.drafts:
            assert draft.replayed > 0
            assert draft.cuda_graphs == WIDTHS + (kind == "window")  # all steps of a draft


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "match", "lenient"])
def test_a_round_replays_a_draft_and_then_a_forward_with_verification(llama, monkeypatch, rule):
    """As many drafts are accepted as without graphs, so each was drawn from the same rows."""
    settings = {"max_new_tokens": 48, "num_assistant_tokens": 4, "guard": False}
    if rule != "greedy":
        settings |= {"do_sample": True, "temperature": 0.8, "top_k": 20, "rule": rule, "seed": 5}
    settings |= {"lenience": 0.5} if rule == "lenient" else {}
    draft = ModelDrafter(with_noise(llama, 0.2))
    eager = decode(llama, (12, 4, 7), drafter=draft, **settings)
    out = fast(llama, (12, 4, 7), drafter=draft, **settings)
    assert torch.equal(out.sequences, eager.sequences)
    assert out.stats.accepted == eager.stats.accepted < eager.stats.drafted
    (made,) = out.stats.compiled.drafts
    assert (made.cuda_graphs, made.without_cuda_graphs) == (WIDTHS + 1, "")
    assert out.stats.notes == eager.stats.notes
    assert made.replayed < 2 * out.stats.rounds + 12  # what is read, and then the draft
    verified = out.stats.compiled.verified
    assert out.stats.rounds - 7 < verified < out.stats.rounds  # kinds that came twice in a row
    monkeypatch.setattr(verification, "refusal", lambda session: "asked for")
    apart = fast(llama, (12, 4, 7), drafter=draft, **settings)
    assert torch.equal(out.logprobs, apart.logprobs)
    assert (apart.stats.compiled.verified, apart.stats.compiled.verified_apart) == (0, "asked for")


def test_a_draft_that_goes_token_by_token_says_why(llama):
    name, draft = "draft model LlamaForCausalLM drafts token by token", with_noise(llama, 0.2)
    for own, schedule, reason in (
        ({"temperature": 0.5}, "constant", "it has a temperature of its own"),
        ({}, "specdec++", "the schedule reads each token"),
    ):
        settings = {"do_sample": True, "num_assistant_tokens_schedule": schedule}
        out = fast(llama, drafter=ModelDrafter(draft, **own), **settings)
        assert f"round 1: {name}: {reason}" in out.stats.notes


class Asking(PromptLookupDrafter):
    needs = Needs(rejections=True)


def accept_all(P, Q, tokens, uniforms):
    return len(tokens), P[-1]


def test_rounds_that_need_logits_verify_beside_the_graph(llama):
    draft = with_noise(llama, 0.2)
    for more, reason in (
        ({"tree": (2, 1)}, "trees are verified"),
        ({"rule": accept_all, "do_sample": True}, "the rule is a function"),
        ({"ablate": "residual", "do_sample": True}, "a part of the verification is left out"),
        ({"repetition_penalty": 1.2}, "logits are processed"),
        ({"output_logits": True}, "the call keeps outputs of each token"),
        ({"trace": lambda round: None}, "rounds are traced"),
        ({"drafter": Asking()}, "the drafter reads logits of the target"),
    ):
        settings = {"drafter": draft, "seed": 5, **more}
        out = fast(llama, **settings)
        made = out.stats.compiled
        assert torch.equal(out.sequences, decode(llama, **settings).sequences)
        assert (made.verified, made.verified_apart, made.without_cuda_graphs) == (0, reason, "")
        assert made.replayed == out.stats.rounds


# The tensors that a graph with verification reads, where all parameters count.
READ = ("ids", "starts", "drafts", "rows", "sums", "thresholds", "seeds", "temperature", "top_k")


def overwriting(left_out):
    """A replay before which all inputs, and after which all outputs, hold something else."""
    replay = cuda_graphs.Recording.__call__

    def call(self, inputs):
        own = [x for x in self._inputs if isinstance(x, torch.Tensor)]
        recorded_ops.overwrite(own)
        kept = own[READ.index(left_out)] if left_out and len(own) == len(READ) else None
        pairs = zip(self._inputs, inputs, strict=True)
        made = replay(self, [mine if mine is kept else given for mine, given in pairs])
        recorded_ops.overwrite(self.outputs)
        return made

    return call


@pytest.mark.parametrize("left_out", ["", *READ])
def test_a_graph_with_verification_reads_the_round_under_way(llama, monkeypatch, left_out):
    settings = {"num_assistant_tokens": 3, "max_new_tokens": 32, "drafter": with_noise(llama, 0.2)}
    settings |= {"do_sample": True, "temperature": 0.8, "top_k": 20, "rule": "token", "seed": 5}
    eager = decode(llama, (12, 4, 7), **settings)
    monkeypatch.setattr(cuda_graphs.Recording, "__call__", overwriting(left_out))
    fast(llama, (12, 4, 7), **settings | {"seed": 6, "temperature": 0.7, "top_k": 9})
    out = fast(llama, (12, 4, 7), **settings)
    made = out.stats.compiled
    assert torch.equal(out.sequences, eager.sequences)
    assert 0 < out.stats.accepted == eager.stats.accepted < out.stats.drafted
    assert made.replayed == out.stats.rounds
    # The first replay is compared with the ops that it replays.
    assert (made.verified > 0, made.verified_apart == "") == (not left_out, not left_out)


def test_a_verification_that_reads_the_device_leaves_forwards_their_graphs(llama, monkeypatch):
    def reading(*given, packed=verification.packed):
        int(given[0].num_accepted.max())
        return packed(*given)

    monkeypatch.setattr(verification, "packed", reading)
    out = fast(llama)
    made = out.stats.compiled
    assert "cannot be recorded" in made.verified_apart
    assert (made.verified, made.without_cuda_graphs, made.replayed) == (0, "", out.stats.rounds)
    assert torch.equal(out.sequences, decode(llama).sequences)


def few_slots(monkeypatch):
    """Let the slots that a forward sees, and the buffers, grow several times in a call."""
    monkeypatch.setattr(forwards, "LEAST_SLOTS", 16)
    monkeypatch.setattr(begin, "SLOTS_AHEAD", 2)
    monkeypatch.setattr(compiled_call, "BUCKETS", (1, 4))


def graphs_of(model):
    return record_of(model).compiled.cuda_graphs


def test_buffers_that_grow_get_graphs_of_their_own(llama, monkeypatch):
    few_slots(monkeypatch)
    capacity = 0
    for length, tokens in ((70, 12), (70, 100), (69, 12)):
        settings = {"lengths": (length,), "max_new_tokens": tokens}
        out = fast(llama, **settings)
        assert torch.equal(out.sequences, decode(llama, **settings).sequences)
        assert out.stats.compiled.replayed == out.stats.rounds - 1  # the prompt is not
        assert out.stats.compiled.cuda_graphs <= 2 * WIDTHS
        assert (graphs_of(llama)._capacity > capacity) == (length == 70)
        capacity = graphs_of(llama)._capacity


def test_of_two_calls_at_once_one_runs_without_graphs(llama):
    eager = decode(llama)
    rounds = SpeculativeDecoder(None, compile=True).stream(
        llama, **prompts((9,)), max_new_tokens=12, do_sample=False
    )
    tokens = list(next(rounds).tokens)
    with_other = fast(llama, (7,))
    assert torch.equal(with_other.sequences, decode(llama, (7,)).sequences)
    assert with_other.stats.compiled.replayed == 0
    reason = "another cache has the buffers that the graphs belong to"
    assert with_other.stats.compiled.without_cuda_graphs == reason
    assert f"LlamaForCausalLM runs without CUDA graphs: {reason}" in with_other.stats.notes
    for step in rounds:
        tokens += step.tokens
    assert tokens == eager.sequences[0, 9:].tolist()
    assert fast(llama, (7,)).stats.compiled.replayed > 0


def test_a_given_cache_moves_into_the_buffers_of_an_earlier_call(llama):
    first = decode(llama)
    given = {"attention_mask": first.attention_mask, "past_key_values": first.past_key_values}
    how = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    runs = [
        generate(llama, first.sequences, **given, **how, drafter=None, compile=compiled)
        for compiled in (False, True, True)
    ]
    assert all(torch.equal(out.sequences, runs[0].sequences) for out in runs)
    assert runs[2].stats.compiled.replayed == runs[2].stats.rounds


def test_a_cache_that_the_caller_keeps_stays_as_it_is(llama):
    kept = fast(llama).past_key_values
    before = [(layer.keys.clone(), layer.values.clone()) for layer in kept.layers]
    assert fast(llama, (7,)).stats.compiled.replayed > 0
    for layer, (keys, values) in zip(kept.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_a_call_that_is_broken_off_gives_the_buffers_back(llama):
    def put(value):
        if value.numel() < 9:
            raise InterruptedError

    drafter = ModelDrafter(with_noise(llama, 0.05))
    with pytest.raises(InterruptedError) as caught:
        fast(llama, drafter=drafter, streamer=SimpleNamespace(put=put, end=list))
    again = fast(llama, drafter=drafter)
    assert caught.tb is not None  # it refers to the call
    assert again.stats.compiled.replayed == again.stats.rounds
    assert again.stats.compiled.drafts[0].replayed > 0
    assert torch.equal(again.sequences, decode(llama).sequences)


def test_weights_that_move_end_the_recordings(llama):
    fast(llama)
    llama.lm_head.weight.data = llama.lm_head.weight.data.flip(0)
    out = fast(llama)
    assert out.stats.compiled.replayed > 0
    assert torch.equal(out.sequences, decode(llama).sequences)


def reads_the_device(module, args, kwargs):
    int(kwargs["position_ids"].max())


def reads_the_length(module, args, kwargs):
    if kwargs[CACHE_NAME] is not None:
        kwargs[CACHE_NAME].get_seq_length()


def test_what_reads_while_it_runs_is_not_recorded(llama, monkeypatch):
    cases = (
        (type(llama.model.rotary_emb), reads_the_device, "cannot be recorded"),
        (type(llama.model), reads_the_length, "the model reads the cache's length"),
    )
    eager = decode(llama)
    for owner, reads, reason in cases:
        model, forward = build("llama", layers=1), owner.forward

        def reading(self, *args, reads=reads, forward=forward, **kwargs):
            reads(self, args, kwargs)
            return forward(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, "forward", reading)
            for _ in range(2):
                out = fast(model)
                assert reason in out.stats.compiled.without_cuda_graphs
                assert out.stats.compiled.eager == ""
                assert torch.equal(out.sequences, eager.sequences)
                assert any("runs without CUDA graphs" in note for note in out.stats.notes)


@pytest.mark.parametrize("left_out", ["tokens", "starts", "copies"])
def test_the_self_check_finds_inputs_that_a_replay_leaves_out(llama, monkeypatch, left_out):
    replay = recorded_ops.leaving_out(("tokens", "starts"), left_out)
    monkeypatch.setattr(cuda_graphs.Recording, "__call__", replay)
    settings = {}
    if left_out == "copies":
        settings = {"drafter": with_noise(llama, 0.05), "tree": (2, 1)}
    out = fast(llama, **settings)
    assert "its logits differ from the model's own" in out.stats.compiled.without_cuda_graphs
    assert out.stats.compiled.eager == ""
    assert torch.equal(out.sequences, decode(llama).sequences)


@pytest.mark.parametrize("kept", [False, True])
def test_casts_that_autocast_frees_are_not_recorded(monkeypatch, kept):
    outcome = contextlib.nullcontext()
    if kept:  # negative control
        monkeypatch.setattr(cuda_graphs, "_no_kept_casts", contextlib.nullcontext)
        outcome = pytest.raises(recorded_ops.FreedMemory)
    weight = torch.ones(3, 3, requires_grad=True)  # autocast keeps no casts of others
    made, outputs = cuda_graphs.Recordings(recorded_ops.OpRecorder(), 1.0), []

    def run(value):
        given = {"x": torch.full((1, 3), value)}
        outputs.append(made.replay(lambda given: [linear(given["x"], weight)], given)[0])

    with torch.no_grad():
        run(1.0)
        with torch.autocast("cpu", torch.bfloat16):
            run(2.0)
            assert torch.is_autocast_cache_enabled()
        with torch.autocast("cpu", torch.bfloat16), outcome:
            run(3.0)
    assert [x[0, 0].item() for x in outputs] == [3, 6, 9][: 2 if kept else 3]
    assert len(made) == 2, "one with autocast and one without"
    assert made.reason == ""
