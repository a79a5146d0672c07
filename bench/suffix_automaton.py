"""Times one step of the suffix automaton: append 1 to 8 tokens, then propose.

    python -m bench.suffix_automaton [--history TOKENS] [--corpus TOKENS] [--steps N]

The text is a Markov chain of order 2 over 49,152 ids, so that contexts of all lengths occur again.
The corpus comes from the same chain. Times are those of the thread's processor, so that
other processes do not count; the median of elapsed time is printed beside them.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from specdec_host import Corpus, SuffixAutomaton

from bench.results import processor

VOCABULARY = 49152
FOLLOWERS = 4  # of each pair of tokens
LIMIT = 50.0  # microseconds a step
console = Console(highlight=False, width=120)


def markov_text(size: int, seed: int) -> NDArray[np.int64]:
    """Tokens that repeat contexts about as often as text does."""
    generator = np.random.default_rng(seed)
    picks = np.minimum(generator.geometric(0.6, size) - 1, FOLLOWERS - 1).tolist()
    new = (generator.zipf(1.2, size) % VOCABULARY).tolist()
    out, a, b = [], 1, 2
    for pick, other in zip(picks, new, strict=True):
        token = (a * 31 + b * 17 + pick * 7919) % 4001 if pick < FOLLOWERS - 1 else other
        out.append(token)
        a, b = b, token
    return np.array(out)


def steps(
    text: NDArray[np.int64], history: int, corpus: Corpus | None, count: int, number: int
) -> NDArray[np.float64]:
    """[number, 2] microseconds of each step, of the processor and elapsed, at `history` tokens."""
    times, generator = [], np.random.default_rng(9)
    automaton, length = None, 0
    while len(times) < number:
        if automaton is None or length > history + 512:
            automaton, length = SuffixAutomaton(corpus=corpus), history
            automaton.reserve(history + 1024)
            automaton.append(text[:history])
        added = text[length : length + generator.integers(1, 9)]
        begin = time.thread_time_ns(), time.perf_counter_ns()
        automaton.append(added)
        automaton.propose(8, count=count)
        end = time.thread_time_ns(), time.perf_counter_ns()
        times.append([(e - b) / 1000 for b, e in zip(begin, end, strict=True)])
        length += len(added)
    return np.array(times)


def main(
    history: Annotated[int, typer.Option(help="Tokens of the text before the steps.")] = 8000,
    corpus: Annotated[int, typer.Option(help="Tokens of the corpus.")] = 1_000_000,
    number: Annotated[int, typer.Option("--steps", help="Steps that are timed.")] = 5_000,
) -> None:
    """Print median, 99th percentile and maximum."""
    begin = time.perf_counter()
    shared = Corpus(markov_text(corpus, seed=0))
    console.print(
        f"{processor()}; corpus of {corpus} tokens in {time.perf_counter() - begin:.1f} s"
    )
    texts = {
        "Markov chain": markov_text(history + 2048, seed=1),
        "one token": np.zeros(history + 2048, dtype=np.int64),
        "all different": np.arange(history + 2048),
        "pairs with one token": np.where(
            np.arange(history + 2048) % 2, 0, np.arange(history + 2048)
        ),
    }
    table = Table(
        "text", "corpus", "chains", "median", "99 %", "maximum", "at most 50", "elapsed",
        title=f"microseconds of append (1 to 8 tokens) and propose (8) at {history} tokens",
    )  # fmt: skip
    for name, text in texts.items():
        for source, about in ((None, "none"), (shared, str(corpus))):
            for count in (1, 4):
                us, elapsed = steps(text, history, source, count, number).T
                table.add_row(
                    name, about, str(count), f"{np.median(us):.1f}", f"{np.percentile(us, 99):.1f}",
                    f"{us.max():.0f}", f"{(us <= LIMIT).mean():.2%}", f"{np.median(elapsed):.1f}",
                )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
