"""A small Llama of the target's vocabulary, which is trained as heads are and saved as models are.

Several of them draft one tree, in which a token is found as soon as one of them drafts it. They are
trained one after another, each at the places that the ones before it miss: what one of them gets
right teaches the next ones nothing (boosting).

Sources: DistillSpec, arXiv 2310.08461; SpecInfer, arXiv 2305.09781, whose boosting leaves out whole
texts, and this one places.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specdec_hf.arguments import check_integer
from specdec_hf.heads.base import FinalStateConfig, WholeVocabularyConfig, WholeVocabularyHead
from specdec_hf.runner.protocol import context_length, vocab_size_of
from transformers import LlamaConfig, LlamaForCausalLM

HEAD_SIZE = 32  # of attention; widths are its multiples
INNER = 4  # the feed-forward layer's width, relative to the model's
CONTEXT = 2048  # where the target's config says none
# Standard deviation of the embeddings as training begins: small beside what the layers add to them,
# since an output matrix that is tied to large ones would draft the token that it has just read.
SPREAD = 0.05


@dataclass(frozen=True)
class DraftModelConfig(FinalStateConfig, WholeVocabularyConfig):
    """Sizes of a draft model.

    Attributes:
        target_hidden_size: H, of the target's hidden states.
        vocab_size: of the target, all of which is drafted.
        width: of the draft model's hidden states.
        num_layers: of the draft model.
    """

    target_hidden_size: int
    vocab_size: int
    width: int
    num_layers: int

    @classmethod
    def for_target(cls, model: Any, width: int, num_layers: int) -> DraftModelConfig:
        """For a target at least as wide.

        Raises:
            ValueError: a width that is no multiple of 32 or larger than the target's.
        """
        text = model.config.get_text_config(decoder=True)
        size = check_integer("width", width, HEAD_SIZE)
        if size % HEAD_SIZE or size > text.hidden_size:
            raise ValueError(
                f"width must be a multiple of {HEAD_SIZE} of at most {text.hidden_size}, the "
                f"target's, got {width}"
            )
        layers = check_integer("num_layers", num_layers, 1)
        return cls(text.hidden_size, vocab_size_of(model), size, layers)


class DraftLlama(WholeVocabularyHead):
    """A causal LM in the place of a head; it reads tokens alone.

    Args:
        config: its sizes.
        model: the target, for its special tokens and its context. The token that pads has no row of
            its own here: Transformers would not train it, and it often ends texts, too.

    Attributes:
        llama: the model, whose output matrix is its embeddings. ``lm_head`` is the target's output
            matrix, which labels are made with.
    """

    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, model: Any) -> None:
        super().__init__(config.target_hidden_size)
        self.config = config
        text = model.config.get_text_config(decoder=True)
        with torch.random.fork_rng(devices=[]):
            self.llama: Any = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.width,
                    intermediate_size=INNER * config.width,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.width // HEAD_SIZE,
                    max_position_embeddings=context_length(model) or CONTEXT,
                    tie_word_embeddings=True,
                    bos_token_id=getattr(text, "bos_token_id", None),
                    eos_token_id=getattr(text, "eos_token_id", None),
                )
            ).float()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] after each of the tokens [B, T], which may be padded on the right."""
        out: torch.Tensor = self.llama(input_ids=tokens, use_cache=False).logits
        return out

    @torch.no_grad()
    def begin_as(self, model: Any) -> None:
        """Draw the layers, and take the embeddings from the target's output matrix.

        They are its rows in the directions in which its logits differ most, and the final norm
        gives the logits the target's scale.
        """
        for name, weight in self.llama.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1)
            else:
                added = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.num_layers if added else 1
                weight.normal_(std=1 / math.sqrt(weight.shape[1] * depth))
        rows = project_output(model, self.config.width)
        spread = rows.std() / SPREAD
        self.llama.get_input_embeddings().weight.copy_(rows / spread)
        self.llama.model.norm.weight.fill_(float(spread))


def project_output(model: Any, width: int) -> torch.Tensor:
    """[V, width] float32 on the host, the target's output matrix in its strongest directions.

    The rows have the scale of the final norm's weight, so that they read states of size 1; where a
    target has no such norm, they are those of the matrix.
    """
    rows = model.get_output_embeddings().weight.detach().float()
    weight = getattr(getattr(model.get_decoder(), "norm", None), "weight", None)
    if isinstance(weight, torch.Tensor) and weight.shape == rows.shape[1:]:
        rows = rows * weight.detach().float()
    _, directions = torch.linalg.eigh((rows.T @ rows).double())  # in ascending order
    strongest: torch.Tensor = directions[:, -width:].flip(1).float()
    projected: torch.Tensor = rows @ strongest
    return projected.cpu()


def save_draft_model(head: DraftLlama, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a draft model for `AutoModelForCausalLM.from_pretrained` and ``--drafter FOLDER``."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(head.llama).to("cpu", dtype).eval().save_pretrained(folder)


@torch.no_grad()
def missed_by(drafters: Sequence[Any], tokens: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """[B, T] bool, where no drafter's most likely next token is the target's.

    Args:
        drafters: causal LMs.
        tokens: [B, T] int64, padded on the right.
        choices: [B, T] int64, the target's most likely token after each.
    """
    missed = torch.ones_like(choices, dtype=torch.bool)
    for drafter in drafters:
        missed &= drafter(input_ids=tokens, use_cache=False).logits.argmax(dim=-1) != choices
    return missed
