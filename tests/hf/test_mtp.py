"""Native multi-token prediction: layers that `from_pretrained` drops are read, and draft.

What is expected is not the library's: tensors have the names of the publishers, and layers run over
whole texts, without a cache, as Transformers defines them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from specdec_hf import EagleTree
from specdec_papers.mtp import files
from specdec_papers.mtp.drafter import MtpDrafter, MtpTreeDrafter
from specdec_papers.mtp.files import load_mtp
from support import hf_models
from support.hf_models import PAD, VOCAB, differences, rounds_of
from torch import nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD,
    "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = 4
APPENDED = {"enorm": "enorm", "hnorm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


class Family(NamedTuple):
    """A model type: its class, its own fields, and how it names what a layer is made of."""

    model: Any
    fields: dict[str, Any]
    prefix: str = "model.layers.{}."
    inside: str = ""
    names: dict[str, str] = APPENDED

    def prefix_of(self, layer: int) -> str:
        """Of the names of layer ``layer``, counted from 0."""
        return self.prefix.format(COMMON["num_hidden_layers"] + layer)


LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
}  # fmt: skip
FAMILIES = {
    "deepseek_v3": Family(
        transformers.DeepseekV3ForCausalLM,
        {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "glm4_moe": Family(
        transformers.Glm4MoeForCausalLM,
        {
            "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": EXPERTS,
            "first_k_dense_replace": 1, "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": Family(transformers.Glm4MoeLiteForCausalLM, LATENT),
    "qwen3_next": Family(
        transformers.Qwen3NextForCausalLM,
        {
            "num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS,
            "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "mtp.", "layers.0.",
        {
            "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "join": "fc",
            "norm": "norm",
        },
    ),
}  # fmt: skip


@dataclass
class Layer:
    """An MTP layer: a decoder layer, and its other tensors under the names of the checkpoint."""

    decoder: nn.Module
    around: dict[str, torch.Tensor]
    zero_centred: bool  # norms multiply by 1 + weight
    epsilon: float

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.around[name].float() + self.zero_centred
        return x * (x.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt() * weight

    def states(self, target: Any, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Normalised outputs [1, n, H] of n pairs from the first place on."""
        rows = target.get_input_embeddings().weight[torch.tensor([tokens])]
        both = [self.norm("enorm", rows), self.norm("hnorm", hidden)]
        joined = torch.cat(both, dim=-1) @ self.around["join"].T
        positions = torch.arange(len(tokens))[None]
        rotary = target.get_decoder().rotary_emb(joined, positions)
        made = self.decoder(joined, position_embeddings=rotary, position_ids=positions)
        return self.norm("norm", made)


def target_of(name: str, **fields: Any) -> Any:
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = family.model.config_class(**{**COMMON, **family.fields, **fields})
        return family.model(config).eval()


def layers_of(target: Any, count: int = 1) -> list[Layer]:
    """Random layers for a target, which choose experts by a bias, too."""
    config, zero_centred = copy.deepcopy(target.config), target.config.model_type == "qwen3_next"
    if zero_centred:
        config.layer_types = ["full_attention"] * 2
    config._attn_implementation = "sdpa"
    number, size, made = config.num_hidden_layers, config.hidden_size, []
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for _ in range(count):
        decoder = type(target.get_decoder().layers[-1])(config, number - 1).eval()
        with torch.no_grad():
            for weight in decoder.parameters():
                scale = 0.2 if weight.ndim == 1 else 0.6 * weight.shape[-1] ** -0.5
                weight.copy_(scale * random(*weight.shape))
                if weight.ndim == 1 and not zero_centred:
                    weight.add_(1)
            for bias in decoder.buffers():
                bias.copy_(random(*bias.shape))
        norms = {one: 0.4 * random(size) + (not zero_centred) for one in ("enorm", "hnorm", "norm")}
        join = random(size, 2 * size) * (2 * size) ** -0.5
        made.append(Layer(decoder, {**norms, "join": join}, zero_centred, config.rms_norm_eps))
    return made


def published(target: Any, layers: Sequence[Layer]) -> dict[str, torch.Tensor]:
    """The tensors of layers by the names of the publisher, one for each expert."""
    family, tensors = FAMILIES[target.config.model_type], {}
    for number, layer in enumerate(layers):
        prefix = family.prefix_of(number)
        for name, tensor in layer.around.items():
            tensors[f"{prefix}{family.names[name]}.weight"] = tensor
        for name, tensor in layer.decoder.state_dict().items():
            stem, _, kind = f"{prefix}{family.inside}{name}".rpartition(".")
            if kind == "gate_up_proj":
                for expert, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    tensors[f"{stem}.{expert}.gate_proj.weight"] = gate
                    tensors[f"{stem}.{expert}.up_proj.weight"] = up
            elif kind == "down_proj":
                for expert, one in enumerate(tensor):
                    tensors[f"{stem}.{expert}.down_proj.weight"] = one
            else:
                tensors[f"{stem}.{kind}"] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def write(target: Any, tensors: dict[str, torch.Tensor], folder: Path, shards: int = 2) -> Path:
    """Write a model's checkpoint and tensors beside its own, in shards or in one file."""
    target.save_pretrained(folder)
    single = folder / "model.safetensors"
    if not shards:
        save_file({**load_file(single), **tensors}, single, {"format": "pt"})
        return folder
    files = {"model-0.safetensors": load_file(single)}
    single.unlink()
    for shard in range(shards):
        names = sorted(tensors)[shard::shards]
        files[f"model-{shard + 1}.safetensors"] = {name: tensors[name] for name in names}
    for file, held in files.items():
        save_file(held, folder / file, {"format": "pt"})
    where = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def checkpoint(
    name: str, folder: Path, count: int = 1, shards: int = 2
) -> tuple[Any, list[Layer], Path]:
    target = target_of(name, **({} if count == 1 else {"num_nextn_predict_layers": count}))
    layers = layers_of(target, count)
    write(target, published(target, layers), folder, shards)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), layers, folder


@torch.no_grad()
def expected_logits(
    target: Any, layers: Sequence[Layer], tokens: list[int], drafts: list[int], unseen: int = 0
) -> torch.Tensor:
    """Logits [V] of the draft that follows a text and some drafts.

    Args:
        target: the target.
        layers: its layers of multi-token prediction.
        tokens: committed ones, the pending one included.
        drafts: tokens that were drafted after it.
        unseen: tokens at the beginning of the text whose hidden states no layer reads.
    """
    ids = torch.tensor([tokens[:-1]])
    hidden = target(ids, output_hidden_states=True).hidden_states[-1][:, unseen:]
    whole, number, pairs = [*tokens[unseen:], *drafts], len(layers), hidden.shape[1]
    for k in range(min(len(drafts), number - 1) + 1):
        read, hidden = hidden, layers[k].states(target, whole[k + 1 : k + 1 + pairs], hidden)
    for _ in range(number, len(drafts) + 1):
        read = torch.cat([read, hidden[:, -1:]], dim=1)
        hidden = layers[-1].states(target, whole[number : number + read.shape[1]], read)
    return target.get_output_embeddings()(hidden[0, -1])


pytestmark = pytest.mark.papers

SAMPLED = {"do_sample": True, "rule": "token", "gamma": 5, "max_new_tokens": 10}
TWO = pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])


def chains(target, lengths, **settings):
    settings = {"seed": list(range(len(lengths))), **SAMPLED, **settings}
    _, rounds = rounds_of(target, MtpDrafter(), lengths, **settings)
    return rounds[:: 1 + len(rounds) // 4]


def furthest(rounds, logits_of):
    """The largest difference, and how many drafts are above the deepest one."""
    return tuple(map(max, zip(*differences(rounds, logits_of), strict=True)))


@pytest.mark.parametrize("name", FAMILIES)
def test_chains_are_those_of_the_layer_over_the_whole_text(name, tmp_path):
    """Negative control: another reading of any part gives other logits."""
    target, layers, _ = checkpoint(name, tmp_path)
    number = target.config.num_hidden_layers
    assert not [key for key in target.state_dict() if f"layers.{number}." in key or "mtp" in key]
    lengths = (9,) if name == "qwen3_next" else (9, 2, 12)
    assert hf_models.decode_as_generate(target, lengths, drafter="mtp").stats.drafted > 0
    rounds = chains(target, lengths)
    logits_of = partial(expected_logits, target, layers)
    worst, deepest = furthest(rounds, logits_of)
    assert worst < 1e-4
    assert deepest == 4
    for part, kept in layers[0].around.items():
        layers[0].around[part] = kept.roll(kept.shape[-1] // 2, dims=-1)
        assert furthest(rounds[:2], logits_of)[0] > 1e-2, part
        layers[0].around[part] = kept


@TWO
@torch.no_grad()
def test_what_is_expected_is_what_the_module_of_transformers_computes(name, tmp_path):
    count = 3
    target, layers, _ = checkpoint(name, tmp_path, count)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-4]\."]  # of published sizes
    module = MtpModel.from_pretrained(target)
    text = hf_models.prompts((9,))["input_ids"][0].tolist()
    final = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
    ids, logits, _ = module(
        torch.tensor([text[1:]]), final, None, torch.arange(1, len(text))[None],
        MtpCache(config=target.config.get_mtp_config()),
    )  # fmt: skip
    for step in range(count):
        want = expected_logits(target, layers, text, ids[0, :step].tolist())
        torch.testing.assert_close(logits[0, step], want, atol=1e-5, rtol=1e-4)


@TWO
def test_each_of_several_layers_drafts_its_own_step(name, tmp_path):
    """The last one drafts all steps after it. One of the texts has fewer pairs than layers."""
    target, layers, _ = checkpoint(name, tmp_path, count=3)
    rounds = chains(target, (9, 2, 12))
    worst, deepest = furthest(rounds, partial(expected_logits, target, layers))
    assert worst < 1e-4
    assert deepest == 4
    # Negative control: the layers in another order.
    assert furthest(rounds[:2], partial(expected_logits, target, layers[::-1]))[0] > 1e-2


@pytest.mark.parametrize(
    ("lengths", "cached", "count"), [((14,), 10, 1), ((9,), 8, 3), ((12, 4), 10, 3)]
)
def test_after_a_cache_of_the_caller_pairs_are_those_of_the_later_tokens(
    lengths, cached, count, tmp_path
):
    """Layers read the states that the call has seen, each with the token that follows it."""
    target, layers, _ = checkpoint("glm4_moe", tmp_path, count)
    prompts = hf_models.prompts(lengths)
    given = {name: x[:, :cached] for name, x in prompts.items()}
    positions = (given["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    past = target(**given, position_ids=positions, use_cache=True).past_key_values
    rounds = chains(target, lengths, past_key_values=past)
    texts = [x[-n:].tolist() for x, n in zip(prompts["input_ids"], lengths, strict=True)]

    def logits_of(text, path):
        (size,) = (len(one) for one in texts if one == text[: len(one)])
        unseen = max(cached - max(lengths) + size, 0)
        return expected_logits(target, layers, text, path, unseen)

    worst, deepest = furthest(rounds, logits_of)
    assert worst < 1e-4
    assert deepest == 4


@TWO
def test_nodes_of_a_tree_see_their_ancestors_alone(name, tmp_path):
    target, layers, _ = checkpoint(name, tmp_path)
    drafter = MtpTreeDrafter(layout=EagleTree(width=2, depth=3, size=6))
    _, rounds = rounds_of(target, drafter, (9, 4), max_new_tokens=6)
    worst, deepest = furthest(rounds, partial(expected_logits, target, layers))
    assert worst < 1e-4
    assert deepest == 2


def test_a_layer_with_embeddings_and_an_output_matrix_of_its_own_keeps_them(tmp_path):
    target = target_of("deepseek_v3")
    layers, prefix = layers_of(target), FAMILIES["deepseek_v3"].prefix_of(0)
    own = {
        f"{prefix}embed_tokens.weight": -target.get_input_embeddings().weight,
        f"{prefix}shared_head.head.weight": -target.get_output_embeddings().weight,
    }
    write(target, {**published(target, layers), **own}, tmp_path)
    model = type(target).from_pretrained(tmp_path).eval()
    ((text,), draft), *_ = chains(model, (9,))
    with torch.no_grad():
        final = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        model.get_input_embeddings().weight.mul_(-1)
        want = -model.get_output_embeddings()(layers[0].states(model, text[1:], final)[0, -1])
    torch.testing.assert_close(draft.drawn.logits[0, 0], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_layers_are_the_same_in_every_form_of_files(name, tmp_path):
    """In one file and in shards, and with experts in one tensor, as Transformers writes them."""
    target, family = target_of(name), FAMILIES[name]
    (layer,) = layers_of(target)
    tensors = published(target, [layer])
    joined = {key: x for key, x in tensors.items() if ".experts." not in key}
    for key, x in layer.decoder.state_dict().items():
        if ".experts." in key:
            joined[f"{family.prefix_of(0)}{family.inside}{key}"] = x
    forms, state = [(tensors, 0), (tensors, 3), (joined, 2)], torch.get_rng_state()
    one, *others = (
        dict(load_mtp(write(target, given, tmp_path / str(n), shards)).state_dict())
        for n, (given, shards) in enumerate(forms)
    )
    assert torch.equal(torch.get_rng_state(), state)
    for other in others:
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_bias_that_chooses_experts_stays_in_float32(tmp_path):
    _, layers, folder = checkpoint("deepseek_v3", tmp_path)
    head = load_mtp(folder, torch.bfloat16)
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    (bias,) = [x for name, x in head.state_dict().items() if "bias" in name]
    assert torch.equal(bias, layers[0].decoder.mlp.gate.e_score_correction_bias)


def test_a_target_made_in_memory_drafts_with_a_folder_or_a_head(tmp_path):
    target, _, folder = checkpoint("deepseek_v3", tmp_path)
    made = target_of("deepseek_v3")
    made.load_state_dict(target.state_dict())
    given = [(target, "mtp"), (made, f"mtp:{folder}"), (made, MtpDrafter(load_mtp(folder)))]
    outs = [hf_models.decode(model, (9,), drafter=drafter) for model, drafter in given]
    assert len({str(hf_models.outcome(out)) for out in outs}) == 1
    for name, message in (("", "name the folder as mtp:FOLDER"), ("/gone", "gone' is neither a f")):
        made.config.name_or_path = name
        with pytest.raises(ValueError, match=message):
            hf_models.decode(made, drafter="mtp")


P = "model.layers.2."
FAULTS = [
    (lambda x: {}, "holds no layers of multi-token prediction: no tensor's name .* " + P),
    (lambda x: {n: y for n, y in x.items() if ".2.up_proj" not in n}, "lacks .*2.up_proj.weight"),
    (lambda x: {**x, f"{P}indexer.weight": torch.zeros(3)}, f"holds {P}indexer.weight, which no"),
    (
        lambda x: {**x, f"{P}enorm.weight": torch.ones(32).to(torch.float8_e4m3fn)},
        f"{P}enorm.weight of .* must be in F32, BF16, F16, got F8_E4M3: .* no quantised",
    ),
    (
        lambda x: {**x, **{name.replace(".2.", ".3.", 1): y.clone() for name, y in x.items()}},
        "as many layers of multi-token prediction as num_nextn_predict_layers .*, 1, got 2",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), FAULTS, ids=["none", "missing", "unknown", "quantised", "one of two"]
)
def test_other_checkpoints_are_refused_by_name(change, message, tmp_path):
    target = target_of("deepseek_v3")
    write(target, change(published(target, layers_of(target))), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_mtp(tmp_path)


def test_other_targets_and_folders_are_refused_by_name(tmp_path):
    target, _, folder = checkpoint("glm4_moe", tmp_path / "given", count=2)

    def refused(drafter, message, model=target):
        with pytest.raises(ValueError, match=message):
            hf_models.decode(model, drafter=drafter)

    refused("mtp_tree", "needs one layer of multi-token prediction, got 2: drafter mtp drafts")
    refused(f"mtp:{folder}", "states of 32, got 64", hf_models.build("llama", hidden_size=64))
    refused(f"mtp:{tmp_path}", "cannot read the config.json of")
    refused(f"mtp:{tmp_path / 'gone'}", "folder .*gone of drafter mtp does not exist")
    refused(f"mtp:{__file__}", "drafter mtp must name a folder, .*test_mtp.py is a file")
    hf_models.tiny("llama").save_pretrained(tmp_path / "llama")
    refused(f"mtp:{tmp_path / 'llama'}", "knows the model types deepseek_v3, .*, got 'llama'")
    index = folder / files.INDEX
    given = json.loads(index.read_text())["weight_map"]
    for name, message in (("../x.safetensors", "beside it"), ("x", "lacks x, which its model")):
        where = {key: name if ".enorm" in key else file for key, file in given.items()}
        index.write_text(json.dumps({"weight_map": where}))
        refused("mtp", message)
    index.write_text("{}")
    refused("mtp", "cannot read the weight_map of")
    index.unlink()
    refused("mtp", "holds no safetensors: it has neither model.safetensors nor ")
    shutil.rmtree(folder)
    refused("mtp", "neither a folder nor kept by the hub's cache")
    with pytest.raises(TypeError, match=r"head must be MtpHead or the folder .* got int"):
        MtpDrafter(3)
