"""Wrong arguments of drafters, of cascades and of the tables they read are refused by name."""

import numpy as np
import pytest
from specdec_hf import (
    EarlyExitDrafter,
    HorizontalCascade,
    LayerSkipDrafter,
    LookaheadDrafter,
    NasdDrafter,
    PromptLookupDrafter,
    RemoteDrafter,
    RestDrafter,
    SuffixAutomatonDrafter,
    TextDrafter,
    TokenRecyclingDrafter,
    TreeSpec,
    VerticalCascade,
    check_drafter,
)
from specdec_hf.drafters.ngram import NgramDrafter
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_host import Corpus
from support import hf_models
from support.letters import letters

CORPUS = Corpus(np.array([1, 2, 3]))
TEXTS = [np.array([1])]
WIDE = TreeSpec.branching((3, 2))


def model():
    return hf_models.tiny("llama")


def text_drafter(**arguments):
    names = {"assistant_tokenizer": letters("abc"), "tokenizer": letters("abc"), **arguments}
    return TextDrafter(model(), **names)


VALUES = {
    "min_ngram must be in [1, max_ngram = 2], got 3": lambda: PromptLookupDrafter(2, 3),
    "order must be an integer in [1, 8], got 0": lambda: NgramDrafter(order=0),
    "table must be given with learn=False": lambda: NgramDrafter(learn=False),
    "min_context must be an integer in [0,": lambda: NgramDrafter(min_context=3),
    "hold ids in [0, 9), got 9": lambda: NgramTable.build([np.array([9])], 9, 2),
    "texts must hold at least one token": lambda: NgramTable.build([], 9, 2),
    "order must be an integer in [1, 8], got 9": lambda: NgramTable.build(TEXTS, 9, 9),
    "min_count must be at least 1": lambda: NgramTable.build(TEXTS, 9, 2, 0),
    "must name an n-gram table, got README.md": lambda: NgramTable.load("README.md"),
    "max_ngram must be an integer in [1, 1024], got 0": lambda: NasdDrafter(max_ngram=0),
    "min_ngram must be at most max_ngram=4, got 5": lambda: NasdDrafter(min_ngram=5),
    "top_k must be an integer in [0, 1024], got -1": lambda: NasdDrafter(top_k=-1),
    "min_match must be at least 1, got 0": lambda: RestDrafter(CORPUS, 0),
    "min_match must be at most 2, got 3": lambda: RestDrafter(CORPUS, 3, 2),
    "min_match must be at most 4, got 5": lambda: SuffixAutomatonDrafter(min_match=5, max_match=4),
    "must be in [0, 1], got 2.0": lambda: SuffixAutomatonDrafter(min_confidence=2),
    "hold ids in [0, 2^31), got -1": lambda: SuffixAutomatonDrafter(np.array([-1])),
    "window must be an integer in [1, 1024], got 0": lambda: LookaheadDrafter(window=0),
    "ngram must be an integer in [2, 1024], got 1": lambda: LookaheadDrafter(ngram=1),
    "must be in [2, 1025], got 1206": lambda: LookaheadDrafter(window=600),
    "must be in [2, 1025], got 1": lambda: LookaheadDrafter(1, 2, 0),
    "three integers W,N,G, got '4,3'": lambda: LookaheadDrafter.from_text("4,3"),
    "three integers W,N,G, got '4,3,x'": lambda: LookaheadDrafter.from_text("4,3,x"),
    "three integers W,N,G, got '4,3,-1'": lambda: LookaheadDrafter.from_text("4,3,-1"),
    "ranks of tree must be below top_k=2, got 2": lambda: TokenRecyclingDrafter(WIDE, 2),
    "top_k must be an integer in [1, 1024], got 0": lambda: TokenRecyclingDrafter(top_k=0),
    "assistant_lookbehind must be at least 1, got 0": lambda: text_drafter(assistant_lookbehind=0),
    "tokens must be at least 1, got 0": lambda: VerticalCascade(model(), model(), 0),
    "in a cascade, got NgramDrafter": lambda: VerticalCascade(model(), NgramDrafter()),
    "in a cascade, got TextDrafter": lambda: HorizontalCascade([model(), text_drafter()], [1]),
    "drafters must be 2 to 8, got 1": lambda: HorizontalCascade([model()], []),
    "drafters must be 2 to 8, got 0": lambda: HorizontalCascade([], []),
    "counts must be 1 numbers": lambda: HorizontalCascade([model()] * 2, [0]),
    "drafter must be given, got None": lambda: check_drafter(None, model()),
    "samples must be ": lambda: check_drafter("random", model(), samples=0),
}
TYPES = {
    "order must be an integer in [1, 8], got T": lambda: NgramDrafter(order=True),
    "table must be None or an NgramTable, got 3": lambda: NgramDrafter(3),
    "order must be an integer": lambda: NgramTable.build(TEXTS, 9, 2.5),
    "fingerprint must be bytes, got 'f'": lambda: NgramTable.build(TEXTS, 9, 2, fingerprint="f"),
    "top_k must be an integer ": lambda: NasdDrafter(top_k=True),
    "corpus must be a Corpus, got list": lambda: RestDrafter([1]),
    "corpus must be a Corpus or None, got list": lambda: SuffixAutomatonDrafter([1]),
    "max_match must be an integer, got 2.5": lambda: SuffixAutomatonDrafter(max_match=2.5),
    "guesses must be an integer ": lambda: LookaheadDrafter(guesses=True),
    "text_ngrams must be True or False, got 1": lambda: LookaheadDrafter(text_ngrams=1),
    "tree must be None or a TreeSpec, got (2, 1)": lambda: TokenRecyclingDrafter((2, 1)),
    "inherit must be True or False, got 1": lambda: TokenRecyclingDrafter(inherit=1),
    "tokenizer must be a tokenizer of Transformers, got 3": lambda: text_drafter(tokenizer=3),
    "target_lookbehind must be an integer, got 2.0": lambda: text_drafter(target_lookbehind=2.0),
    "model must be a causal language model": lambda: VerticalCascade(3, model()),
    "a cascade must hold Drafters, names of d": lambda: VerticalCascade(model(), 3),
    "must be an integer, got 2.0": lambda: VerticalCascade(model(), model(), 2.0),
    "counts[0] must be an integer, got 'a'": lambda: HorizontalCascade([model()] * 2, ["a"]),
    "layers must be an integer, got 2": lambda: EarlyExitDrafter(2.0),
    "last must be an integer, got None": lambda: LayerSkipDrafter(1, None),
    "max_new_tokens must be ": lambda: check_drafter("random", model(), max_new_tokens=1.5),
    "rank must be an integer, got '1'": lambda: RemoteDrafter("1"),
}
CASES = [(ValueError, *case) for case in VALUES.items()]
CASES += [(TypeError, *case) for case in TYPES.items()]


@pytest.mark.parametrize(("error", "message", "make"), CASES, ids=[case[1] for case in CASES])
def test_a_wrong_argument_is_named(error, message, make):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)
