"""Logits processors: how a token is chosen from a row, and the same as arguments of the loop."""

from __future__ import annotations

import abc
from typing import Any

import torch
from specdec_hf.arguments import check_integer, check_value, shown
from specdec_hf.extras.token_outputs import filtered
from specdec_hf.request.sampling import Sampling, sequence_seeds
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_kernels import sample


class LogitsProcessor(abc.ABC):
    """How a token is chosen from a row: the distribution of its logits, and the choice.

    A class of your own overrides ``_process`` and inherits ``sample`` from `GreedyProcessor` or
    `MultinomialProcessor`.

    Args:
        temperature: above 0 and finite; the processed logits are divided by it.

    Raises:
        TypeError: an argument that is no number, by name.
        ValueError: an argument out of range, by name.
    """

    def __init__(self, temperature: float) -> None:
        check_value("temperature", temperature)
        if temperature == 0:
            raise ValueError("temperature must be above 0, got 0; GreedyProcessor is greedy")
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """The probabilities [..., V] float32 of logits [..., V], which are not changed."""
        return (self._process(logits.float().clone()) / self.temperature).softmax(-1)

    @abc.abstractmethod
    def _process(self, logits: Tensor) -> Tensor:
        """The logits [..., V] with -inf at tokens that must not be chosen."""

    @abc.abstractmethod
    def sample(self, probs: Tensor) -> Tensor:
        """One token id [..., 1] int64 for each row of probabilities [..., V]."""


class GreedyProcessor(LogitsProcessor):
    """The most likely token."""

    def __init__(self, temperature: float = 1) -> None:
        super().__init__(temperature)

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        return probs.argmax(-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """A token drawn from the whole distribution.

    ``sample`` calls the op `specdec_kernels.sample` with seeds from torch's default generator.

    >>> torch.manual_seed(0)  # doctest: +SKIP
    >>> processor = MultinomialProcessor(temperature=0.8)
    >>> processor.sample(processor(torch.tensor([[0.0, -torch.inf]])))
    tensor([[0]])
    """

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1])
        seeds = torch.tensor(sequence_seeds(None, len(rows)), device=rows.device)
        drawn = sample(rows.float().log(), seeds=seeds, positions=torch.zeros_like(seeds)).tokens
        invalid = (drawn < 0).nonzero().flatten().tolist()
        if invalid:
            raise RuntimeError(
                f"probs must hold a distribution in every row, got none in rows {shown(invalid)}"
            )
        return drawn.view(*probs.shape[:-1], 1)


class TopKProcessor(MultinomialProcessor):
    """A token drawn from the ``top_k`` most likely, and those as likely as the last of them.

    Args:
        temperature: as in `LogitsProcessor`.
        top_k: at least 1.
    """

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature)
        self.top_k = check_integer("top_k", top_k, 1)

    def _process(self, logits: Tensor) -> Tensor:
        return _filtered(logits, top_k=self.top_k)


class NucleusProcessor(MultinomialProcessor):
    """A token drawn from the most likely that have ``top_p`` together at temperature 1.

    Args:
        temperature: as in `LogitsProcessor`, applied to the tokens that remain.
        top_p: in (0, 1].
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature)
        check_value("top_p", top_p)
        self.top_p = top_p

    def _process(self, logits: Tensor) -> Tensor:
        return _filtered(logits, top_p=self.top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """`TopKProcessor`, then `NucleusProcessor` over the tokens that it left."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature)
        self.top_k = check_integer("top_k", top_k, 1)
        check_value("top_p", top_p)
        self.top_p = top_p

    def _process(self, logits: Tensor) -> Tensor:
        return _filtered(logits, top_k=self.top_k, top_p=self.top_p)


GREEDY = GreedyProcessor()


def sampling_arguments(processor: LogitsProcessor) -> dict[str, Any]:
    """The arguments of `generate` that choose tokens as a processor does.

    The ops filter after the temperature. So they take a nucleus at temperature 1 themselves, and
    another one is a processor of logits.
    """
    if not isinstance(processor, LogitsProcessor):
        raise TypeError(f"logits_processor must be a LogitsProcessor, got {shown(processor)}")
    kind = type(processor)
    greedy = kind.sample is GreedyProcessor.sample
    if not greedy and kind.sample is not MultinomialProcessor.sample:
        raise ValueError(
            "logits_processor must have the sample method of GreedyProcessor or "
            f"MultinomialProcessor, got {kind.__name__} with its own"
        )
    if kind.__call__ is not LogitsProcessor.__call__:
        raise ValueError(
            f"logits_processor must have the __call__ of LogitsProcessor, got {kind.__name__} with "
            "its own; _process is for its logits"
        )
    arguments: dict[str, Any] = {"do_sample": not greedy}
    if not greedy:
        arguments |= Sampling(float(processor.temperature), 0, 1.0, 0.0).to_dict()
    served = kind in (GreedyProcessor, MultinomialProcessor, TopKProcessor)
    served |= kind in (NucleusProcessor, TopKNucleusProcessor) and processor.temperature == 1
    if served:
        fields = ("top_k", "top_p")
        return arguments | {n: getattr(processor, n) for n in fields if hasattr(processor, n)}

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        return processor._process(scores)

    return arguments | {"logits_processor": LogitsProcessorList([process])}


def _filtered(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits [..., V] with -inf at the tokens that the filters of the ops remove."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    return filtered(rows, Sampling(1.0, top_k, top_p, 0.0)).reshape(logits.shape)
