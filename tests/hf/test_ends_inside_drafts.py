"""A text that ends inside a draft: what lies behind the end is absent for everything.

Drafts there are shown to no processor, verified and counted by nobody, and no round has a bonus
token behind them.
"""

import numpy as np
import pytest
import torch
from specdec_hf import Draft, ModelDrafter, SpeculativeDecoder, StatelessDrafter, TrieTree, generate
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.loop import drafted
from specdec_hf.loop.drafted import without_drafts_behind_ends
from support import drafter_proof, hf_models
from support.drafter_proof import SIGNIFICANCE, joint_p_value, target
from support.hf_models import NEW, run
from transformers import LogitsProcessor

from bench.tiny_models import compare
from bench.tiny_models.build import build

LENGTHS = (9, 4, 12)
BEYOND = 8  # drafts reach so far behind the ends of texts
SEEDS = [5, 6, 7]
SAMPLED = {"do_sample": True, "temperature": 2.0, "rule": "match"}


class Foresees(StatelessDrafter):
    """Drafts how the texts go on without their ends."""

    def __init__(self, texts):
        self.texts = texts

    def propose(self, history, limits):
        return [t[n:][: limits.max()] for t, n in zip(self.texts, history.lengths, strict=True)]


class Pair(StatelessDrafter):
    """A tree of two paths for each sequence: a wrong token, and the text without its end."""

    size, depth = 6, 5

    def __init__(self, texts):
        self.texts = texts

    def propose(self, history, limits):
        rows = [
            [(text[n] + 1) % 67, *(text[n : n + 5] + [-1] * 5)[:5]]
            for text, n in zip(self.texts, history.lengths, strict=True)
        ]
        parents = torch.tensor([-1, -1, 1, 2, 3, 4]).repeat(len(rows), 1)
        return Draft(torch.tensor(rows), parents)


@pytest.fixture(scope="module")
def texts_without_ends():
    """By whether it is sampled: the texts of the prompts, longer than the calls need."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(LENGTHS)
    found = {}
    for sampled in (False, True):
        settings = {**SAMPLED, "seed": SEEDS} if sampled else {}
        out = run(model, inputs, max_new_tokens=NEW + BEYOND, **settings)
        mask = out.attention_mask.bool()
        found[sampled] = [ids[kept].tolist() for ids, kept in zip(out.sequences, mask, strict=True)]
    return found


def end_of(kind, text, length):
    """Settings that end a text inside the second draft, and whether tokens [n] hold that end."""
    new = text[length:]
    last = next(n for n in range(8, 12) if new[n] not in new[:n])
    if kind == "eos":
        return {"eos_token_id": new[last]}, lambda ids: new[last] in ids
    pair = new[last - 1 : last + 1]

    def ended(ids):
        return any(ids[n : n + 2] == pair for n in range(len(ids) - 1))

    def criterion(input_ids, scores):
        ends = [row[-2:].tolist() == pair for row in input_ids]
        return torch.tensor(ends, device=input_ids.device)

    return {"stopping_criteria": [criterion]}, ended


def grammar_without_rows_behind(ended, width):
    """``prefix_allowed_tokens_fn`` over a table that has no row behind an end."""

    def allowed(b, ids):
        if ended(ids[width:].tolist()):
            raise LookupError(f"no row behind the end of {ids.tolist()}")
        return list(range(67))

    return allowed


DRAFTERS = {
    "chain": lambda texts: {"drafter": Foresees(texts)},
    "tree": lambda texts: {"drafter": Foresees(texts), "tree": TrieTree()},
    "own tree": lambda texts: {"drafter": Pair(texts)},
    "auto": lambda texts: {"drafter": "auto"},
    "model": lambda texts: {"drafter": hf_models.perturbed("llama", 0.01), "gamma": 8},
}


@pytest.mark.parametrize("end", ["eos", "criteria"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_processors_are_not_asked_behind_the_end(texts_without_ends, drafter, sampled, end):
    """The root: a draft behind an end was treated as a prefix that plain decoding can make."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(LENGTHS)
    texts = texts_without_ends[sampled]
    settings, ended = end_of(end, texts[2], LENGTHS[2])
    settings |= SAMPLED if sampled else {}
    for rows in (slice(2, 3), slice(0, 3)):
        mine = {name: x[rows] for name, x in inputs.items()}
        settings["seed"] = SEEDS[rows]
        allowed = grammar_without_rows_behind(ended, mine["input_ids"].shape[1])
        plain = run(model, mine, **settings)
        assert plain.stats.sequences[-1].stop_reason == end
        given = {"prefix_allowed_tokens_fn": allowed, **settings, **DRAFTERS[drafter](texts[rows])}
        out = run(model, mine, **given)
        assert torch.equal(out.sequences, plain.sequences)
        assert torch.allclose(out.logprobs, plain.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "greedy",
    [{}, {"do_sample": True, "temperature": [0.0]}, {"do_sample": True, "top_k": 1}],
    ids=["", "0.0", "top_k"],
)
@pytest.mark.parametrize("tree", [None, TrieTree()], ids=["chain", "tree"])
def test_a_greedy_text_asks_about_its_own_tokens_alone(tree, greedy):
    """A table of the text's own prefixes serves drafts that are wrong, too."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    text = run(model, inputs).sequences[0].tolist()
    half = [token if n % 3 else token + 1 for n, token in enumerate(text)]

    def allowed(b, ids):
        assert ids.tolist() == text[: len(ids)]
        return list(range(67))

    out = run(
        model, inputs, drafter=Foresees([half]), tree=tree, prefix_allowed_tokens_fn=allowed,
        **greedy,
    )  # fmt: skip
    assert out.sequences[0].tolist() == text
    assert 0 < out.stats.accepted < out.stats.drafted


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_criteria_are_asked_about_the_text_with_its_padding(drafter):
    inputs = hf_models.prompts(LENGTHS)
    width = inputs["input_ids"].shape[1]

    def is_long(input_ids, scores):
        return torch.full((len(input_ids),), input_ids.shape[1] >= width + 5)

    out = run(hf_models.tiny("llama"), inputs, stopping_criteria=[is_long], drafter=drafter)
    assert [one.new_tokens for one in out.stats.sequences] == [5] * len(LENGTHS)


@pytest.mark.parametrize("end", ["eos", "criteria"])
@pytest.mark.parametrize("drafter", ["chain", "tree", "own tree"])
def test_drafts_behind_the_end_are_not_counted(texts_without_ends, drafter, end):
    """The root: counts were taken of what a round drew, and a bonus token added to each round."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(LENGTHS)
    mine = {name: x[2:] for name, x in inputs.items()}
    text = texts_without_ends[False][2]
    settings, _ = end_of(end, text, LENGTHS[2])
    steps = []
    decoder = SpeculativeDecoder(
        guard=False, trace=lambda traced: steps.extend(traced.steps), **DRAFTERS[drafter]([text])
    )
    settings |= {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(**mine, custom_generate=decoder, **settings)
    one, rounds = out.stats.sequences[0], out.stats.round_log
    new = out.sequences.shape[1] - LENGTHS[2]
    last = rounds[-1]
    assert last.emitted[0] == last.accepted[0] > 0, "the text ends with a draft"
    assert one.mean_acceptance_length == out.stats.mean_acceptance_length == new / len(rounds)
    assert one.accepted == new - len(rounds) + 1
    wrong = len(rounds) - 1 if drafter == "own tree" else 0  # a sibling in every round
    assert one.drafted == one.accepted + wrong
    assert len(one.drafted_at) == max(one.acceptance_histogram)
    assert steps[-1].kinds == ["accepted"] * last.emitted[0]
    assert steps[-1].rejected == []
    if drafter == "own tree":
        assert one.acceptance_by_trial == [(one.accepted - wrong) / one.accepted, 1.0]


def rounds_by_hand(text, drafts, *, is_cut):
    found, new = [(0, 0, ["plain"], [])], 1
    while new < len(text):
        draft = drafts[new : min(new + 5, len(text) - 1)]
        if is_cut and hf_models.PAD in [text[new - 1], *draft]:
            draft = draft[: [text[new - 1], *draft].index(hf_models.PAD)]
        accepted = next((n for n, token in enumerate(draft) if token != text[new + n]), len(draft))
        rejected = draft[accepted : accepted + 1]
        last = "recovered" if rejected else "bonus" if draft else "plain"
        found.append((len(draft), accepted, ["accepted"] * accepted + [last], rejected))
        new += accepted + 1
    return found


@pytest.mark.parametrize("kind", ["chain", "tree", "positions by ids"])
def test_drafts_that_hold_the_padding_id_are_counted_as_others_are(kind):
    """Where a decoder counts positions by ids, a draft ends with it, or is none behind it."""
    counts_ids = kind == "positions by ids"
    model = build("M2M100ForConditionalGeneration") if counts_ids else hf_models.tiny("llama")
    inputs = compare.prompts((7,)) if counts_ids else hf_models.prompts((9,))
    begin = 1 if counts_ids else 9

    def pads(input_ids, scores):
        scores = scores.clone()
        is_pad = input_ids.shape[1] - begin in (3, 12, 17)
        scores[:, hf_models.PAD] = torch.inf if is_pad else -torch.inf
        return scores.nan_to_num(posinf=1e4)

    processed = {"logits_processor": [pads]}
    text = run(model, inputs, **processed).sequences[0].tolist()
    new = text[begin:]
    assert [n for n, token in enumerate(new) if token == hf_models.PAD] == [3, 12, 17]
    drafts = [*new[:9], hf_models.PAD, *new[10:17], new[9], *new[18:]]  # two of them are wrong
    steps = []
    decoder = SpeculativeDecoder(
        Foresees([[*text[:begin], *drafts]]), tree=TrieTree() if kind == "tree" else None,
        guard=False, num_assistant_tokens_schedule="constant",
        trace=lambda traced: steps.extend(traced.steps),
    )  # fmt: skip
    out = model.generate(
        **inputs, **processed, custom_generate=decoder, max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences[0].tolist() == text
    log = [(record.drafted[0], record.accepted[0]) for record in out.stats.round_log]
    expected = rounds_by_hand(new, drafts, is_cut=counts_ids)
    assert [
        (*counts, step.kinds, step.rejected) for counts, step in zip(log, steps, strict=True)
    ] == expected
    assert out.stats.drafted == sum(drafted for drafted, *_ in expected)
    assert [rejected for *_, rejected in expected if rejected] == [[hf_models.PAD], [new[9]]]


@pytest.mark.parametrize("tree", [None, TrieTree()], ids=["chain", "tree"])
def test_drafts_behind_an_end_that_is_rejected_are_absent(tree):
    """The verification compares an end-of-sequence token, and nothing behind it."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(LENGTHS)
    plain = run(model, inputs)
    unused = [token for token in range(67) if token not in plain.sequences]
    drafter = Foresees([unused[:2] * NEW] * len(LENGTHS))
    gamma = None if tree else 4
    out = run(model, inputs, drafter=drafter, tree=tree, gamma=gamma, eos_token_id=unused[1])
    assert torch.equal(out.sequences, plain.sequences)
    for one, length in zip(out.stats.sequences, LENGTHS, strict=True):
        # Every other draft begins with the end, and the others have one token before it.
        found = [2 - (length + new) % 2 for new in range(1, NEW - 1)]
        assert one.accepted == 0
        assert one.drafted == sum(min(n, NEW - 1 - new) for new, n in enumerate(found, start=1))


# Chains of a model and of a head, trees of two models, and merged drafts.
MECHANISMS = ("model", "eagle3_chain", "two models, tree", "merged, drawn")


@pytest.mark.parametrize("biased", [False, True], ids=["", "control"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_texts_that_end_keep_their_joint_distribution(name, biased, tmp_path, monkeypatch):
    """The control leaves out a draft because of what it is, and not of what is before it."""
    arguments = drafter_proof.make(name, target()[0], tmp_path)
    drafter = resolve_drafter(arguments["drafter"], arguments.get("tree"), target()[0])
    if biased:

        def without_ends(tokens, parents, ends, depth):
            return tokens.masked_fill(tokens == ends[0][0], -1)

        monkeypatch.setattr(drafted, "without_drafts_behind_ends", without_ends)
    gamma = {"gamma": None} if drafter.size else {}
    p = joint_p_value(drafter, "auto", texts=600 if biased else 1000, prompt=2, eos=2, **gamma)
    assert (p < SIGNIFICANCE) == biased


def test_drafts_behind_ends_are_those_with_an_end_above_them():
    generator = np.random.default_rng(3)
    for _ in range(200):
        batch_size, size = (int(n) for n in generator.integers(1, [4, 14]))
        tokens = generator.integers(-1, 6, (batch_size, size))
        parents = np.stack([generator.integers(-1, np.arange(size)) for _ in range(batch_size)])
        ends = [
            generator.choice(6, generator.integers(0, 3), replace=False).tolist() for _ in tokens
        ]
        chain = generator.random() < 0.4
        if chain:
            parents = np.broadcast_to(np.arange(-1, size - 1), tokens.shape)
        expected = tokens.copy()
        for b, n in np.ndindex(tokens.shape):
            above = parents[b, n]
            while above >= 0:
                if tokens[b, above] in ends[b]:
                    expected[b, n] = -1
                above = parents[b, above]
        found = without_drafts_behind_ends(
            torch.from_numpy(tokens), None if chain else torch.tensor(parents), ends,
            None if chain else size,
        )  # fmt: skip
        assert found.tolist() == expected.tolist()


class Matcher(LogitsProcessor):
    """A grammar that moves by the last token at every question, as a matcher of others does."""

    def __init__(self):
        self.text = None

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        assert self.text in (None, ids[:-1])
        self.text = ids
        return scores


class Grows(LogitsProcessor):
    """Depends on the longest text that it was asked about, which each sequence alone could bear."""

    def __call__(self, input_ids, scores):
        self.longest = max(getattr(self, "longest", 0), input_ids.shape[1])
        scores[:, self.longest % 7] -= 5
        return scores


STATES = [Matcher, Grows]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ((9,), {"drafter": "prompt_lookup"}), ((9,), {"drafter": "auto"}),
        ((9,), {"drafter": "model", "do_sample": True, "seed": 1}), ((9, 4), {"drafter": None}),
        ((9,), {"drafter": None, "num_beams": 2}),
    ],
    ids=["chain", "auto", "sampled", "batch", "beams"],
)  # fmt: skip
def test_a_processor_with_a_state_is_refused_by_name(lengths, settings, state):
    """The root: the documented rule that processors are functions was checked by nobody."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    if settings["drafter"] == "model":
        settings = {**settings, "drafter": ModelDrafter(hf_models.perturbed("llama"))}
    with pytest.raises(ValueError, match=f"^logits_processor {state.__name__} must be a function"):
        run(model, inputs, logits_processor=[state()], **settings)


@pytest.mark.parametrize("state", STATES)
def test_without_drafts_a_processor_with_a_state_serves_a_sequence_alone(state):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    given = {"do_sample": False, "max_new_tokens": NEW}
    plain = model.generate(**inputs, logits_processor=[state()], **given)
    out = generate(model, **inputs, logits_processor=[state()], drafter=None, **given)
    assert torch.equal(out, plain)
