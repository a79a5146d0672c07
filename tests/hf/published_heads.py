"""Heads of random weights in the layouts of their publishers, and what heads draft, in float64.

Names and fields are those of published checkpoints and of version 0.9 of the library speculators.
Nothing here uses this library's own heads: `Reference` follows the papers, text by text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

DRAFTS = 4  # of a pass of P-EAGLE and DFlash
SIZE, INNER, HEADS, SHARED, WIDTH = 32, 40, 8, 2, 6
TOKENS = tuple(range(3, 40))  # of the target, which an EAGLE-3 head can draft
FREQUENCIES = "layers.0.self_attn.rotary_emb.inv_freq"  # readers make them from the config
WEIGHTS, MEDUSA_WEIGHTS = "model.safetensors", "medusa_lm_head.safetensors"
SLIDING = {"types": ("sliding_attention", "full_attention"), "window": 3}
AUX, EAGLE_AUX = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]


def _layer_fields(target: Any, **more: Any) -> dict[str, Any]:
    """The fields of the decoder layer in config.json, which differ from the target's."""
    return {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": SIZE,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": SHARED,
        "head_dim": WIDTH, "rms_norm_eps": 1e-5, "num_hidden_layers": 1, "rope_theta": 700.0,
        "rope_scaling": None, "max_position_embeddings": 512, "attention_bias": False,
        "vocab_size": target.config.vocab_size, "tie_word_embeddings": False,
    } | more  # fmt: skip


def _random(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def _layer(name: str, inner: dict[str, Any], *, joined: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder layer that reads one state, or an embedding joined with one."""
    width = 2 * SIZE if joined else SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * WIDTH, width), "self_attn.k_proj": (SHARED * WIDTH, width),
        "self_attn.v_proj": (SHARED * WIDTH, width), "self_attn.o_proj": (SIZE, HEADS * WIDTH),
        "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER), "input_layernorm": (SIZE,),
        "post_attention_layernorm": (SIZE,),
    }  # fmt: skip
    if joined:
        shapes["hidden_norm"] = (SIZE,)
    if inner["model_type"] == "qwen3":
        shapes |= {f"self_attn.{x}_norm": (WIDTH,) for x in "qk"}
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def _vocabulary(target: Any, tokens: Sequence[int]) -> Tensors:
    known = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    known[list(tokens)] = True
    return {"d2t": torch.tensor(tokens) - torch.arange(len(tokens)), "t2d": known}


def _write(folder: Path, config: dict[str, Any], tensors: Tensors, name: str = WEIGHTS) -> Path:
    """A folder as it is downloaded."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


def _eagle3_tensors(target: Any, layer: str) -> Tensors:
    shapes = {
        "fc.weight": (SIZE, 3 * target.config.hidden_size), "norm.weight": (SIZE,),
        "lm_head.weight": (len(TOKENS), SIZE),
    }  # fmt: skip
    shapes |= _layer(layer, _layer_fields(target), joined=True)
    return _random(shapes) | _vocabulary(target, TOKENS)


def authors(target: Any, folder: Path, **fields: Any) -> Path:
    """An EAGLE-3 head of its authors: the layers that it reads go without saying."""
    config = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(TOKENS)}
    config |= _layer_fields(target) | fields
    return _write(folder, config, _eagle3_tensors(target, "midlayer"))


def _speculators_config(kind: str, inner: dict[str, Any], drafts: int) -> dict[str, Any]:
    """A config.json of the library speculators, with the decoder layers inside."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": drafts}
    return {
        "speculators_model_type": kind, "speculators_version": "0.9.0",
        "tie_word_embeddings": False, "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [greedy],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
    }  # fmt: skip


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def speculators(target: Any, folder: Path, **fields: Any) -> Path:
    """As vLLM's library writes it: with embeddings, and n is the state before layer n."""
    config = _speculators_config("eagle3", _layer_fields(target), 3)
    config |= dict.fromkeys(FLAGS, False) | {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": len(TOKENS),
        "norm_before_residual": True, "target_hidden_size": None, "embed_requires_grad": False,
        EAGLE_AUX: [1, 3, 4],
    } | fields  # fmt: skip
    rows = target.get_input_embeddings().weight.detach().flip(0).contiguous()
    tensors = _eagle3_tensors(target, "layers.0")
    return _write(folder, config, tensors | {"embed_tokens.weight": rows})


def eagle(target: Any, folder: Path, **fields: Any) -> Path:
    """A head of the first EAGLE, with embeddings and the frequencies of angles."""
    config = _layer_fields(target) | {"architectures": ["LlamaForCausalLM"]} | fields
    shapes = {"fc.weight": (SIZE, 2 * SIZE), **_layer("layers.0", config, joined=False)}
    del shapes["layers.0.input_layernorm.weight"]
    if config.get("bias", True):
        shapes["fc.bias"] = (SIZE,)
    if config.get("qkv_bias"):
        for x in "qkv":
            name = f"layers.0.self_attn.{x}_proj"
            shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    rows = target.get_input_embeddings().weight.detach().flip(0).contiguous()
    own = {"embed_tokens.weight": rows, FREQUENCIES: torch.ones(WIDTH // 2)}
    return _write(folder, config, _random(shapes) | own)


def medusa(target: Any, folder: Path, blocks: int = 1, own: bool = True) -> Path:
    """Four Medusa heads as their authors publish them, whose config counts two."""
    size, shapes = target.config.hidden_size, {}
    for k in range(4):
        for block in range(blocks):
            shapes[f"{k}.{block}.linear.weight"] = (size, size)
            shapes[f"{k}.{block}.linear.bias"] = (size,)
        if own:
            shapes[f"{k}.{blocks}.weight"] = (target.config.vocab_size, size)
    config = {
        "base_model_name_or_path": "target", "medusa_num_heads": 2, "medusa_num_layers": blocks,
        "transformers_version": "4.31.0",
    }  # fmt: skip
    return _write(folder, config, _random(shapes), MEDUSA_WEIGHTS)


def _block(kind: str, target: Any, folder: Path, shapes: dict[str, Any], given: Any) -> Path:
    """A head that drafts a block; fields of its decoder layers go inside."""
    fields, vocab_size = dict(given), target.config.vocab_size
    types, window = fields.pop("types", ("full_attention",) * 2), fields.pop("window", None)
    draft = fields.pop("draft", vocab_size - 1)  # all tokens but the first
    inner = _layer_fields(
        target, model_type=fields.pop("model_type", "qwen3"), num_hidden_layers=len(types),
        layer_types=list(types), sliding_window=window, use_sliding_window=window is not None,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )  # fmt: skip
    for name in ("rope_theta", "rope_scaling", "tie_word_embeddings"):
        del inner[name]
    config = _speculators_config(kind, inner, DRAFTS)
    config |= {"draft_vocab_size": draft, "mask_token_id": vocab_size - 1} | fields
    shapes |= {"norm.weight": (SIZE,), "fc.weight": (SIZE, 2 * SIZE)}
    for n in range(len(types)):
        shapes |= _layer(f"layers.{n}", inner, joined=kind == "peagle" and not n)
    if draft < vocab_size:
        shapes["lm_head.weight"] = (draft, SIZE)
    tensors = _random(shapes)
    if draft < vocab_size:
        tensors |= _vocabulary(target, range(vocab_size - draft, vocab_size))
    return _write(folder, config, tensors)


def dflash(target: Any, folder: Path, **fields: Any) -> Path:
    """A DFlash head of two layers."""
    fields = {
        "architectures": ["DFlashSpeculator"], AUX: [1, 0], "block_size": DRAFTS + 1,
        "sample_from_anchor": False, "sliding_window_non_causal": False,
    } | fields  # fmt: skip
    return _block("dflash", target, folder, {"hidden_norm.weight": (SIZE,)}, fields)


def peagle(target: Any, folder: Path, **fields: Any) -> Path:
    """A P-EAGLE head of two layers with embeddings of its own."""
    fields = dict.fromkeys(FLAGS, False) | {
        "architectures": ["PEagleSpeculator"], EAGLE_AUX: [1, 0], "embed_requires_grad": True,
    } | fields  # fmt: skip
    more: dict[str, tuple[int, ...]] = {
        "mask_hidden": (1, 1, 2 * SIZE), "embed_tokens.weight": (target.config.vocab_size, SIZE),
    }  # fmt: skip
    more |= {"input_norm.weight": (2 * SIZE,)} if fields["norm_before_fc"] else {}
    more |= {f"fc_norm.{k}.weight": (SIZE,) for k in range(2)} if fields["fc_norm"] else {}
    return _block("peagle", target, folder, more, fields)


# Published layouts: who writes a head, and other fields of config.json.
LAYOUTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "eagle3": (authors, {}),
    # Layer n means the state after layer n, counted from 0.
    "eagle3, SpecForge": (authors, {"eagle_config": {EAGLE_AUX: [0, 2, 3]}}),
    "eagle3, speculators": (speculators, {}),
    "eagle": (eagle, {}),
    "eagle, no bias": (eagle, {"bias": False}),
    "eagle, biased queries": (eagle, {"qkv_bias": True}),
    "medusa": (medusa, {}),
    "medusa, two blocks": (medusa, {"blocks": 2}),
    "medusa, the target's output": (medusa, {"blocks": 2, "own": False}),
    "dflash": (dflash, {}),
    "dflash, windows": (dflash, SLIDING),
    "dflash, windows both ways": (dflash, SLIDING | {"sliding_window_non_causal": True}),
    "dflash, from the anchor": (
        dflash, {"sample_from_anchor": True, "block_size": DRAFTS, "draft": 67},
    ),
    "peagle": (peagle, {"draft": 67}),
    "peagle, one Llama layer": (peagle, {"types": ("full_attention",), "model_type": "llama"}),
    "peagle, windows": (peagle, SLIDING | {"norm_before_residual": True}),
    "peagle, features normalised": (peagle, {"norm_before_fc": True}),
    "peagle, each layer's normalised": (peagle, {"fc_norm": True, "model_type": "llama"}),
}  # fmt: skip


def publish(name: str, target: Any, folder: Path) -> Path:
    """A folder of a layout of the table."""
    write, fields = LAYOUTS[name]
    return write(target, folder, **fields)


class Reference:
    """What a head of a folder drafts after a text and after earlier drafts."""

    def __init__(self, kind: str, target: Any, folder: Path) -> None:
        self.kind, self.target = kind, target
        self.config = json.loads((folder / "config.json").read_text())
        self.inner = self.config.get("transformer_layer_config", self.config)
        (file,) = folder.glob("*.safetensors")
        self.tensors = {
            name.replace("midlayer", "layers.0"): x.double() if x.is_floating_point() else x
            for name, x in load_file(file).items()
        }
        rows = target.get_input_embeddings().weight.detach()
        self.embeddings = self.tensors.get("embed_tokens.weight", rows).double()
        d2t = self.tensors.get("d2t", torch.zeros(len(rows), dtype=torch.int64))
        self.tokens = torch.arange(len(d2t)) + d2t
        output = target.get_output_embeddings().weight.detach()[self.tokens]
        self.output = self.tensors.get("lm_head.weight", output).double()
        self.block = functools.cache(getattr(self, kind))

    @torch.no_grad()
    def logits(self, text: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """[V] of the draft after a text, whose last token the target has not read, and drafts."""
        if self.kind in ("eagle", "eagle3", "exit_head"):
            own = self.block(tuple(text), tuple(drafts))
        else:
            own = self.block(tuple(text))[len(drafts)]
        row = torch.full((self.target.config.vocab_size,), -torch.inf, dtype=torch.float64)
        row[self.tokens] = own
        return row

    def features(self, text: Sequence[int]) -> torch.Tensor:
        """[n, layers * H] of the target at the tokens of a text but its last."""
        ids = torch.tensor([text[:-1]])
        states = self.target(ids, output_hidden_states=True).hidden_states
        numbers = [-1]
        if self.kind in ("eagle3", "dflash", "peagle"):
            after = self.config.get("eagle_config", {}).get(EAGLE_AUX)
            before = self.config.get(AUX if self.kind == "dflash" else EAGLE_AUX, (2, 4, 5))
            numbers = before if after is None else [n + 1 for n in after]
        return torch.cat([states[n][0] for n in numbers], dim=-1).double()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        made = x @ self.tensors[f"{name}.weight"].T
        return made + self.tensors.get(f"{name}.bias", 0)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.inner["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def project(self, x: torch.Tensor, n: int, one: str, places: Sequence[int]) -> torch.Tensor:
        """Queries, keys or values [n, heads, D] of layer ``n``, turned by their places."""
        name = f"layers.{n}.self_attn.{one}"
        heads = self.linear(x, f"{name}_proj").unflatten(-1, (-1, self.inner["head_dim"]))
        if one == "v":
            return heads
        if f"{name}_norm.weight" in self.tensors:
            heads = self.norm(heads, f"{name}_norm")
        width = heads.shape[-1]
        theta = self.inner.get("rope_parameters", self.inner)["rope_theta"]
        speeds = theta ** (-torch.arange(0, width, 2).double() / width)
        angles = (torch.tensor(places).double()[:, None] * speeds)[:, None]
        left, right = heads.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)

    def layer(
        self, n: int, residual: torch.Tensor, qkv: Any, seen: Callable[[int, int], bool]
    ) -> torch.Tensor:
        """The output of a layer whose queries see the keys for which ``seen(query, key)``."""
        q, k, v = qkv
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        hidden = torch.tensor([[not seen(i, j) for j in range(len(k))] for i in range(len(q))])
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", shares, v).flatten(1)
        state = residual + self.linear(attended, f"layers.{n}.self_attn.o_proj")
        x, mlp = self.norm(state, f"layers.{n}.post_attention_layernorm"), f"layers.{n}.mlp"
        gated = silu(self.linear(x, f"{mlp}.gate_proj")) * self.linear(x, f"{mlp}.up_proj")
        return state + self.linear(gated, f"{mlp}.down_proj")

    def joined(self, ids: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the first layer of EAGLE-3 and P-EAGLE projects, and its residual."""
        normed = self.norm(hidden, "layers.0.hidden_norm")
        rows = self.norm(self.embeddings[ids], "layers.0.input_layernorm")
        residual = normed if self.config.get("norm_before_residual") else hidden
        return torch.cat([rows, normed], dim=-1), residual

    def eagle3(self, text: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Each draft reads the state that the head gave before it."""
        ids, hidden, own = [*text[1:], *drafts], self.features(text), self.kind == "eagle"
        hidden = hidden if own else self.linear(hidden, "fc")
        for size in range(len(text) - 1, len(ids) + 1):
            if own:
                both = torch.cat([self.embeddings[ids[:size]], hidden], dim=-1)
                joined = residual = self.linear(both, "fc")
            else:
                joined, residual = self.joined(ids[:size], hidden)
            qkv = [self.project(joined, 0, one, range(size)) for one in "qkv"]
            state = self.layer(0, residual, qkv, lambda i, j: j <= i)[-1:]
            hidden = torch.cat([hidden, state])
        return (state if own else self.norm(state, "norm"))[0] @ self.output.T

    eagle = eagle3

    def medusa(self, text: Sequence[int]) -> torch.Tensor:
        """[K, V] from the state before the pending token."""
        rows, blocks = [], self.config["medusa_num_layers"]
        while f"{len(rows)}.0.linear.weight" in self.tensors:
            k = len(rows)
            x = self.features(text)[-1]
            for block in range(blocks):
                x = x + silu(self.linear(x, f"{k}.{block}.linear"))
            rows.append(self.tensors.get(f"{k}.{blocks}.weight", self.output) @ x)
        return torch.stack(rows)

    def blockwise(self, text: Sequence[int]) -> torch.Tensor:
        """[K, draft vocabulary] from the same state."""
        x = self.features(text)[-1]
        added = self.linear(self.linear(x, "hidden").relu(), "output").unflatten(-1, (-1, len(x)))
        return (x + added) @ self.output.T

    def exit_head(self, text: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """[V] from the state after the exit's layer, through the target's last norm."""
        states = self.target(torch.tensor([[*text, *drafts]]), output_hidden_states=True)
        x = states.hidden_states[self.config["layer"]][0, -1].double()
        scale = (x.pow(2).mean() + self.target.config.rms_norm_eps).rsqrt()
        x = self.tensors["projection.weight"] @ (x * scale * self.tensors["norm.weight"])
        return self.target.lm_head(self.target.model.norm(x.float())).double()

    def pass_head(self, text: Sequence[int]) -> torch.Tensor:
        """[1 + L, V] of the target at the last token and at the embeddings, without a cache."""
        given = self.target.get_input_embeddings()(torch.tensor([text]))
        whole = torch.cat([given, self.tensors["embeddings"][None].float()], dim=1)
        logits = self.target(inputs_embeds=whole, use_cache=False).logits
        return logits[0, len(text) - 1 :].double()

    def window(self, n: int) -> int:
        """How far layer ``n`` sees, or more than any text has."""
        sliding = self.inner["layer_types"][n] == "sliding_attention"
        return self.inner["sliding_window"] if sliding else 10**6

    def dflash(self, text: Sequence[int]) -> torch.Tensor:
        """[drafts, draft vocabulary] of a block that sees the text and itself."""
        before, block = len(text) - 1, self.config["block_size"]
        injected = self.norm(self.linear(self.features(text), "fc"), "hidden_norm")
        ids = [text[-1], *[self.config["mask_token_id"]] * (block - 1)]
        hidden, places = self.embeddings[ids], range(before, before + block)
        for n in range(self.inner["num_hidden_layers"]):
            window, normed = self.window(n), self.norm(hidden, f"layers.{n}.input_layernorm")
            causal = window < 10**6 and not self.config["sliding_window_non_causal"]
            keys_and_values = [
                torch.cat([
                    self.project(injected, n, one, range(before)),
                    self.project(normed, n, one, places),
                ])
                for one in "kv"
            ]  # fmt: skip

            def seen(i: int, j: int, window: int = window, causal: bool = causal) -> bool:
                if j < before:
                    return j >= before - window
                return not causal or j - before <= i

            queries = self.project(normed, n, "q", places)
            hidden = self.layer(n, hidden, [queries, *keys_and_values], seen)
        logits = self.norm(hidden, "norm") @ self.output.T
        return logits if self.config["sample_from_anchor"] else logits[1:]

    def peagle(self, text: Sequence[int]) -> torch.Tensor:
        """[drafts, draft vocabulary] of the last pair and of the masks after it."""
        pairs = len(text) - 1
        features = torch.cat(
            [self.features(text), self.tensors["mask_hidden"][0].expand(DRAFTS - 1, -1)]
        )
        if self.config["norm_before_fc"]:
            features = self.norm(features, "input_norm")
        if self.config["fc_norm"]:
            halves = features.chunk(2, dim=-1)
            features = torch.cat([self.norm(x, f"fc_norm.{k}") for k, x in enumerate(halves)], -1)
        hidden = self.linear(features, "fc")
        ids = [*text[1:], *[self.config["mask_token_id"]] * (DRAFTS - 1)]
        for n in range(self.inner["num_hidden_layers"]):
            if n:
                joined = self.norm(hidden, f"layers.{n}.input_layernorm")
            else:
                joined, hidden = self.joined(ids, hidden)
            qkv = [self.project(joined, n, one, range(len(ids))) for one in "qkv"]

            def seen(i: int, j: int, window: int = self.window(n)) -> bool:
                own = i >= pairs - 1 and j >= pairs - 1  # the last pair and the masks after it
                return j <= i and (own or j > i - window)

            hidden = self.layer(n, hidden, qkv, seen)
        return self.norm(hidden[pairs - 1 :], "norm") @ self.output.T
