"""Logits processors that the fields of a request ask for, and the grammar of its texts."""

from __future__ import annotations

import asyncio
from typing import Any

from specdec_hf.extras.grammar import Grammar, GrammarProcessor, GrammarTokenizer
from specdec_hf.extras.penalties import PresenceFrequencyPenalty
from specdec_hf.runner.protocol import vocab_size_of
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec_serve.faults import Fault
from specdec_serve.fields import FREE, Constraint, PenaltyFields


class Constraints:
    """Makes the processors of requests.

    Args:
        model: which the texts come from; None where a test has none.
        tokenizer: of the model.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._grammars: GrammarTokenizer | None = None
        self._making = asyncio.Lock()

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text."""
        config = getattr(self.model, "generation_config", None)
        given = getattr(config, "eos_token_id", None)
        listed = given if isinstance(given, list) else [given]
        return [token for token in listed if token is not None]

    async def grammar(self, field: str, constraint: Constraint) -> Grammar | None:
        """What texts of a request must follow; compiled in a thread, since that may take long.

        Args:
            field: of the request, for messages.
            constraint: its value.
        """
        if constraint == FREE:
            return None
        try:
            async with self._making:
                if self._grammars is None:
                    vocab = vocab_size_of(self.model)
                    self._grammars = await asyncio.to_thread(
                        GrammarTokenizer, self.tokenizer, vocab, self.ends
                    )
        except (ImportError, TypeError, ValueError) as error:  # of the server, not of the request
            raise Fault(400, f"{field} is not served: {error}", param=field) from error
        try:
            return await asyncio.to_thread(_compiled, self._grammars, constraint)
        except ValueError as error:
            raise Fault(
                400, f"{field} must be followed by some text: {error}", param=field
            ) from error

    def processors(
        self, asked: PenaltyFields, prompt: int, grammar: Grammar | None
    ) -> list[LogitsProcessor]:
        """Those of one text behind a prompt of so many tokens, in the order of vLLM."""
        made: list[LogitsProcessor] = []
        if asked.logit_bias:
            vocab = vocab_size_of(self.model)
            if max(asked.logit_bias) >= vocab:
                line = f"logit_bias must name token ids below {vocab}, got {max(asked.logit_bias)}"
                raise Fault(400, line, param="logit_bias")
            biases = {(token,): bias for token, bias in asked.logit_bias.items()}
            made.append(SequenceBiasLogitsProcessor(biases))  # type: ignore[arg-type]  # theirs
        if asked.min_tokens and self.ends:
            made.append(
                MinNewTokensLengthLogitsProcessor(
                    prompt, asked.min_tokens, self.ends, device=self.model.device
                )
            )
        if asked.repetition_penalty != 1:
            made.append(RepetitionPenaltyLogitsProcessor(asked.repetition_penalty))
        if asked.presence_penalty or asked.frequency_penalty:
            made.append(
                PresenceFrequencyPenalty(asked.presence_penalty, asked.frequency_penalty, prompt)
            )
        if grammar is not None:
            made.append(GrammarProcessor(grammar, prompt))
        return made


def _compiled(tokenizer: GrammarTokenizer, constraint: Constraint) -> Grammar:
    kind, source = constraint
    if kind == "regex":
        return Grammar.regex(tokenizer, source)
    if kind == "json_object":
        return Grammar.json_object(tokenizer)
    return Grammar.json_schema(tokenizer, source)
