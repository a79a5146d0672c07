"""Small heads for tiny targets, and what a head must draft by a forward over the whole text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from specdec_hf import generate
from specdec_hf.heads.blockwise import BlockwiseHeads, save_blockwise
from specdec_hf.heads.eagle import EagleConfig, EagleHead, save_eagle
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.exit_head import ExitConfig, ExitHead, save_exit
from specdec_hf.heads.medusa import MedusaHeads, save_medusa
from specdec_hf.heads.mtp.head import MtpBlock, MtpConfig, MtpHead
from specdec_hf.heads.parallel import ParallelConfig
from specdec_hf.heads.pass_head import PassConfig, PassHead, save_pass
from specdec_hf.lab.training.draft_model import DraftLlama, DraftModelConfig
from specdec_hf.lab.training.unrolled import Batch, loss_of, unroll
from support import hf_models


def head_for(target: Any, tokens: Any = None, noise: float = 0.0) -> Eagle3Head:
    """An untrained head that begins as the target's last layer, with noise on each weight.

    Its draft vocabulary is all tokens but the last where none are given.
    """
    if tokens is None:
        tokens = range(target.config.vocab_size - 1)
    head = Eagle3Head(HeadConfig.for_target(target, len(tokens)))
    head.tokens = torch.tensor(list(tokens))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    head.begin_as(target)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(noise * torch.randn_like(weight))
    torch.set_rng_state(state)
    head.borrow(target)
    return head.eval()


def eagle_head(target: Any) -> EagleHead:
    """A head of the first EAGLE that begins as the target's last layer."""
    like, head = head_for(target), EagleHead(EagleConfig.like(target))
    size = target.config.hidden_size
    with torch.no_grad():
        for name, weight in head.midlayer.named_parameters():
            if name == "fc.weight":
                weight.copy_(torch.cat([0.1 * torch.eye(size), torch.eye(size)], dim=1))
            elif name == "fc.bias":
                weight.zero_()
            else:
                taken = like.midlayer.get_parameter(name)
                weight.copy_(taken[:, -weight.shape[-1] :] if weight.ndim > 1 else taken)
    return head.eval()


def parallel_heads(kind: type[Any], target: Any, tokens: Any = None, inner: int = 2) -> Any:
    """Three heads of random weights, for all tokens but the last or for those that are given."""
    if tokens is None:
        tokens = range(target.config.vocab_size - 1)
    head = kind(ParallelConfig.for_target(target, len(tokens), 3, inner))
    head.tokens = torch.tensor(list(tokens))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    head.borrow(target)
    return head.eval()


def exit_head(target: Any) -> ExitHead:
    """An exit after the first layer, of weights that are near those of none."""
    head = ExitHead(ExitConfig.for_target(target, 1))
    head.begin_as(target)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        head.projection.weight.add_(0.05 * torch.randn(32, 32, generator=generator))
        head.norm.weight.add_(0.3 * torch.randn(32, generator=generator))
    return head.eval()


def pass_head(target: Any, size: int = 3) -> PassHead:
    """Look-ahead embeddings at random."""
    head = PassHead(PassConfig.for_target(target, size))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    head.begin_as(target)
    torch.set_rng_state(state)
    return head.eval()


# How a head is made and written, by the name of its drafter.
MADE: dict[str, tuple[Callable[[Any], Any], Callable[..., None]]] = {
    "eagle3": (head_for, save_head),
    "eagle": (eagle_head, save_eagle),
    "medusa": (partial(parallel_heads, MedusaHeads), save_medusa),
    "blockwise": (partial(parallel_heads, BlockwiseHeads), save_blockwise),
    "exit_head": (exit_head, save_exit),
    "pass_head": (pass_head, save_pass),
}


def folder_of(kind: str, target: Any, folder: Path) -> Path:
    """The folder of such a head for a target."""
    make, save = MADE[kind]
    save(make(target), folder / kind, torch.float32)
    return folder / kind


head_folder, eagle_folder, medusa_folder, blockwise_folder, exit_folder, pass_folder = (
    partial(folder_of, kind) for kind in MADE
)


def draft_llama(target: Any, seed: int = 0) -> DraftLlama:
    """An untrained draft model of one layer, made without the caller's random numbers."""
    state = torch.get_rng_state()
    head = DraftLlama(DraftModelConfig.for_target(target, 32, 1), target)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head.begin_as(target)
    head.borrow(target)
    return head.eval()


def mtp_head(target: Any, layers: int = 1) -> MtpHead:
    """Layers of multi-token prediction for a Llama model, each a copy of its last layer."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, size = layers, config.hidden_size
    with torch.random.fork_rng(devices=[]):
        decoder = type(target)(config).get_decoder()
        blocks = [MtpBlock(layer, type(decoder.norm), config) for layer in decoder.layers]
    own = target.get_decoder()
    with torch.no_grad():
        for block in blocks:
            block.layer.load_state_dict(own.layers[-1].state_dict())
            block.norm.load_state_dict(own.norm.state_dict())
            block.eh_proj.weight.copy_(torch.cat([0.5 * torch.eye(size), torch.eye(size)], dim=1))
    return MtpHead(MtpConfig(config), blocks).eval()


def rounds_of(
    target: Any, drafter: Any, lengths: tuple[int, ...] = (9, 4), **settings: Any
) -> tuple[Any, list[tuple[list[list[int]], Any]]]:
    """What a call returns, and of each round the text of each sequence and the draft."""
    rounds, propose = [], drafter.propose

    def proposed(history: Any, limits: Any) -> Any:
        draft = propose(history, limits)
        if draft is not None:
            texts = zip(history.tokens, history.lengths, strict=True)
            rounds.append(([text[:length].tolist() for text, length in texts], draft))
        return draft

    drafter.propose = proposed
    out = generate(
        target, **hf_models.prompts(lengths), drafter=drafter, guard=False,
        return_dict_in_generate=True, **{"max_new_tokens": 12, **settings},
    )  # fmt: skip
    assert len(rounds) > 2
    return out, rounds


@torch.no_grad()
def text_batch(target: Any, layers: Sequence[int], tokens: list[int]) -> Batch:
    """A batch of one text, with the states that a head of some layers is trained on."""
    ids = torch.tensor([tokens])
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[0][..., :0], *(states[layer] for layer in layers)], dim=-1)
    return Batch(
        ids, target.get_input_embeddings()(ids), features, states[-1],
        torch.tensor([len(tokens)]), torch.tensor([0]),
    )  # fmt: skip


def learnt(target: Any, tokens: Sequence[int], steps: int, rate: float) -> Eagle3Head:
    """A head after 30 updates on a text, so that it drafts some of it."""
    head = head_for(target)
    batch = text_batch(target, head.config.layers, list(tokens))
    optimizer = torch.optim.Adam(head.parameters(), rate)
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(head, batch, steps)[0].backward()
        optimizer.step()
    return head


@torch.no_grad()
def expected_logits(
    target: Any, head: Eagle3Head, tokens: list[int], drafts: list[int]
) -> torch.Tensor:
    """Logits [draft vocabulary] of the draft after a text and some drafts, as it is trained."""
    batch = text_batch(target, head.config.layers, [*tokens, *drafts])
    batch.features[:, len(tokens) - 1 :] = 0  # of tokens that the target has not read
    *_, logits = unroll(head, batch, len(drafts) + 1)
    return logits[0, len(tokens) - 2]


def differences(
    rounds: Sequence[tuple[list[list[int]], Any]],
    logits_of: Callable[[list[int], list[int]], Any],
    ranks: Sequence[int] = (),
) -> list[tuple[float, int]]:
    """How far what drafts say of their tokens is from what it must be.

    That is the logits [V] of a chain, by the largest of them, and the scores of a tree, which are
    log-probabilities of paths. A draft with neither has tokens of given ranks: another one is
    infinitely far.

    Returns:
        Of each token the difference, and how many drafts are above it.
    """
    found = []
    for texts, draft in rounds:
        for b, text in enumerate(texts):
            paths: dict[int, tuple[list[int], float]] = {-1: ([], 0.0)}
            rows: dict[int, torch.Tensor] = {}
            size = draft.tokens.shape[1] if draft.parents is not None else draft.counts[b]
            for n, token in enumerate(draft.tokens[b, :size].tolist()):
                if token < 0:
                    continue
                above = n - 1 if draft.parents is None else int(draft.parents[b, n])
                path, score = paths[above]
                if above not in rows:
                    rows[above] = logits_of(text, path)
                row = rows[above]
                score += float(row.log_softmax(-1)[token])
                paths[n] = [*path, token], score
                if draft.distribution is not None:
                    own = draft.distribution.logits[b, n].to(row)
                    assert own.isneginf().equal(row.isneginf())
                    known = row[row.isfinite()]
                    far = (own[row.isfinite()] - known).abs().max()
                    difference = float(far / known.abs().max().clamp(min=1))
                elif draft.scores is not None:
                    difference = abs(float(draft.scores[b, n]) - score) / max(1, -score)
                else:
                    right = token == int(row.sort(descending=True).indices[ranks[n]])
                    difference = 0.0 if right else torch.inf
                found.append((difference, len(path)))
    return found
