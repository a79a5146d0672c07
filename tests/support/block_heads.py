"""Heads that draft a block, in the layout of speculators, and what a pass of them must compute.

The names and fields are those of the library's version 0.9; nothing here uses this library's heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.published_heads import write
from torch.nn.functional import silu

DRAFTS = 4  # of a pass
SIZE, INNER, HEADS, SHARED, WIDTH = 32, 40, 4, 2, 8
KINDS = {"full": "full_attention", "sliding": "sliding_attention"}
LAYERS = {"dflash": "aux_hidden_state_layer_ids", "peagle": "eagle_aux_hidden_state_layer_ids"}
Tensors = dict[str, torch.Tensor]


def _config(kind: str, architecture: str, target: Any, draft: int, **fields: Any) -> dict[str, Any]:
    """A config.json; fields of the decoder layers go inside."""
    vocab_size = target.config.vocab_size
    types = fields.pop("types", ("full", "full"))
    window = fields.pop("window", None)
    inner = {
        "model_type": fields.pop("model_type", "qwen3"), "hidden_size": SIZE,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": SHARED,
        "head_dim": WIDTH, "num_hidden_layers": len(types), "hidden_act": "silu",
        "layer_types": [KINDS[one] for one in types], "sliding_window": window,
        "use_sliding_window": window is not None, "rms_norm_eps": 1e-5, "vocab_size": vocab_size,
        "max_position_embeddings": 512, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    }  # fmt: skip
    greedy = {"proposal_type": "greedy", "speculative_tokens": DRAFTS}
    return {
        "architectures": [architecture], "speculators_model_type": kind,
        "speculators_version": "0.9.0", "draft_vocab_size": draft, "mask_token_id": vocab_size - 1,
        "tie_word_embeddings": False, "transformer_layer_config": inner, LAYERS[kind]: [1, 0],
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [greedy],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
    } | fields  # fmt: skip


def _tensors(config: dict[str, Any], width: Callable[[int], int]) -> Tensors:
    """Random weights of the decoder layers, the norm, the output matrix and the draft vocabulary.

    Args:
        config: of config.json.
        width: numbers that layer n projects to queries, keys and values.
    """
    inner, draft = config["transformer_layer_config"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (SIZE,), "fc.weight": (SIZE, 2 * SIZE)}
    for n in range(inner["num_hidden_layers"]):
        layer, own = f"layers.{n}", width(n)
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (HEADS * WIDTH, own),
            f"{layer}.self_attn.k_proj.weight": (SHARED * WIDTH, own),
            f"{layer}.self_attn.v_proj.weight": (SHARED * WIDTH, own),
            f"{layer}.self_attn.o_proj.weight": (SIZE, HEADS * WIDTH),
            f"{layer}.mlp.gate_proj.weight": (INNER, SIZE),
            f"{layer}.mlp.up_proj.weight": (INNER, SIZE),
            f"{layer}.mlp.down_proj.weight": (SIZE, INNER),
            f"{layer}.input_layernorm.weight": (SIZE,),
            f"{layer}.post_attention_layernorm.weight": (SIZE,),
        }
        if inner["model_type"] == "qwen3":
            for x in "qk":
                shapes[f"{layer}.self_attn.{x}_norm.weight"] = (WIDTH,)
    if draft < inner["vocab_size"]:
        shapes["lm_head.weight"] = (draft, SIZE)
    tensors = _random(shapes)
    if draft < inner["vocab_size"]:
        tokens = torch.arange(draft) + 1  # all but the first ones
        tensors["d2t"] = tokens - torch.arange(draft)
        tensors["t2d"] = torch.zeros(inner["vocab_size"], dtype=torch.bool)
        tensors["t2d"][tokens] = True
    return tensors


def _random(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def dflash(target: Any, folder: Path, draft: int | None = None, **fields: Any) -> Path:
    """A DFlash head of two layers, for all tokens but the first where nothing else is said."""
    vocab_size = target.config.vocab_size
    fields = {"block_size": DRAFTS + 1, "sample_from_anchor": False} | fields
    config = _config(
        "dflash", "DFlashSpeculator", target, vocab_size - 1 if draft is None else draft,
        **{"sliding_window_non_causal": False, **fields},
    )  # fmt: skip
    tensors = _tensors(config, lambda n: SIZE) | _random({"hidden_norm.weight": (SIZE,)}, 4)
    return write(folder, config, tensors)


def peagle(target: Any, folder: Path, draft: int | None = None, **fields: Any) -> Path:
    """A P-EAGLE head of two layers with embeddings of its own, for all tokens but the first."""
    vocab_size = target.config.vocab_size
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = _config(
        "peagle", "PEagleSpeculator", target, vocab_size - 1 if draft is None else draft,
        **{**dict.fromkeys(flags, False), "embed_requires_grad": True, **fields},
    )  # fmt: skip
    more: dict[str, tuple[int, ...]] = {
        "mask_hidden": (1, 1, 2 * SIZE), "layers.0.hidden_norm.weight": (SIZE,),
        "embed_tokens.weight": (vocab_size, SIZE),
    }  # fmt: skip
    more |= {"input_norm.weight": (2 * SIZE,)} if config["norm_before_fc"] else {}
    more |= {f"fc_norm.{k}.weight": (SIZE,) for k in range(2)} if config["fc_norm"] else {}
    tensors = _tensors(config, lambda n: SIZE if n else 2 * SIZE) | _random(more, 4)
    return write(folder, config, tensors)


class Reference:
    """What a head of a folder drafts after a text, place by place, in float64."""

    def __init__(self, target: Any, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.inner = self.config["transformer_layer_config"]
        self.tensors = {
            name: x.double() if x.is_floating_point() else x
            for name, x in load_file(folder / "model.safetensors").items()
        }
        self.target = target
        rows = target.get_input_embeddings().weight.detach()
        self.embeddings = self.tensors.get("embed_tokens.weight", rows).double()
        output = self.tensors.get("lm_head.weight", target.get_output_embeddings().weight.detach())
        self.output = output.double()
        draft = self.config["draft_vocab_size"]
        self.tokens = torch.arange(draft) + self.tensors.get("d2t", torch.zeros(draft).long())

    @torch.no_grad()
    def features(self, text: Sequence[int]) -> torch.Tensor:
        """[n, layers * H] of the target."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        numbers = self.config[LAYERS[self.config["speculators_model_type"]]]
        return torch.cat([states[n][0] for n in numbers], dim=-1).double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.inner["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def project(self, x: torch.Tensor, n: int, one: str, places: Sequence[int]) -> torch.Tensor:
        """Queries, keys or values [n, heads, D] of layer ``n``, turned by their places."""
        name = f"layers.{n}.self_attn.{one}"
        heads = (x @ self.tensors[f"{name}_proj.weight"].T).unflatten(-1, (-1, WIDTH))
        if one == "v":
            return heads
        if f"{name}_norm.weight" in self.tensors:
            heads = self.norm(heads, f"{name}_norm")
        theta = self.inner["rope_parameters"]["rope_theta"]
        speeds = theta ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
        angles = (torch.tensor(places).double()[:, None] * speeds)[:, None]
        left, right = heads.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Callable[[int, int], bool]
    ) -> torch.Tensor:
        """[n, heads * D] of queries that see the keys for which ``seen(query, key)``."""
        rows = []
        for i in range(len(q)):
            keys = [j for j in range(len(k)) if seen(i, j)]
            heads = []
            for head in range(HEADS):
                shared = head // (HEADS // SHARED)
                scores = k[keys, shared] @ q[i, head] / WIDTH**0.5
                heads.append(scores.softmax(0) @ v[keys, shared])
            rows.append(torch.cat(heads))
        return torch.stack(rows)

    def finish(self, n: int, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        def weight(name: str) -> torch.Tensor:
            return self.tensors[f"layers.{n}.{name}.weight"].T

        hidden = residual + attended @ weight("self_attn.o_proj")
        x = self.norm(hidden, f"layers.{n}.post_attention_layernorm")
        gated = silu(x @ weight("mlp.gate_proj")) * (x @ weight("mlp.up_proj"))
        return hidden + gated @ weight("mlp.down_proj")

    def window(self, n: int) -> int:
        """How far layer ``n`` sees, or more than any text has."""
        sliding = self.inner["layer_types"][n] == KINDS["sliding"]
        return self.inner["sliding_window"] if sliding else 10**6

    def dflash(self, text: Sequence[int]) -> torch.Tensor:
        """Logits [drafts, draft vocabulary] after a text, whose last token the target has not."""
        before, block = len(text) - 1, self.config["block_size"]
        injected = self.features(text[:-1]) @ self.tensors["fc.weight"].T
        injected = self.norm(injected, "hidden_norm")
        ids = [text[-1], *[self.config["mask_token_id"]] * (block - 1)]
        hidden, places = self.embeddings[ids], list(range(before, before + block))
        for n in range(self.inner["num_hidden_layers"]):
            window, normed = self.window(n), self.norm(hidden, f"layers.{n}.input_layernorm")
            causal = window < 10**6 and not self.config["sliding_window_non_causal"]
            k, v = (
                torch.cat(
                    [
                        self.project(injected, n, one, range(before)),
                        self.project(normed, n, one, places),
                    ]
                )
                for one in "kv"
            )

            def seen(i: int, j: int, window: int = window, causal: bool = causal) -> bool:
                if j < before:
                    return j >= before - window
                return not causal or j - before <= i

            attended = self.attend(self.project(normed, n, "q", places), k, v, seen)
            hidden = self.finish(n, hidden, attended)
        logits = self.norm(hidden, "norm") @ self.output.T
        return logits if self.config["sample_from_anchor"] else logits[1:]

    def peagle(self, text: Sequence[int]) -> torch.Tensor:
        """Logits [drafts, draft vocabulary] after a text, whose last token the target has not."""
        pairs = len(text) - 1
        features = self.features(text[:-1])
        masks = self.tensors["mask_hidden"][0].expand(DRAFTS - 1, -1)
        features = torch.cat([features, masks])
        if self.config["norm_before_fc"]:
            features = self.norm(features, "input_norm")
        if self.config["fc_norm"]:
            halves = features.chunk(2, dim=-1)
            features = torch.cat([self.norm(x, f"fc_norm.{k}") for k, x in enumerate(halves)], -1)
        hidden = features @ self.tensors["fc.weight"].T
        ids = [*text[1:], *[self.config["mask_token_id"]] * (DRAFTS - 1)]
        places = list(range(len(ids)))
        for n in range(self.inner["num_hidden_layers"]):
            if n:
                joined = self.norm(hidden, f"layers.{n}.input_layernorm")
            else:
                normed = self.norm(hidden, "layers.0.hidden_norm")
                rows = self.norm(self.embeddings[ids], "layers.0.input_layernorm")
                joined = torch.cat([rows, normed], dim=-1)
                hidden = normed if self.config["norm_before_residual"] else hidden
            q, k, v = (self.project(joined, n, one, places) for one in "qkv")

            def seen(i: int, j: int, window: int = self.window(n)) -> bool:
                own = i >= pairs - 1 and j >= pairs - 1  # the last pair and the masks after it
                return j <= i and (own or j > i - window)

            hidden = self.finish(n, hidden, self.attend(q, k, v, seen))
        return self.norm(hidden[pairs - 1 :], "norm") @ self.output.T

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Those of its kind."""
        out: torch.Tensor = getattr(self, self.config["speculators_model_type"])(text)
        return out
