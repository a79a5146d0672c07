"""Lossless speculative decoding on llama.cpp's Python binding, without torch.

    python examples/llama_cpp_speculative.py model.gguf "The prompt"

Drafts are copied from the text so far. The rule is `match`: the text is the one that the model
samples alone with the same noise. For that its logits must not depend on how many tokens it reads
at once. llama.cpp computes a single token by other kernels, which round differently, so every call
here after the first reads at least two.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from specdec_host import Status, SuffixAutomaton, verify_chain


def generate(
    llm: Any, prompt: list[int], new_tokens: int, gamma: int = 5, temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[int], int]:  # fmt: skip
    """The prompt with its continuation, and how often the model was called.

    llm: a `llama_cpp.Llama` that was made with `logits_all=True`. gamma: most drafts of a round;
        at 0 the model generates alone.
    """
    llm.reset()
    text, calls = SuffixAutomaton(), 0
    text.append(np.array(prompt))
    tokens = list(prompt)
    while (left := len(prompt) + new_tokens - len(tokens)) > 0:
        drafted = np.zeros(0, dtype=np.int64)
        if gamma:
            copied = text.propose(gamma, min_match=2).tokens[0]
            drafted = copied[copied >= 0][: left - 1]
        llm.eval([*tokens[llm.n_tokens :], *drafted.tolist()])
        verdict = verify_chain(
            llm.scores[None, llm.n_tokens - len(drafted) - 1 : llm.n_tokens],
            drafted[None],
            rule="match",
            temperature=temperature,
            seeds=np.array([seed]),
            positions=np.array([len(tokens)]),
            eos_token_ids=np.array([llm.token_eos()]),
        )
        # A draft out of range counts as none, and its status says so.
        status = Status(int(verdict.status[0]))
        if status & (Status.TARGET_INVALID | Status.BAD_PARAMETER):
            raise ValueError(f"the model or an argument gives no distribution: {status!r}")
        emitted = verdict.tokens[0][verdict.tokens[0] >= 0]
        text.append(emitted)
        tokens += emitted.tolist()
        calls += 1
        # The next eval removes the rejected drafts from the cache, and reads the last two tokens.
        llm.n_tokens = len(tokens) - 2
        if tokens[-1] == llm.token_eos():
            break
    return tokens, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    import llama_cpp  # noqa: PLC0415  # the tests of `generate` do without it

    llm = llama_cpp.Llama(given.model, logits_all=True, verbose=False)
    prompt = llm.tokenize(given.prompt.encode())
    tokens, calls = generate(llm, prompt, 64, temperature=given.temperature)
    print(llm.detokenize(tokens).decode(errors="replace"))
    print(f"{len(tokens) - len(prompt)} tokens in {calls} calls of the model")


if __name__ == "__main__":
    main()
