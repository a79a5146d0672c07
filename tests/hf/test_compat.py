"""The functions of Speculative-Decoding: greedy text, distributions, beams, caches, errors."""

import math
import re
from pathlib import Path

import proofs
import pytest
import torch
from proofs import SIGNIFICANCE, chi_square
from specdec_hf import generate
from specdec_papers import compat
from specdec_papers.compat.logits_processors import GREEDY
from support import hf_models
from transformers import DynamicCache

ROOT = Path(__file__).parents[2]

NEW, NO_END = 20, 500  # an id beyond the vocabulary ends nothing
PROMPT = hf_models.prompts((9,))["input_ids"][0].tolist()
PROCESSORS = {
    "multinomial": compat.MultinomialProcessor(0.7),
    "top-k": compat.TopKProcessor(0.7, top_k=9),
    "nucleus": compat.NucleusProcessor(1.0, top_p=0.8),
    "cold nucleus": compat.NucleusProcessor(0.6, top_p=0.8),
    "top-k nucleus": compat.TopKNucleusProcessor(1.0, top_k=9, top_p=0.8),
    "hot top-k nucleus": compat.TopKNucleusProcessor(1.7, top_k=9, top_p=0.8),
}


class WithoutEven(compat.GreedyProcessor):
    """Writes to the logits that it gets, as the program's own processors do."""

    def _process(self, logits):
        logits[..., ::2] = -1e20
        return logits


class ColdWithoutEven(compat.MultinomialProcessor):
    _process = WithoutEven._process


def plain(name="llama", **settings):
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NO_END, **settings}
    out = hf_models.tiny(name).generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(PROMPT) :].tolist()


def speculative(name="llama", drafter=None, **settings):
    settings = {"max_gen_len": NEW, "eos_tokens_id": NO_END, **settings}
    drafter = drafter or hf_models.perturbed(name, 0.2)
    return compat.speculative_generate(PROMPT, drafter, hf_models.tiny(name), **settings)


def filters(processor):
    return {n: getattr(processor, n) for n in ("top_k", "top_p") if hasattr(processor, n)}


def distribution(processor, row):
    """A processor's distribution by its definition: filters at temperature 1, then the temperature.

    Returns [V] float64.
    """
    kept = proofs.filtered_distribution(row, **filters(processor)) > 0
    cold = proofs.filtered_distribution(row, temperature=processor.temperature)
    cold = torch.where(kept, cold, 0.0)
    return cold / cold.sum()


def rows(number=6):
    return 2 * torch.randn(number, hf_models.VOCAB, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_texts_are_those_of_model_generate(name):
    want, model = plain(name), hf_models.tiny(name)
    assert compat.autoregressive_generate(PROMPT, model, NEW, eos_tokens_id=500) == want
    for settings in ({}, {"gamma": 1}, {"gamma": 0}, {"use_egag": True, "gamma_max": 7}):
        text, rate = speculative(name, **settings)
        assert text == want
        assert (0 < rate < 1) == (settings.get("gamma") != 0)
    assert speculative(name, drafter=model) == (want, 1.0)


def test_token_1_ends_a_text_where_no_other_is_named():
    """And token 0 does not."""
    model = hf_models.build("llama", vocab_size=5)
    whole = compat.autoregressive_generate([1, 2, 3], model, 30, eos_tokens_id=NO_END)
    assert 0 in whole[: whole.index(1)]
    text = compat.autoregressive_generate([1, 2, 3], model, 30)
    assert text == whole[: whole.index(1) + 1]


def test_processors_of_the_callers_own_change_target_and_text():
    want = plain(suppress_tokens=list(range(0, hf_models.VOCAB, 2)))
    assert want != plain()
    assert speculative(logits_processor=WithoutEven())[0] == want
    model = hf_models.tiny("llama")
    text = compat.autoregressive_generate(PROMPT, model, 30, ColdWithoutEven(0.5), NO_END)
    assert len(text) == 30
    assert all(token % 2 for token in text)


def asked(monkeypatch, processor, **settings):
    found = {}

    def record(model, **kwargs):
        found.update(kwargs)
        return generate(model, **kwargs)

    monkeypatch.setattr(compat.decoding, "generate", record)
    speculative(logits_processor=processor, **settings)
    return found


@pytest.mark.parametrize("case", PROCESSORS)
def test_the_loop_samples_from_the_distribution_of_a_processor(case, monkeypatch):
    processor = PROCESSORS[case]
    given = asked(monkeypatch, processor)
    of_op = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    assert (given["rule"], given["do_sample"]) == ("token", True)
    for row in rows():
        made = row[None].clone()
        for process in given.get("logits_processor", ()):
            made = process(None, made)
        found = proofs.filtered_distribution(made[0], **of_op)
        torch.testing.assert_close(found, distribution(processor, row))
    after = {"temperature": processor.temperature, **filters(processor)}
    late = [proofs.filtered_distribution(row, **after) for row in rows()]
    unlike = [
        not torch.allclose(p, distribution(processor, r)) for p, r in zip(late, rows(), strict=True)
    ]
    assert any(unlike) == case.startswith(("cold", "hot")), "the control: filters at the end"


def test_skipping_the_adjustment_leaves_out_the_residual(monkeypatch):
    processor = PROCESSORS["multinomial"]
    assert asked(monkeypatch, processor, skip_sample_adjustment=True)["ablate"] == "residual"
    assert "ablate" not in asked(monkeypatch, processor)
    assert speculative(skip_sample_adjustment=True)[0] == plain()

    def drawn(**settings):
        torch.manual_seed(1)
        return speculative(logits_processor=processor, **settings)[0]

    assert drawn(skip_sample_adjustment=True) != drawn()


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors_give_their_distribution_and_change_no_logits(case):
    processor, logits = PROCESSORS[case], rows()
    before = logits.clone()
    for shaped in (logits, logits.view(2, 3, -1)):
        probs = processor(shaped)
        assert probs.dtype == torch.float32
        for row, found in zip(before, probs.reshape(6, -1), strict=True):
            torch.testing.assert_close(
                found.double(), distribution(processor, row), atol=1e-6, rtol=1e-5
            )
    assert logits.equal(before)


def test_tokens_are_drawn_from_the_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3])
    torch.manual_seed(0)
    tokens = compat.MultinomialProcessor(1.0).sample(probs.expand(2, 2000, 4))
    assert (tokens.shape, tokens.dtype) == ((2, 2000, 1), torch.int64)
    assert chi_square(tokens.flatten(), probs.double()) > SIGNIFICANCE
    assert chi_square(tokens.flatten(), torch.tensor([0.4, 0.0, 0.3, 0.3])) < SIGNIFICANCE
    assert GREEDY.sample(probs[None]).tolist() == [[0]]
    with pytest.raises(RuntimeError, match=r"a distribution in every row, got none in rows \[1\]"):
        compat.MultinomialProcessor(1.0).sample(torch.stack([probs, probs * 0]))


def searched(name, width, top_k, min_length, alpha, ends, steps=NEW):
    """The best text by the definition, with a forward over the whole text for every beam."""

    def score(text, total):
        return total / ((min_length + len(text)) / (min_length + 1)) ** alpha

    model, running, ended = hf_models.tiny(name), [([], 0.0)], []
    for step in range(steps):
        found = [(score(text, total), text, total, True) for text, total in ended]
        for text, total in running:
            with torch.no_grad():
                row = model(torch.tensor([PROMPT + text])).logits[0, -1].log_softmax(-1)
            best = row.topk(min(width if step == 0 else top_k, len(row)))
            if step == 0:
                best = row.topk(max(width, top_k))
            for logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                longer = [*text, token]
                found.append((score(longer, total + logprob), longer, total + logprob, False))
        found = sorted(found, key=lambda one: one[0], reverse=True)[:width]
        ended = [(text, total) for _, text, total, over in found if over or text[-1] in ends]
        running = [(t, total) for _, t, total, over in found if not over and t[-1] not in ends]
        if not running:
            break
    return max([*ended, *running], key=lambda one: score(*one))[0]


def beams(name="llama", **settings):
    settings = {"max_gen_len": NEW, "eos_tokens_id": NO_END, **settings}
    return compat.beam_search_generate(PROMPT, hf_models.tiny(name), **settings)


@pytest.mark.parametrize("alpha", [0.0, 1.2, 3.0])
@pytest.mark.parametrize(("width", "top_k"), [(2, 3), (6, 1), (3, 40)])
def test_beams_are_those_of_the_definition(width, top_k, alpha):
    ends = [5, 11, 20, 30, 41, 60]
    for steps in range(1, NEW + 1):
        want = searched("llama", width, top_k, 5.0, alpha, ends, steps)
        settings = {"num_beams": width, "top_k": top_k, "alpha": alpha, "max_gen_len": steps}
        assert beams(**settings, eos_tokens_id=ends) == want, steps


def cached(tokens):
    cache = DynamicCache(config=hf_models.tiny("llama").config)
    with torch.no_grad():
        hf_models.tiny("llama")(torch.tensor([tokens]), past_key_values=cache)
    return cache


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_pruned_cache_is_that_of_the_shorter_text(number):
    cache, shorter = cached(PROMPT), cached(PROMPT[: len(PROMPT) - number])
    layers = tuple((layer.keys, layer.values) for layer in cache.layers)
    with_encoder = tuple((*layer, *layer) for layer in layers)
    tuples = compat.prune_cache(with_encoder, number)
    assert compat.prune_cache(cache, number) is cache
    assert cache.get_seq_length() == len(PROMPT) - number
    for n, layer in enumerate(shorter.layers):
        for found in ((cache.layers[n].keys, cache.layers[n].values), tuples[n][:2]):
            torch.testing.assert_close(found, (layer.keys, layer.values))
        torch.testing.assert_close(tuples[n][2:], layers[n])  # those of the encoder stay whole
    with pytest.raises(ValueError, match=f"at most the {9 - number} tokens of the cache, got 10"):
        compat.prune_cache(cache, 10)


class OwnSample(compat.MultinomialProcessor):
    def sample(self, probs):
        return probs.argmin(-1, keepdim=True)


class OwnCall(compat.MultinomialProcessor):
    def __call__(self, logits):
        return logits.softmax(-1)


LARGEST = math.log(torch.finfo(torch.float32).max) / math.log((5 + NEW) / 6)
ENCODER = hf_models.tiny("bart")
REFUSED = {
    "ends": (speculative, {"eos_tokens_id": []}, "eos_tokens_id must have at least"),
    "gamma": (speculative, {"gamma": -1}, "gamma must be at least 0, got -1"),
    "gamma_max": (
        speculative, {"use_egag": True, "gamma": 9, "gamma_min": 5, "gamma_max": 3},
        "gamma_max must be an integer in [5, 1024], got 3",
    ),
    "call": (speculative, {"logits_processor": OwnCall(1)}, "got OwnCall with its"),
    "sample": (speculative, {"logits_processor": OwnSample(1)}, "must have the sample method of G"),
    "penalty": (beams, {"alpha": 1.001 * LARGEST}, "alpha must be so small that the"),
    "cache": (compat.prune_cache, ([], 1), "cache must be None, a tuple of layers or a Dynamic"),
    "encoder": (compat.beam_search_generate, (PROMPT, ENCODER), "model must be a decoder-only mod"),
    "residual of integers": (compat.max_fn, (torch.tensor([1]),), "floating-point tensor, got Te"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_of_compat_are_refused_by_name_before_anything_is_printed(case, capsys):
    function, given, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as raised:
        function(**given) if isinstance(given, dict) else function(*given)
    assert message in str(raised.value)
    assert not capsys.readouterr().out


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not here")
def test_the_page_lists_every_name():
    page = (ROOT / "docs" / "compat.md").read_text()
    row = re.search(r"^\| `specdec_papers.compat` \|(.*?)\|", page, re.MULTILINE)[1]
    assert set(re.findall(r"`(\w+)`", row)) == set(compat.__all__)


def test_what_debug_prints_of_a_round_counts_every_draft(capsys):
    """Of five tokens, of which token 0 is one; the counts are those of the returned rate."""
    model, drafter = (hf_models.build("llama", seed, vocab_size=5) for seed in (0, 1))
    settings = {"gamma": 3, "eos_tokens_id": NO_END, "max_gen_len": 30, "debug": True}
    text, rate = compat.speculative_generate([1, 2, 3], drafter, model, **settings)
    printed = capsys.readouterr().out
    counts = [tuple(map(int, one)) for one in re.findall(r"(\d+) of (\d+) drafts acc", printed)]
    assert rate == sum(a for a, _ in counts) / sum(n for _, n in counts)
    assert len(text) == 30
