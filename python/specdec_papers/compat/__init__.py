"""The functions of the program Speculative-Decoding, over the loop of this package.

The program (github.com/romsto/Speculative-Decoding) decodes one sequence of a Hugging Face model in
plain Python. Its functions have here their own names, arguments and results, so that code which
calls them changes its imports and nothing else: `speculative_generate`, `autoregressive_generate`,
`beam_search_generate`, `max_fn`, `prune_cache` and the logits processors. Nothing of the program is
imported. docs/compat.md lists every difference.
"""

from specdec_papers.compat.beam_search import beam_search_generate
from specdec_papers.compat.caches import prune_cache
from specdec_papers.compat.decoding import autoregressive_generate, max_fn, speculative_generate
from specdec_papers.compat.logits_processors import (
    GreedyProcessor,
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)

__all__ = [
    "GreedyProcessor",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NucleusProcessor",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "beam_search_generate",
    "max_fn",
    "prune_cache",
    "speculative_generate",
]
