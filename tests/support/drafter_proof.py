"""What drafters are told, every drafter of the library once, and proofs that one loses nothing.

The target of sampled texts has four tokens, so that all probabilities can be computed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf.published_heads import dflash, peagle
from numpy.typing import NDArray
from proofs import SIGNIFICANCE, chi_square  # noqa: F401  # tests compare p-values with it
from specdec_hf import (
    Draft,
    Drafter,
    DrafterCall,
    Drawn,
    EagleTree,
    History,
    KeptTexts,
    ModelDrafter,
    PromptLookupDrafter,
    State,
    StatelessDrafter,
    SuffixAutomatonDrafter,
    TreeSpec,
    TrieTree,
    generate,
)
from specdec_hf.drafting import checks
from specdec_hf.drafting.call import reads_draft
from specdec_hf.drafting.drafter import rules_of
from specdec_hf.loop import drafted
from specdec_hf.schedules.base import Schedule
from specdec_papers.cascade import HorizontalCascade
from specdec_papers.distilled import DistilledDrafter
from specdec_papers.mtp.drafter import MtpDrafter, MtpTreeDrafter
from specdec_papers.nasd import NasdDrafter
from specdec_papers.ngram import RandomDrafter
from specdec_papers.other_vocabulary import OtherVocabularyDrafter
from specdec_papers.skipped_sublayers import SkippedSublayers
from specdec_papers.token_recycling import TokenRecyclingDrafter
from specdec_papers.vertical_cascade import VerticalCascade
from support import hf_models
from support.cli_models import letters, letters_of, pairs


def call_of(
    model: Any = None, rule: str = "greedy", batch_size: int = 1, **fields: Any
) -> DrafterCall:
    """A call without filters, of temperature 0 where it is greedy; ``fields`` are others of it."""
    sampling = {"temperature": float(rule != "greedy"), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampling |= {name: fields.pop(name) for name in [*sampling] if name in fields}
    seeds = torch.zeros(batch_size, dtype=torch.int64)
    given = {"seeds": seeds, "max_length": 99, "max_draft": 16, **fields}
    model = hf_models.tiny("llama") if model is None else model
    return DrafterCall.of(model, rule, sampling, **given)


def begun(drafter: Drafter, batch_size: int = 1, **fields: Any) -> State:
    """The state of a drafter in such a call."""
    return drafter.begin(call_of(batch_size=batch_size, **fields))


def history_of(*texts: Sequence[int], active: Sequence[bool] | None = None) -> History:
    """The texts of one round; all sequences go on unless ``active`` says otherwise."""
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), lengths.max() + 5), dtype=np.int64)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = text
    return History(tokens, lengths, np.array([True] * len(texts) if active is None else active))


def limits_of(history: History, limit: int) -> NDArray[np.int64]:
    """The same limit for every sequence that goes on."""
    return np.where(history.active, limit, 0)


def chains_of(draft: Draft | None) -> list[list[list[int]]] | None:
    """Tokens [B, K, L] of the proposals of a draft."""
    if draft is None:
        return None
    return draft.tokens.unflatten(1, (draft.num_proposals, -1)).tolist()


def propose(state: State, history: History, limit: int) -> Draft | None:
    """What a state drafts."""
    return state.propose(history, limits_of(history, limit))


def counts_of(draft: Draft) -> list[int]:
    """[B], tokens of each sequence."""
    return (draft.tokens >= 0).sum(dim=1).tolist()


VOCAB, LENGTH, GAMMA = 4, 4, 3
PROMPTS = ([1, 2, 1], [3, 0], [2, 2, 1, 0, 2])
BATCHES = ((9,), (9, 1, 12))  # lengths of prompts; one of one token is drafted for no earlier


def assert_greedy_identical(make: Any, model: Any, new_tokens: int = 24, **kwargs: Any) -> Any:
    """Greedy text is that of plain generation, of one sequence and of a ragged batch of three."""
    for lengths in BATCHES:
        inputs, expected = _plain_greedy(model, lengths, new_tokens)
        out = generate(
            model, **inputs, max_new_tokens=new_tokens, do_sample=False, drafter=make(),
            guard=False, return_dict_in_generate=True, **kwargs,
        )  # fmt: skip
        assert out.sequences.tolist() == expected
        assert out.stats.drafted > 0
    return out.stats


@functools.cache
def _plain_greedy(model: Any, lengths: tuple[int, ...], new_tokens: int) -> tuple[Any, Any]:
    """Prompts of these lengths, and the model's own text after them."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    inputs = hf_models.prompts(lengths, vocab_size=vocab_size)
    text = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return inputs, text.tolist()


class RaggedSchedule(Schedule):
    """Limits of some sequences of a batch, other ones of each in every round, and 0 among them."""

    name = "ragged"
    trees = True
    LIMITS = np.array([[1, 0, 5, 2, 3, 1], [5, 3, 1, 0, 1, 2], [2, 5, 3, 1, 0, 4]])

    def __init__(self, *sequences: int) -> None:
        self.sequences = list(sequences)
        self.rounds = 0

    def lengths(self, most: Any) -> Any:
        self.rounds += 1
        return self.LIMITS[self.sequences, self.rounds % self.LIMITS.shape[1]]


@contextmanager
def recorded_drafts() -> Iterator[list[tuple[Any, list[Any]]]]:
    """The limits [B] of each round, and the paths to the nodes that each sequence drafts in it."""
    rounds: list[tuple[Any, list[Any]]] = []

    def ask(drafter: Any, state: Any, texts: History, limits: Any, call: Any) -> Draft | None:
        draft = checks.propose_checked(drafter, state, texts, limits, call)
        rounds.append((limits, [_paths(draft, b) for b in range(len(limits))]))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafted, "propose_checked", ask)
        yield rounds


def _paths(draft: Draft | None, b: int) -> list[tuple[int, ...]]:
    """The paths down to the nodes that sequence ``b`` drafts."""
    if draft is None:
        return []
    tokens = draft.tokens[b].tolist()
    if draft.parents is None:
        del tokens[draft.counts[b] :]
    above = range(-1, len(tokens)) if draft.parents is None else draft.parents[b].tolist()
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for n, (token, parent) in enumerate(zip(tokens, above, strict=False)):
        if token >= 0 and parent in paths:
            paths[n] = (*paths[parent], token)
    return [path for path in paths.values() if path]


def assert_independent_of_batch(
    make: Any,
    model: Any,
    new_tokens: int = 16,
    *,
    seed: int = 5,
    drafts: bool = True,
    ragged: bool = False,
    **kwargs: Any,
) -> Any:
    """A sampled sequence of a ragged batch of three is that of a call of its own.

    ``drafts``: as many tokens are drafted and accepted, too. ``ragged``: the limits are those of a
    `RaggedSchedule`, and the same tokens are drafted as long as the text is the same.
    """
    lengths = BATCHES[-1]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    inputs = hf_models.prompts(lengths, vocab_size=vocab_size)
    settings = {
        "max_new_tokens": new_tokens, "do_sample": True, "guard": False,
        "return_dict_in_generate": True, **kwargs,
    }  # fmt: skip
    seeds = [seed + b for b in range(len(lengths))]

    def call(sequences: list[int], given: Any) -> tuple[Any, Any]:
        """The output, and what each sequence drafted in each round that it was to draft in."""
        schedule = {"num_assistant_tokens_schedule": RaggedSchedule(*sequences)} if ragged else {}
        with recorded_drafts() as rounds:
            out = generate(
                model, **given, **settings, **schedule, drafter=make(),
                seed=[seeds[b] for b in sequences],
            )  # fmt: skip
        asked = range(len(sequences))
        return out, [[drawn[b] for limits, drawn in rounds if limits[b]] for b in asked]

    together, drafted_together = call([*range(len(lengths))], inputs)
    assert together.stats.drafted > 0
    for b, length in enumerate(lengths):
        alone = {key: value[b : b + 1, -length:] for key, value in inputs.items()}
        got, (drafted_alone,) = call([b], alone)
        if ragged:
            assert drafted_alone == drafted_together[b]
        assert got.sequences[0, length:].tolist() == together.sequences[b, -new_tokens:].tolist()
        if drafts:
            ours, of_batch = got.stats.sequences[0], together.stats.sequences[b]
            assert ours.drafted == of_batch.drafted
            assert ours.acceptance_histogram == of_batch.acceptance_histogram
    return together.stats


@functools.cache
def target(
    prompt: int = 0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Any, torch.Tensor]:
    """A model, and the probabilities of the first `LENGTH` tokens of its texts after a prompt."""
    model = _of_four_tokens()
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    begin = torch.tensor(PROMPTS[prompt]).expand(len(texts), -1)
    with torch.no_grad():
        logits = model(torch.cat([begin, texts], dim=1)).logits[:, begin.shape[1] - 1 : -1]
    if top_k:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    rows = (logits.double() / temperature).log_softmax(dim=-1)
    if top_p < 1:
        descending, order = rows.exp().sort(dim=-1, descending=True)
        outside = descending.cumsum(dim=-1) - descending >= top_p
        rows = rows.masked_fill(outside.gather(-1, order.argsort(dim=-1)), -torch.inf)
        rows = rows.log_softmax(dim=-1)
    return model, rows.gather(2, texts[..., None])[..., 0].sum(dim=1).exp()


_of_four_tokens = functools.cache(lambda: hf_models.build("llama", vocab_size=VOCAB))


def joint_p_value(
    drafter: Any,
    rule: str = "token",
    *,
    texts: int,
    prompt: int = 2,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: int | None = None,
    **kwargs: Any,
) -> float:
    """The probability that texts of the target's distribution lie as far from it as those drafted.

    They are `GAMMA` tokens longer than what is compared, so that their end cuts no drafts.
    """
    model, probs = target(prompt, temperature, top_k, top_p)
    if eos is not None:
        probs = _of_texts_that_end(probs, eos)
        kwargs |= {"eos_token_id": eos, "pad_token_id": 0}
    ids = torch.tensor(PROMPTS[prompt]).expand(texts, -1)
    out = generate(
        model, ids, attention_mask=torch.ones_like(ids), drafter=drafter, rule=rule, do_sample=True,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=list(range(texts)), guard=False,
        max_new_tokens=LENGTH + GAMMA, return_dict_in_generate=True, **{"gamma": GAMMA, **kwargs},
    )  # fmt: skip
    assert out.stats.drafted > texts / 2
    assert out.stats.accepted > texts / 8
    first = out.sequences[:, ids.shape[1] :][:, :LENGTH]
    codes = (first * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return chi_square(codes, probs)


def _of_texts_that_end(probs: torch.Tensor, eos: int) -> torch.Tensor:
    """The probabilities where a text is that up to its end, with zeros behind."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    ended = (texts == eos).cumsum(dim=1) - (texts == eos).long() > 0
    codes = (texts.masked_fill(ended, 0) * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return torch.zeros_like(probs).index_add_(0, codes, probs)


def with_states(drafter: Any, change: Callable[[Any, DrafterCall], None]) -> Any:
    """A drafter like another one, each of whose states was changed."""
    made = copy.copy(drafter)

    def begin(call: DrafterCall) -> State:
        state = copy.copy(drafter.begin(call))  # some drafters are their own states
        change(state, call)
        return state

    made.begin = begin
    return made


def with_twin(drafter: Any, twin: Any) -> Any:
    """The drafter, but it fails where its twin, which has other seeds, drafts anything else.

    So a draft follows from what both are told, not from the noise of its verification.
    """

    def change(state: Any, call: DrafterCall) -> None:
        other = twin.begin(dataclasses.replace(call, seeds=call.seeds + 1000))
        propose, commit = state.propose, state.commit

        def both(texts: History, limits: Any) -> Draft | None:
            drafts = [propose(texts, limits), other.propose(texts, limits)]
            ours, others = (None if draft is None else draft.tokens.tolist() for draft in drafts)
            assert ours == others
            made.rounds += [] if ours is None else [ours]
            return drafts[0]

        def told(*done: Any) -> None:
            commit(*done)
            other.commit(*done)

        state.propose, state.commit = both, told

    made = with_states(drafter, change)
    made.rounds = []
    return made


def with_wrong_distribution(drafter: Any) -> Any:
    """The drafter, but it says that each draft was drawn from one and the same distribution.

    The negative control of every drafter: rules that read the draft distribution give other texts.
    """

    def change(state: Any, call: DrafterCall) -> None:
        propose = state.propose

        def wrong(texts: History, limits: Any) -> Draft | None:
            draft: Draft | None = propose(texts, limits)
            if draft is not None and draft.parents is not None:
                draft.drawn = _rising(draft.tokens[:, :1])
                draft.draft_rows = torch.zeros_like(draft.tokens, dtype=torch.int32)
            elif draft is not None:
                draft.drawn = _rising(draft.tokens)
            return draft

        state.propose = wrong

    made = with_states(drafter, change)
    made.draws, made.several = True, False
    if made.size and not reads_draft(rules_of(made)[0]):
        made.rules = ("multi_draft",)
    return made


def _rising(tokens: torch.Tensor) -> Drawn:
    """Rows in which every token is twice as likely as the one before it."""
    rows = (torch.arange(VOCAB) * math.log(2)).repeat(*tokens.shape, 1)
    sums = rows.logsumexp(dim=-1)
    return Drawn(tokens, rows, sums, torch.full_like(sums, -torch.inf))


# Makes the drafter of a call for a target, with a folder for files.
Make = Callable[[Any, Path], Any]


@functools.cache
def draft_model(target: Any) -> Any:
    """A model that often agrees with the target."""
    return hf_models.with_noise(target, 0.2)


def named(text: str) -> Make:
    """A drafter that needs its name only."""
    return lambda target, folder: text


def datastore(target: Any, folder: Path) -> str:
    """REST with a file of random tokens."""
    from specdec_host import Corpus  # noqa: PLC0415  # the other cases do without it

    vocab_size = target.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, 3000)
    Corpus(tokens).save(folder / "datastore", vocab_size=vocab_size)
    return f"rest:{folder / 'datastore'}"


def of_another_vocabulary(target: Any, folder: Path) -> OtherVocabularyDrafter:
    """A draft model of letters, which the target's tokenizer merges to pairs, and of one more."""
    vocab_size = target.config.vocab_size
    names = "x" + letters_of(vocab_size)[::-1]
    return OtherVocabularyDrafter(_unlike(len(names)), letters(names), pairs(vocab_size))


_unlike = functools.cache(lambda vocab_size: hf_models.build("llama", 1, vocab_size=vocab_size))


def with_kept_texts(target: Any, folder: Path) -> SuffixAutomatonDrafter:
    """A suffix automaton beside texts of earlier calls."""
    vocab_size = target.config.vocab_size
    kept = KeptTexts(2**16)
    for text in np.random.default_rng(0).integers(0, vocab_size, (9, 300)):
        kept.add([text], vocab_size)
    return SuffixAutomatonDrafter(keep=kept)


def without_sublayers(target: Any, folder: Path) -> str:
    """The target without the attention of its last layer, as a file says."""
    last = target.config.num_hidden_layers - 1
    SkippedSublayers(attention=(last,)).save(folder / "skipped")
    return f"layer_skip:{folder / 'skipped'}"


# So small that texts of a few tokens exceed it, and that drafts are not the target's own.
SPARSE = "sparse_cache:budget=2,chunk=1,sinks=0,recent=1,interval=2"
LEARNING = ("ngram", "nasd", "token_recycling", "lookahead")
NAMED: dict[str, Make] = {
    name: named(name) for name in ("auto", "prompt_lookup", "random", "suffix_automaton", *LEARNING)
} | {
    "rest": datastore,
    "layers": named("layers:1"),
    "early_exit": named("early_exit:1"),
    "layer_skip": named("layer_skip:1-1"),
    "sparse_cache": named(SPARSE),
    "eagle3": lambda target, folder: f"eagle3:{hf_models.head_folder(target, folder)}",
    "eagle": lambda target, folder: f"eagle:{hf_models.eagle_folder(target, folder)}",
    "eagle_chain": lambda target, folder: f"eagle_chain:{hf_models.eagle_folder(target, folder)}",
    "peagle": lambda target, folder: f"peagle:{peagle(target, folder / 'peagle')}",
    "dflash": lambda target, folder: f"dflash:{dflash(target, folder / 'dflash')}",
    "mtp": lambda target, folder: MtpDrafter(hf_models.mtp_head(target)),
    "mtp_tree": lambda target, folder: MtpTreeDrafter(hf_models.mtp_head(target)),
    "medusa": lambda target, folder: f"medusa:{hf_models.medusa_folder(target, folder)}",
    "blockwise": lambda target, folder: f"blockwise:{hf_models.blockwise_folder(target, folder)}",
    "exit_head": lambda target, folder: f"exit_head:{hf_models.exit_folder(target, folder)}",
    "pass_head": lambda target, folder: f"pass_head:{hf_models.pass_folder(target, folder)}",
    "eagle3_chain": lambda target, folder: f"eagle3_chain:{hf_models.head_folder(target, folder)}",
}
OTHERS: dict[str, Make] = {
    "unigram": named("ngram:1"),
    "bigram": named("ngram:2"),
    "model": lambda target, folder: ModelDrafter(draft_model(target)),
    "model, own sampling": lambda target, folder: ModelDrafter(
        draft_model(target), temperature=0.5, top_k=3
    ),
    "horizontal cascade": lambda target, folder: HorizontalCascade(
        [draft_model(target), RandomDrafter()], [2]
    ),
    "vertical cascade": lambda target, folder: [draft_model(target), "prompt_lookup"],
    "layer_skip, sublayers": without_sublayers,
    "sparse_cache, cascade": lambda target, folder: [SPARSE, "prompt_lookup"],
    "distilled": lambda target, folder: DistilledDrafter(draft_model(target), 0.02),
    "suffix_automaton, kept": with_kept_texts,
    "token_recycling, inherited": lambda target, folder: TokenRecyclingDrafter(inherit=True),
    "nasd, kept": lambda target, folder: NasdDrafter(stop_if_unknown=False, max_kept=1000),
    "mtp, layers": lambda target, folder: MtpDrafter(hf_models.mtp_head(target, 3)),
    "text": of_another_vocabulary,
}
BRANCHING = TreeSpec.branching((2, 1, 1))
# With the layout of the trees.
TREES: dict[str, tuple[Make, Any]] = {
    "model, tree": (lambda t, _: draft_model(t), BRANCHING),
    "two models, tree": (
        lambda t, _: [ModelDrafter(draft_model(t), temperature=2.0), hf_models.with_noise(t, 0.4)],
        BRANCHING,
    ),
    "staged, tree": (
        lambda t, _: VerticalCascade(draft_model(t), hf_models.with_noise(t, 0.4)),
        BRANCHING,
    ),
    "model, EAGLE-2": (lambda t, _: draft_model(t), EagleTree(2, GAMMA, 5)),
    "several, tree": (named("prompt_lookup"), BRANCHING),
    "several of each": (
        lambda t, folder: ["nasd", "suffix_automaton", datastore(t, folder)], TrieTree(3, GAMMA),
    ),
    "merged": (lambda t, _: ["prompt_lookup", "ngram:2", draft_model(t)], TrieTree(2, GAMMA, 4)),
    "merged, drawn": (lambda t, _: ["ngram:2", draft_model(t)], TrieTree(1, GAMMA, 4)),
    "merged with a head": (
        lambda t, folder: [NAMED["eagle3"](t, folder), "suffix_automaton"],
        TrieTree(2, GAMMA, 8, min_probability=0.02),
    ),
    "merged trees": (
        lambda t, _: ["token_recycling", "prompt_lookup", "lookahead"], TrieTree(2, GAMMA, 6),
    ),
}  # fmt: skip


# Rule "auto" reads the distribution that these drafts were drawn from.
DRAWN = (
    "ngram", "model", "model, own sampling", "early_exit", "exit_head", "pass_head",
    "sparse_cache", "eagle3_chain", "peagle", "dflash", "horizontal cascade", "vertical cascade",
    "model, tree",
    "two models, tree", "merged, drawn",
)  # fmt: skip
# These draw as one of those above does.
DRAWN_ALIKE = (
    "random", "unigram", "bigram", "layers", "layer_skip", "layer_skip, sublayers", "staged, tree",
    "distilled", "eagle_chain", "mtp", "mtp, layers", "sparse_cache, cascade",
)  # fmt: skip
# Chains without a distribution; trees without one are verified with rule target_only.
DETERMINISTIC = (
    "prompt_lookup", "suffix_automaton", "rest", "nasd", "blockwise", "text",
    "suffix_automaton, kept", "nasd, kept",
)  # fmt: skip
# What these draft depends on earlier calls.
KEEPING = ("suffix_automaton, kept", "nasd, kept", "distilled", "token_recycling, inherited")


def make(name: str, target: Any, folder: Path) -> dict[str, Any]:
    """The arguments of `generate` that choose a drafter."""
    if name in TREES:
        made, tree = TREES[name]
        return {"drafter": made(target, folder), "tree": tree}
    return {"drafter": {**NAMED, **OTHERS}[name](target, folder)}


ALL = (*NAMED, *OTHERS, *TREES)


class Repeats(StatelessDrafter):
    """Proposes the last tokens once more, with absent tokens in every other sequence."""

    name = "repeats"

    def propose(self, history, limits):
        gamma = int(limits.max())
        tokens = torch.from_numpy(history.last(3))[:, :gamma]
        tokens[::2, 1:2] = -1
        return Draft(tokens)


def tree_drafters(name):
    """The arguments ``drafter`` and ``tree`` of `generate`, by kind."""
    good, bad = hf_models.perturbed(name), hf_models.perturbed(name, 0.2)
    return {
        "chain": (good, TreeSpec.chain(4)),
        "branching": (good, (3, 2, 1)),
        "medusa": (good, TreeSpec.medusa((2, 2), 3, [[0.3, 0.6], [0.2, 0.7]])),
        "sequoia": (ModelDrafter(good), TreeSpec.sequoia([0.6, 0.2, 0.1], 9)),
        "wide": (good, (hf_models.VOCAB - 3,)),
        "two models": ([good, bad], (2, 1, 1)),
        "three models": ([bad, good, bad], TreeSpec((-1, -1, 0, 1, 1))),
        "eagle": (good, EagleTree(width=3, depth=4, size=9)),
        "eagle of the largest sizes": (good, EagleTree(width=64, depth=1, size=1024)),
        "lookup": (PromptLookupDrafter(4, 1), TrieTree(sequences=3, depth=4)),
        "lookup in a spec": ("prompt_lookup", (2, 2)),
        "trie of models": ([good, bad], TrieTree(depth=4)),
        "trie of all": ([good, PromptLookupDrafter(4, 1), Repeats()], TrieTree(2, 4, size=8)),
    }


TREE_KINDS = list(tree_drafters("llama"))
