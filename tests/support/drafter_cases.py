"""Every drafter of the library once, as the tests of all of them make it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hf.published_heads import dflash, peagle
from specdec_hf import (
    DistilledDrafter,
    EagleTree,
    HorizontalCascade,
    KeptTexts,
    ModelDrafter,
    MtpDrafter,
    MtpTreeDrafter,
    NasdDrafter,
    SkippedSublayers,
    SuffixAutomatonDrafter,
    TextDrafter,
    TokenRecyclingDrafter,
    TreeSpec,
    TrieTree,
    VerticalCascade,
    from_candidate_generator,
)
from specdec_hf.drafters.ngram import RandomDrafter
from support import hf_models
from support.drafter_proof import GAMMA
from support.heads import (
    blockwise_folder,
    eagle_folder,
    exit_folder,
    head_folder,
    medusa_folder,
    mtp_head,
    pass_folder,
)
from support.toy_tokenizers import letters, letters_of, pairs
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

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


def of_another_vocabulary(target: Any, folder: Path) -> TextDrafter:
    """A draft model of letters, which the target's tokenizer merges to pairs, and of one more.

    So a longer draft has other first tokens, unless it is cut before it is encoded.
    """
    vocab_size = target.config.vocab_size
    names = "x" + letters_of(vocab_size)[::-1]
    return TextDrafter(_unlike(len(names)), letters(names), pairs(vocab_size))


_unlike = functools.cache(lambda vocab_size: hf_models.build("llama", 1, vocab_size=vocab_size))


class GrowingLookup(PromptLookupCandidateGenerator):
    """Drafts as the prompt lookup of Transformers, and more once all of a draft was accepted."""

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        grows = num_matches == scores.shape[1] - 1
        self.num_output_tokens = GAMMA + 2 if grows else max(self.num_output_tokens - 1, 1)


def generator(target: Any, folder: Path) -> Any:
    """A candidate generator of Transformers that learns how much of its drafts was accepted."""
    return from_candidate_generator(
        lambda ids: GrowingLookup(num_output_tokens=GAMMA, max_length=ids.shape[1] + 4096)
    )


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
    "eagle3": lambda target, folder: f"eagle3:{head_folder(target, folder)}",
    "eagle": lambda target, folder: f"eagle:{eagle_folder(target, folder)}",
    "eagle_chain": lambda target, folder: f"eagle_chain:{eagle_folder(target, folder)}",
    "peagle": lambda target, folder: f"peagle:{peagle(target, folder / 'peagle')}",
    "dflash": lambda target, folder: f"dflash:{dflash(target, folder / 'dflash')}",
    "mtp": lambda target, folder: MtpDrafter(mtp_head(target)),
    "mtp_tree": lambda target, folder: MtpTreeDrafter(mtp_head(target)),
    "medusa": lambda target, folder: f"medusa:{medusa_folder(target, folder)}",
    "blockwise": lambda target, folder: f"blockwise:{blockwise_folder(target, folder)}",
    "exit_head": lambda target, folder: f"exit_head:{exit_folder(target, folder)}",
    "pass_head": lambda target, folder: f"pass_head:{pass_folder(target, folder)}",
    "eagle3_chain": lambda target, folder: f"eagle3_chain:{head_folder(target, folder)}",
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
    "mtp, layers": lambda target, folder: MtpDrafter(mtp_head(target, 3)),
    "text": of_another_vocabulary,
    "candidate generator": generator,
}
# With the layout of the trees.
TREES: dict[str, tuple[Make, Any]] = {
    "model, tree": (lambda target, folder: draft_model(target), TreeSpec.branching((2, 1, 1))),
    "two models, tree": (
        lambda target, folder: [
            ModelDrafter(draft_model(target), temperature=2.0),
            hf_models.with_noise(target, 0.4),
        ],
        TreeSpec.branching((2, 1, 1)),
    ),
    "staged, tree": (
        lambda target, folder: VerticalCascade(
            draft_model(target), hf_models.with_noise(target, 0.4)
        ),
        TreeSpec.branching((2, 1, 1)),
    ),
    "model, EAGLE-2": (lambda target, folder: draft_model(target), EagleTree(2, GAMMA, 5)),
    "several, tree": (named("prompt_lookup"), TreeSpec.branching((2, 1, 1))),
    "several of each": (
        lambda target, folder: ["nasd", "suffix_automaton", datastore(target, folder)],
        TrieTree(3, GAMMA),
    ),
    "merged": (
        lambda target, folder: ["prompt_lookup", "ngram:2", draft_model(target)],
        TrieTree(2, GAMMA, 4),
    ),
    "merged, drawn": (
        lambda target, folder: ["ngram:2", draft_model(target)],
        TrieTree(1, GAMMA, 4),
    ),
    "merged with a head": (
        lambda target, folder: [NAMED["eagle3"](target, folder), "suffix_automaton"],
        TrieTree(2, GAMMA, 8, min_probability=0.02),
    ),
    "merged trees": (
        lambda target, folder: ["token_recycling", "prompt_lookup", "lookahead"],
        TrieTree(2, GAMMA, 6),
    ),
}


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
    "prompt_lookup", "suffix_automaton", "rest", "nasd", "blockwise", "text", "candidate generator",
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
