"""Forwards of one width: in bfloat16 speculation keeps every token, and what cannot is refused."""

import pytest
import torch
from specdec_hf import EagleTree
from specdec_hf.runner import fixed_width
from specdec_hf.runner.fit import Fit, forget_fits
from specdec_hf.runner.policy import ForwardPolicy, Widths
from specdec_hf.runner.spec_runner import SpecRunner
from support.hf_models import (  # noqa: F401  # one_thread is autouse here
    build,
    decode,
    one_thread,
    prompts,
    with_noise,
)


@pytest.fixture(scope="module")
def model():
    return build("llama").to(torch.bfloat16)


@pytest.fixture(scope="module")
def drafter(model):
    return with_noise(model, 0.05)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [(9,), (5, 9, 12)], ids=["alone", "ragged"])
@pytest.mark.parametrize("width", [3, 8])
def test_the_text_is_that_without_speculation(model, drafter, lengths, width):
    plain = decode(model, lengths, fixed_width=width)
    for settings in ({"num_assistant_tokens": 5}, {"num_assistant_tokens": 2}):
        fast = decode(model, lengths, drafter=drafter, fixed_width=width, **settings)
        assert torch.equal(fast.sequences, plain.sequences)
        assert fast.stats.accepted > 5


def rounded_by_own_width(run):
    """Forwards whose rows after the first are rounded as the width that each of them needs."""

    def wrong(self, tokens, *rest):
        logits = run(self, tokens, *rest).clone()
        for b in range(1, len(tokens)):
            step = 2.0 ** -len(tokens[b].unique_consecutive())  # padding repeats a token
            logits[b] = (logits[b] / step).round() * step
        return logits

    return wrong


@pytest.mark.parametrize(("lengths", "equal"), [((9,), True), ((5, 9, 12), False)])
def test_the_comparison_of_ragged_texts_finds_rows_of_other_widths(
    model, drafter, monkeypatch, lengths, equal
):
    """Negative control. Alone, the first row shows nothing of it."""
    monkeypatch.setattr(SpecRunner, "_run", rounded_by_own_width(SpecRunner._run))
    settings = {"fixed_width": 8, "self_check": False, "max_new_tokens": 24}
    plain = decode(model, lengths, **settings)
    fast = decode(model, lengths, drafter=drafter, num_assistant_tokens=5, **settings)
    assert torch.equal(fast.sequences, plain.sequences) == equal


def test_sampled_text_with_rule_match_is_that_without_speculation(model, drafter):
    settings = {"fixed_width": 8, "do_sample": True, "temperature": 0.8, "seed": 3, "rule": "match"}
    plain = decode(model, (5, 9), **settings)
    fast = decode(model, (5, 9), drafter=drafter, **settings)
    assert torch.equal(fast.sequences, plain.sequences)


def test_rows_of_padding_are_dropped_and_forgotten():
    """A row of padding that was kept would shift the rows of the tokens."""
    model = build("llama")
    ids = prompts((9,))["input_ids"]
    narrow = SpecRunner(model, 1, 32)
    wide = SpecRunner(model, 1, 32, ForwardPolicy(Widths(8)))
    with torch.inference_mode():
        for begin, end in ((0, 5), (5, 9)):
            for runner in (wide, narrow):
                runner.tap.open({1})
            got, wanted = (
                runner.forward(ids[:, begin:end], runner.lengths, end - begin)
                for runner in (wide, narrow)
            )
            assert wide.lengths.tolist() == [end]
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            states = [runner.tap.take()[1] for runner in (wide, narrow)]
            assert states[0].shape[1] == end - begin
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


class Uneven(Widths):
    """Negative control: a width that depends on how many tokens are fed."""

    def of(self, size):
        return self.fixed if size > 1 else 1


class Unaligned(Widths):
    """Negative control: slots in view that are no whole blocks."""

    def visible(self, slots):
        return slots + 3 * self.spare_blocks


@pytest.mark.parametrize("wrong", [Uneven, Unaligned])
def test_the_check_of_a_width_finds_rows_that_depend_on_their_neighbours(monkeypatch, wrong):
    # Larger and more exact than the others, so that other kernels give other bits.
    model = build("llama", hidden_size=256, intermediate_size=512)
    forget_fits()
    decode(model, (9, 5, 7), fixed_width=8, max_new_tokens=2)
    forget_fits()
    monkeypatch.setattr(fixed_width, "Widths", wrong)
    with pytest.raises(ValueError, match="fixed_width=8 cannot be kept"):
        decode(model, (9, 5, 7), fixed_width=8, max_new_tokens=2)


def test_the_check_runs_once_for_a_width_and_a_batch_size(model, monkeypatch):
    ran = []
    forget_fits()
    monkeypatch.setattr(fixed_width, "_measure", lambda *args: ran.append(args[2]) or Fit())
    for lengths, width in (((9,), 8), ((7,), 8), ((9,), 4), ((9, 5), 8)):
        decode(model, lengths, fixed_width=width, max_new_tokens=1)
    assert ran == [8, 4, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": (2, 1)}, "fixed_width must be None with tree, got 8"),
        ({"tree": EagleTree(size=4, depth=2)}, "fixed_width must be None with tree, got 8"),
        ({"cache": "dynamic"}, "cache must be 'auto' or 'spec' with fixed_width"),
        ({"fixed_width": 0}, "fixed_width must be at least 1, got 0"),
        ({"num_beams": 2}, "fixed_width must be None with num_beams=2, got 8"),
        ({"drafter": "early_exit:1"}, "fixed_width must be None with a drafter that makes"),
    ],
)
def test_what_has_no_fixed_width_is_refused(model, drafter, settings, message):
    with pytest.raises(ValueError, match=message):
        decode(model, (9,), **{"fixed_width": 8, "drafter": drafter, **settings})
