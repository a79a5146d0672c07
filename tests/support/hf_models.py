"""Tiny random models, encoder-decoders and heads, and the embedded model, loaded once per process.

At the end is what a head must draft by a forward over the whole text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from specdec_hf import PromptLookupDrafter, SpeculativeDecoder, generate
from specdec_hf.cli.weights import load_embedded
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_lab.training.draft_model import DraftLlama, DraftModelConfig
from specdec_lab.training.unrolled import TrainingBatch, loss_of, unroll
from specdec_papers.blockwise import BlockwiseHeads, save_blockwise
from specdec_papers.eagle import EagleConfig, EagleHead, save_eagle
from specdec_papers.exit_head import ExitConfig, ExitHead, save_exit
from specdec_papers.layers import with_fewer_layers
from specdec_papers.medusa import MedusaHeads, save_medusa
from specdec_papers.mtp.head import MtpBlock, MtpConfig, MtpHead
from specdec_papers.parallel import ParallelConfig
from specdec_papers.pass_head import PassConfig, PassHead, save_pass
from transformers.generation.streamers import BaseStreamer

from specdec_kernels.versions import SUPPORTED, release

VOCAB = 67


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: on several, tiny models mostly wait for each other.

    conftest.py restores the number of threads.
    """
    torch.set_num_threads(1)


PAD = 0
NAMES = ("llama", "gpt2", "qwen2", "qwen3", "gemma2")
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
}


def needs_class(name: str) -> None:
    """Skip a test of a model class that an older version of Transformers does not have."""
    older = release(transformers.__version__) < release(SUPPORTED["transformers"].newest)
    if older and not hasattr(transformers, name):
        pytest.skip(f"there is no {name} in Transformers {transformers.__version__}")


def build(
    name: str,
    seed: int = 0,
    vocab_size: int = VOCAB,
    context: int = 256,
    layers: int = 2,
    **more: Any,
) -> Any:
    """A small random model. It has no end-of-sequence token, so a test decides the lengths.

    ``more`` are fields of its config.
    """
    fields = {
        "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD,
        "initializer_range": 0.3,
    }  # fmt: skip
    if name == "gpt2":
        fields |= {"n_positions": context, "n_embd": 32, "n_layer": layers, "n_head": 4}
    else:
        fields |= {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": context,
        }  # fmt: skip
    if name == "gemma2":
        fields |= {"sliding_window": 6, "attn_implementation": "eager"}
    if name in ("gemma2", "gpt2"):
        fields["tie_word_embeddings"] = False
    config_class, model_class = CLASSES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config_class(**{**fields, **more})).eval()


@cache
def tiny(name: str, seed: int = 0) -> Any:
    """A tiny model that tests share and must not change."""
    return encoder_decoder(name) if name in WEIGHTS else build(name, seed)


@cache
def perturbed(name: str, amount: float = 0.05) -> Any:
    """A drafter that often agrees with ``tiny(name)``: the same weights with some noise."""
    return with_noise(tiny(name), amount)


def with_noise(model: Any, amount: float) -> Any:
    """A copy of a model with some noise on its weights."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.numel() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(amount * weight.std() * noise.to(weight))
    return copied


def drafter_for(name: str, kind: str) -> Any:
    """The argument ``drafter`` of `generate` for kind "prompt_lookup" or "model"."""
    return perturbed(name) if kind == "model" else kind


def prompts(
    lengths: tuple[int, ...], seed: int = 1, vocab_size: int = VOCAB
) -> dict[str, torch.Tensor]:
    """Left-padded random prompts that repeat a phrase, so that prompt lookup finds matches."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for b, length in enumerate(lengths):
        phrase = torch.randint(1, vocab_size, (max(3, length // 2),), generator=generator)
        ids[b, width - length :] = phrase.repeat(3)[:length]
        mask[b, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def decode(model: Any, lengths: tuple[int, ...] = (9,), **settings: Any) -> Any:
    """What `generate` returns for prompts of some lengths: by default greedily without drafts."""
    settings = {"max_new_tokens": 12, "do_sample": False, "guard": False, **settings}
    settings.setdefault("drafter", None)
    inputs = prompts(lengths, vocab_size=model.config.vocab_size)
    return generate(model, **inputs, return_dict_in_generate=True, **settings)


def decode_as_generate(model: Any, lengths: tuple[int, ...] = (9,), **settings: Any) -> Any:
    """What `decode` returns, after a comparison of its greedy text with that of the model."""
    out = decode(model, lengths, **settings)
    inputs = prompts(lengths, vocab_size=model.config.vocab_size)
    new_tokens = settings.get("max_new_tokens", 12)
    own = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    assert out.sequences.tolist() == own.tolist()
    return out


def through(
    entry: str, model: Any, inputs: dict[str, Any], options: dict[str, Any], **kwargs: Any
) -> Any:
    """A call of `generate`, or of the model's own ``generate`` with options of a decoder."""
    if entry == "generate":
        return generate(model, **inputs, **options, **kwargs)
    return model.generate(**inputs, **kwargs, custom_generate=SpeculativeDecoder(**options))


def outcome(out: Any) -> tuple[list[list[int]], int, int]:
    """The text, and how many tokens were drafted and accepted."""
    return out.sequences.tolist(), out.stats.drafted, out.stats.accepted


NEW = 24
RAGGED = (9, 4, 12)
SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "seed": 5,
}  # fmt: skip


def run(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
    """`NEW` greedy tokens without drafts, unless the settings say otherwise."""
    given = {"max_new_tokens": NEW, "do_sample": False, "guard": False, "drafter": None}
    return generate(model, **inputs, return_dict_in_generate=True, **{**given, **settings})


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Every module of a model has the attributes at the end that it has at the beginning."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    yield
    for module, attributes in before:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())


@lru_cache(maxsize=1)
def smollm() -> tuple[Any, Any, Any]:
    """The embedded model, its tokenizer, and a drafter of its first layers that shares weights."""
    model, tokenizer = load_embedded()
    return model, tokenizer, with_fewer_layers(model, 6)


class Recorder(BaseStreamer):
    """Remembers every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def prefer_new(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Forbids the last five tokens of the prefix."""
    scores = scores.clone()
    for b, ids in enumerate(input_ids):
        scores[b, ids[-5:]] = -float("inf")
    return scores


# Logits processors, as arguments of `generate`.
PROCESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8], [12], [33]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 40))},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(1, 30))},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[3, 5], 6.0]]},
    "custom": {"logits_processor": transformers.LogitsProcessorList([prefer_new])},
}


class Clock:
    """Advances by so many seconds a call, and by what a drafter adds to ``now``."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def told(state: Any, tell: Callable[[Any, Any], Any]) -> Any:
    """A state whose drafts are what ``tell`` returns of the texts and of its own draft."""
    propose = state.propose
    state.propose = lambda texts, limits: tell(texts, propose(texts, limits))
    return state


class SlowLookup(PromptLookupDrafter):
    """Prompt lookup that takes some seconds of a clock for every draft."""

    def __init__(self, clock, seconds):
        super().__init__(3, 1)
        self.clock, self.seconds = clock, seconds

    def timed(self, texts, found):
        self.clock.now += 0.0 if found is None else self.seconds
        return found

    def begin(self, call):
        return told(super().begin(call), self.timed)


ENCODER_VOCAB = 110
START = 2
# Seed of the weights, and how far they spread: the text repeats one token less than with others.
WEIGHTS = {"t5": (5, 3.0), "bart": (4, 0.7), "whisper": (5, 0.7)}
TEXT_MODELS = ("t5", "bart")
_SMALL = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": START,
    "tie_word_embeddings": False,
}  # fmt: skip


def encoder_decoder(name: str, vocab_size: int = ENCODER_VOCAB, seed: int | None = None) -> Any:
    """A random model without an end-of-sequence token, so that a test decides the lengths."""
    if name == "t5":
        model: Any = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=vocab_size, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                decoder_start_token_id=START, pad_token_id=0, eos_token_id=None,
                feed_forward_proj="gated-gelu", tie_word_embeddings=False,
            )
        )  # fmt: skip
    elif name == "bart":
        model = transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                **_SMALL, vocab_size=vocab_size, max_position_embeddings=64,
                forced_eos_token_id=None,
            )
        )  # fmt: skip
    else:
        model = transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **_SMALL, vocab_size=vocab_size, num_mel_bins=8, max_source_positions=16,
                max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
            )
        )  # fmt: skip
    own, spread = WEIGHTS[name]
    generator = torch.Generator().manual_seed(own if seed is None else seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                scale = 1.0 if id(weight) in embeddings else weight.shape[-1] ** -0.5
                weight.copy_(spread * scale * torch.randn(weight.shape, generator=generator))
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model.eval()


def texts(lengths: tuple[int, ...], vocab_size: int = ENCODER_VOCAB) -> dict[str, Any]:
    """Random texts for an encoder, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(3, vocab_size, shape, generator=generator)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def sounds(batch_size: int, frames: int = 32) -> dict[str, Any]:
    """Random spectrograms [B, 8, frames] for the tiny Whisper, which reads 32 at a time."""
    generator = torch.Generator().manual_seed(1)
    return {"input_features": torch.randn(batch_size, 8, frames, generator=generator)}


def inputs_for(name: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Inputs of ``generate`` for one of the tiny models."""
    return sounds(len(lengths)) if name == "whisper" else texts(lengths)


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
    rounds, watched = [], copy.copy(drafter)

    def tell(texts: Any, draft: Any) -> Any:
        held = zip(texts.tokens, texts.lengths, strict=True)
        if draft is not None:
            rounds.append(([text[:length].tolist() for text, length in held], draft))
        return draft

    watched.begin = lambda call: told(drafter.begin(call), tell)
    out = generate(
        target, **prompts(lengths), drafter=watched, guard=False,
        return_dict_in_generate=True, **{"max_new_tokens": 12, **settings},
    )  # fmt: skip
    assert len(rounds) > 2
    return out, rounds


@torch.no_grad()
def text_batch(target: Any, layers: Sequence[int], tokens: list[int]) -> TrainingBatch:
    """A batch of one text, with the states that a head of some layers is trained on."""
    ids = torch.tensor([tokens])
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[0][..., :0], *(states[layer] for layer in layers)], dim=-1)
    return TrainingBatch(
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
                if draft.drawn is not None:
                    own = draft.drawn.logits[b, n].to(row)
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
