"""The text beside a shipped head, and how far a head agrees with a target on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from specdec_hf.arguments import Refused, check_integer, check_integers
from specdec_hf.runner.self_check import PASSING, undisturbed

SAMPLE = "sample.json"


class Sample(NamedTuple):
    """A text of the target that a head was trained for.

    Attributes:
        tokens: all of them.
        answer: where the answer begins, which alone counts.
    """

    tokens: Sequence[int]
    answer: int


def write_sample(folder: Path, sample: Sample) -> None:
    """Write the text beside a head."""
    (folder / SAMPLE).write_text(json.dumps(sample._asdict()) + "\n")


def read_sample(folder: Path, vocab_size: int) -> Sample | None:
    """The text that lies beside a head, or None without one.

    Raises:
        ValueError: a file that cannot be read, by name.
    """
    path = folder / SAMPLE
    if not path.exists():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        tokens = check_integers("tokens", given["tokens"], 0, vocab_size - 1)
        # The first draft is of the third token: a head reads two.
        return Sample(tokens, check_integer("answer", given["answer"], 2, len(tokens)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"cannot read a head's {path}: {error}") from error


@torch.no_grad()
def agreement_of(head: Any, model: Any, sample: Sample) -> float | None:
    """The share of an answer's tokens at which the head's first draft is the target's choice.

    The target reads the whole text in one forward, which leaves no trace in it.

    Args:
        head: an `Eagle3Head` in float32, on the host; it takes the target's output matrix.
        model: the target, of the head's sizes.
        sample: the text.

    Returns:
        None where the target gives no hidden states.
    """
    ids = torch.tensor([list(sample.tokens)], device=model.device)
    try:
        with undisturbed(model):
            out = model.get_decoder()(ids, output_hidden_states=True, use_cache=False)
            layers = head.config.for_layers(len(out.hidden_states) - 1).layers
            features = torch.cat([out.hidden_states[n] for n in layers], dim=-1)
            embeddings = model.get_input_embeddings()(ids)
        head = head.to(model.device, torch.float32)
        head.borrow(model)
        hidden = head.fuse(features[:, :-1].float())
        places = torch.arange(hidden.shape[1], device=model.device)[None]
        q, k, v, residual = head.midlayer.project(
            embeddings[:, 1:].float(), hidden, head.turns(places)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        logits = head.logits(head.midlayer.finish(residual, attended))
        first = sample.answer - 2  # the pair there drafts the first token of the answer
        drafts = head.tokens[logits[:, first:].argmax(dim=-1)]
        final = out.last_hidden_state[:, first + 1 :]
        output = model.get_output_embeddings().weight.to(final.dtype)
        choices = functional.linear(final, output).argmax(dim=-1)
    except PASSING:
        raise
    except Exception:  # raised inside a model that was not made for such a call
        return None
    return float((drafts == choices).float().mean())
