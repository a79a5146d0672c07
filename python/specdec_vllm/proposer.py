"""Drafts that are copied from text, for vLLM's speculative method "custom_class".

A *text* is the prompt of a request and the tokens that it has got so far. A row's text is all that
vLLM tells such a class of a request: no name, and no word when one ends, is preempted or resumes.
So drafts follow from the text alone, and so does the state that is kept between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafters.fingerprint import check_fingerprint

from specdec_kernels import ngram_propose
from specdec_vllm import vllm_interface
from specdec_vllm.messages import log, warn_once
from specdec_vllm.settings import DrafterName, Settings

if TYPE_CHECKING:
    from specdec_host import Corpus, SuffixAutomaton

NAME = "specdec_vllm.Proposer"  # what `speculative_config` calls it
# (texts [B, L], lengths [B], gamma) -> [B, gamma] int64 with -1 where nothing is drafted. A text of
# length 0 gets no draft.
Copy = Callable[[NDArray[np.int32], NDArray[np.int64], int], NDArray[np.int64]]
# Most tokens of a match, and the confidence at which a chain ends. A test compares all parameters
# with those of the drafters of specdec_hf that have the same names.
AUTOMATON_MATCH, REST_MATCH = 32, 16
MIN_CONFIDENCE = 0.03


class Proposer:
    """Drafts for vLLM's V1 runner by copying from a request's text or from a datastore.

    vLLM makes one where its `speculative_config` has the method ``custom_class`` and the model
    ``specdec_vllm.Proposer``. `SPECDEC_VLLM_DRAFTER` says how it drafts, by default
    ``suffix_automaton``. The drafts are deterministic: they have no distribution.

    Args:
        vllm_config: of the engine.

    Raises:
        ValueError: an environment variable with a wrong value, a vLLM that is not supported, an
            option of the engine that is not served, or a datastore that cannot be read or is of
            another kind, vocabulary or tokenizer.
        ImportError: `specdec_host` was not built.
    """

    def __init__(self, vllm_config: Any) -> None:
        drafter = Settings.from_environment().drafter or DrafterName("suffix_automaton")
        if reason := vllm_interface.unsupported() or _not_served(vllm_config):
            raise ValueError(f"{NAME} is not served: {reason}")
        model = vllm_config.model_config
        self.gamma: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = model.max_model_len
        self.vocab_size: int = model.get_vocab_size()
        self._copy = _copy_of(drafter, model)

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none; vLLM calls it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for each request of the batch.

        Args:
            sampled_token_ids: [B] lists, the tokens that this step has added to each text. A
                request with none still reads its prompt and gets no drafts.
            num_tokens_no_spec: [>= B] int32, the length of each text.
            token_ids_cpu: [>= B, max_model_len] int32, the texts.
            slot_mappings: not read.

        Returns:
            [B] lists of at most `num_speculative_tokens` ids. The next step adds a token more than
            it accepts, so near the maximal length of the model there are fewer.
        """
        number = len(sampled_token_ids)
        lengths = np.array(num_tokens_no_spec[:number], dtype=np.int64)
        limits = np.minimum(self.gamma, self.max_model_len - lengths - 1)
        limits[[not tokens for tokens in sampled_token_ids]] = 0
        lengths[limits <= 0] = 0
        if not lengths.any():
            return [[] for _ in range(number)]
        drafts = self._copy(token_ids_cpu[:number], lengths, self.gamma)
        return [
            self._known(row[: max(limit, 0)])
            for row, limit in zip(drafts, limits.tolist(), strict=True)
        ]

    def _known(self, draft: NDArray[np.int64]) -> list[int]:
        """The tokens before the first that the model has no logit for, such as -1."""
        unknown = np.flatnonzero((draft < 0) | (draft >= self.vocab_size))
        known: list[int] = draft[: unknown[0] if len(unknown) else None].tolist()
        return known


def check_drafter_is_used(settings: Settings, spec_config: Any) -> None:
    """Raises ValueError where the environment names a drafter and vLLM drafts with another."""
    model = getattr(spec_config, "model", NAME)
    if settings.drafter is not None and model != NAME:
        raise ValueError(
            f"SPECDEC_VLLM_DRAFTER needs speculative_config with method 'custom_class' and model "
            f"'{NAME}', got model {model!r}"
        )


def warn_of_other_texts(spec_config: Any, rule: str) -> None:
    """A drafter of vLLM that reads texts of other requests may meet the noise that drew them."""
    suffix = getattr(spec_config, "model", NAME) == "suffix"
    if suffix and rule != "match" and spec_config.suffix_decoding_max_cached_requests:
        warn_once(
            "specdec_vllm: method suffix drafts from texts of earlier requests, which biases "
            "sampled texts whose seeds come again; suffix_decoding_max_cached_requests=0 or rule "
            "match does not"
        )


def _not_served(vllm_config: Any) -> str | None:
    by_batch_size = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    if by_batch_size is not None:  # vLLM does not tell a custom class how many it wants
        return f"num_speculative_tokens_per_batch_size must be None, got {by_batch_size}"
    if vllm_config.model_config.enable_prompt_embeds:  # a row may hold another request's tokens
        return "enable_prompt_embeds must be False, got True"
    return None


def _copy_of(drafter: DrafterName, model: Any) -> Copy:
    if drafter.kind == "prompt_lookup":
        return _prompt_lookup
    if drafter.kind == "rest":
        return _rest(_corpus(drafter.file, model))
    return SuffixAutomata(_corpus(drafter.file, model) if drafter.file else None)


def _corpus(path: str, model: Any) -> Corpus:
    """The datastore in a file, for a model of its vocabulary and tokenizer."""
    import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

    try:
        corpus = specdec_host.Corpus.open(path)
    except OSError as error:
        raise ValueError(
            f"SPECDEC_VLLM_DRAFTER must name a readable file, got {path!r}: {error.strerror}"
        ) from error
    if corpus.vocab_size != model.get_vocab_size():
        raise ValueError(
            f"{path} must have the model's vocabulary of {model.get_vocab_size()} tokens, got "
            f"{corpus.vocab_size}"
        )
    note = check_fingerprint("corpus", corpus.fingerprint, vllm_interface.tokenizer_of(model))
    if note is not None:
        log.warning("%s: %s", path, note)
    return corpus


def _prompt_lookup(
    texts: NDArray[np.int32], lengths: NDArray[np.int64], gamma: int
) -> NDArray[np.int64]:
    found = ngram_propose(torch.from_numpy(texts), torch.from_numpy(lengths), gamma=gamma)
    return found.tokens.long().numpy()


def _rest(corpus: Corpus) -> Copy:
    def copy(texts: NDArray[np.int32], lengths: NDArray[np.int64], gamma: int) -> NDArray[np.int64]:
        drafts = np.full((len(lengths), gamma), -1, dtype=np.int64)
        for row in np.flatnonzero(lengths):
            end = lengths[row]
            found = corpus.propose(
                texts[row, max(0, end - REST_MATCH) : end], gamma, min_match=2,
                max_match=REST_MATCH, min_confidence=MIN_CONFIDENCE,
            )  # fmt: skip
            drafts[row] = found.tokens[0]
        return drafts

    return copy


class ReadText(NamedTuple):
    """An automaton and the text that it has read."""

    automaton: SuffixAutomaton
    text: NDArray[np.int32]

    def begins(self, text: NDArray[np.int32]) -> bool:
        size = len(self.text)
        return size <= len(text) and np.array_equal(self.text, text[:size])


class SuffixAutomata:
    """A suffix automaton for each text of the batch.

    An automaton goes on with a row whose text begins with all that it has read. What no row of a
    call goes on with is dropped, so a text is read anew after its request was out of the batch.
    """

    def __init__(self, corpus: Corpus | None) -> None:
        import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

        self._new = functools.partial(specdec_host.SuffixAutomaton, AUTOMATON_MATCH, corpus)
        self.read: dict[int, ReadText] = {}

    def __call__(
        self, texts: NDArray[np.int32], lengths: NDArray[np.int64], gamma: int
    ) -> NDArray[np.int64]:
        drafts = np.full((len(lengths), gamma), -1, dtype=np.int64)
        rows = {row: texts[row, : lengths[row]] for row in np.flatnonzero(lengths).tolist()}
        self._follow(rows)
        for row, text in rows.items():
            automaton, read = self.read[row]
            automaton.append(text[len(read) :])
            self.read[row] = ReadText(automaton, text.copy())
            drafts[row] = automaton.propose(gamma, min_confidence=MIN_CONFIDENCE).tokens[0]
        return drafts

    def _follow(self, rows: dict[int, NDArray[np.int32]]) -> None:
        """Give each row an automaton: its own, one of a row that vLLM has moved, or a new one."""
        earlier = self.read
        self.read = {
            row: earlier.pop(row)
            for row, text in rows.items()
            if row in earlier and earlier[row].begins(text)
        }
        for row in rows.keys() - self.read.keys():
            moved = next((r for r, known in earlier.items() if known.begins(rows[row])), None)
            none = np.empty(0, dtype=np.int32)
            self.read[row] = ReadText(self._new(), none) if moved is None else earlier.pop(moved)
