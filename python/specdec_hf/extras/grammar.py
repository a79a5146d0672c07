"""Texts that follow a grammar: a JSON schema, a regular expression, or one of Lark.

llguidance tells which tokens may follow a text. The loop takes its masks as bits, for the text and
for every draft that the grammar allows, and hands them to the verifier.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor

from specdec_hf.arguments import shown


class GrammarTokenizer:
    """A tokenizer as grammars read it; it takes about a second, so make one for a model.

    Args:
        tokenizer: a fast tokenizer of Transformers.
        vocab_size: of the model's logits.
        eos_token_ids: the tokens that end a text.

    Raises:
        ImportError: llguidance is not installed.
        TypeError: the tokenizer is not fast.
        ValueError: no token ends a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance.hf  # noqa: PLC0415  # optional
        except ImportError as error:
            line = "grammars need llguidance: pip install 'specdec-kernels[grammar]'"
            raise ImportError(line) from error
        if not getattr(tokenizer, "is_fast", False):
            name = type(tokenizer).__name__
            raise TypeError(f"tokenizer must be a fast one for grammars, got {name}")
        if not eos_token_ids:
            raise ValueError("eos_token_ids must name a token with which a text ends, got none")
        self.native = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)


class Grammar:
    """A grammar that is compiled for a tokenizer.

    Args:
        tokenizer: which the texts are written with.
        source: as llguidance has it; `json_schema`, `regex` and `lark` make it.

    Raises:
        ValueError: it does not compile, or no text follows it; the message has the reason.
    """

    def __init__(self, tokenizer: GrammarTokenizer, source: str) -> None:
        import llguidance  # noqa: PLC0415  # optional

        self.tokenizer = tokenizer
        self._matcher = llguidance.LLMatcher(tokenizer.native, source, log_level=0)
        if reason := self._matcher.get_error():
            raise ValueError(f"the grammar does not compile: {_in_one_line(reason)}")
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if reason := self._matcher.get_error():
            raise ValueError(f"no text follows the grammar: {_in_one_line(reason)}")
        if not words.any():
            raise ValueError("no text follows the grammar: it allows no first token")

    @classmethod
    def json_schema(cls, tokenizer: GrammarTokenizer, schema: dict[str, Any] | str) -> Grammar:
        """JSON that a schema describes, with one space after each comma and colon.

        A small model that may write white space anywhere often writes nothing else, and where it
        has no choice the tokens can be drafted. The key `x-guidance` of a schema gives llguidance
        other options.
        """
        import llguidance  # noqa: PLC0415  # optional

        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, dict):
            raise ValueError(f"schema must be a JSON object, got {shown(schema)}")
        source = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(parsed),
            defaults={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
        return cls(tokenizer, source)

    @classmethod
    def json_object(cls, tokenizer: GrammarTokenizer) -> Grammar:
        """Any JSON object."""
        return cls.json_schema(tokenizer, {"type": "object"})

    @classmethod
    def regex(cls, tokenizer: GrammarTokenizer, pattern: str) -> Grammar:
        """Texts that a regular expression matches as a whole."""
        import llguidance  # noqa: PLC0415  # optional

        return cls(tokenizer, llguidance.LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, tokenizer: GrammarTokenizer, text: str) -> Grammar:
        """Texts of a grammar in Lark's form, as llguidance reads it."""
        import llguidance  # noqa: PLC0415  # optional

        return cls(tokenizer, llguidance.LLMatcher.grammar_from_lark(text))

    def matcher(self) -> Any:
        """A matcher of llguidance at the beginning of a text."""
        return self._matcher.deep_copy()


class GrammarLimitError(RuntimeError):
    """A text that llguidance can follow no further, since its parser has limits."""


class GrammarProcessor(LogitsProcessor):
    """Forbids the tokens with which the text behind a prompt would leave a grammar.

    It is a function of its arguments, so that `generate` may ask it about drafts, and
    ``model.generate`` takes it too. In `generate` give it as the last logits processor, where it
    costs no pass over the logits.

    Args:
        grammar: what the text must follow, up to an end-of-sequence token.
        prompt: tokens of the prompt, padding included, that are no part of the text.
    """

    def __init__(self, grammar: Grammar, prompt: int) -> None:
        self.grammar, self.prompt = grammar, prompt
        self._matcher = grammar.matcher()
        self._taken: list[int] = []  # tokens that the matcher has read

    def of_one_sequence(self) -> GrammarProcessor:
        """The same for a sequence of a batch, which reads a text of its own."""
        return GrammarProcessor(self.grammar, self.prompt)

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether a text may begin with these tokens.

        Raises:
            GrammarLimitError: llguidance cannot tell.
        """
        same = 0
        for ours, given in zip(self._taken, tokens, strict=False):
            if ours != given:
                break
            same += 1
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        new = list(tokens[same:])
        taken = self._matcher.try_consume_tokens(new) if new else 0
        self._check()
        self._taken += new[:taken]
        return taken == len(new)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _in_one_line(self._matcher.get_error())
            self._matcher, self._taken = self.grammar.matcher(), []  # an error stays in a matcher
            raise GrammarLimitError(f"the grammar cannot be followed further: {reason}")

    def words(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """[ceil(V/32)] int32: which tokens may follow these, one bit each.

        Raises:
            RuntimeError: the text has left the grammar.
            GrammarLimitError: the grammar is too complex here.
        """
        if not self.follows(tokens):
            text = shown(list(tokens[len(self._taken) :]))
            must = "end with" if self._matcher.is_stopped() else "follow"
            raise RuntimeError(f"the text must {must} its grammar, got tokens {text}")
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._check()
        return words[: -(-self.grammar.tokenizer.vocab_size // 32)]  # theirs may have one more

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that must follow these, as the tokenizer writes them; none where several may.

        The grammar may allow the same text in other tokens.
        """
        if not self.follows(tokens):
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return found

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores [B, V] with -inf at the tokens that may not follow input_ids [B, T].

        Rows of texts that have ended keep their bits.
        """
        masked = scores.clone()
        for row, ids in zip(masked, input_ids[:, self.prompt :].tolist(), strict=True):
            if not self.grammar.tokenizer.eos_token_ids.isdisjoint(ids):
                continue
            row[~allowed(self.words(ids), len(row)).to(row.device)] = -torch.inf
        return masked  # type: ignore[return-value]  # a Tensor


def _in_one_line(reason: str) -> str:
    lines = reason.splitlines()
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines)[0]


def allowed(words: NDArray[np.int32], vocab: int) -> torch.Tensor:
    """[V] bool of words [ceil(V/32)]."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return torch.from_numpy(bits[:vocab].astype(bool))


def bits_of_drafts(
    grammar: GrammarProcessor,
    text: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    eos: Collection[int],
    out: NDArray[np.int32],
) -> None:
    """Write the masks of the rows of one sequence: after its text, and after each draft.

    Rows behind a draft that the grammar forbids or that ends the text keep their bits. Where
    llguidance cannot tell what follows a draft, nothing does.

    Args:
        grammar: of the sequence.
        text: its tokens behind the prompt.
        tokens: of the drafts [N], -1 where there is none.
        parents: of the drafts [N], -1 for the text.
        eos: tokens that end a text.
        out: [N+1, ceil(V/32)].
    """
    out[0] = grammar.words(text)
    paths = {-1: list(text)}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token < 0 or token in eos or parent not in paths:
            continue
        path = [*paths[parent], token]
        try:
            if grammar.follows(path):
                out[n + 1] = grammar.words(path)
                paths[n] = path
        except GrammarLimitError:  # a text that takes the draft ends with this error, others do not
            out[n + 1] = 0
