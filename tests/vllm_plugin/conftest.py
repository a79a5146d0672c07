"""The plug-in in this process, and what it says to the users of vLLM."""

import json
import logging

import pytest
import torch
from specdec_vllm import Settings, verification, vllm_interface
from specdec_vllm.plugin import install
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels import verify_chain


@pytest.fixture
def logged():
    """The messages of its logger."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm.plugins.specdec_vllm")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


class Handed(TorchDispatchMode):
    """What `verify_chain` is handed, and how many rows operators have written for it."""

    written = ()

    def __call__(self, target, draft_token_ids, draft, **given):
        self.dtypes, self.given = (target.dtype, getattr(draft, "dtype", None)), given
        self.rows = sum(t.numel() for t in self.written if t.shape[-1:] == target.shape[-1:])
        self.rows //= target.shape[-1]
        return verify_chain(target, draft_token_ids, draft, **given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.written += (made,)
        return made


@pytest.fixture
def handed(monkeypatch):
    """Operators count in its context."""
    monkeypatch.setattr(verification, "verify_chain", mode := Handed())
    return mode


@pytest.fixture(scope="session")
def kernels():
    """vLLM's own for the platform."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture
def plugin():
    """Installs the plug-in with the settings it is called with, until the test ends."""
    yield lambda **given: install(Settings(**given))
    vllm_interface.restore()


def save_head(folder, vocab_size):
    from safetensors.torch import save_file  # noqa: PLC0415

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "vocab_size": vocab_size, "draft_vocab_size": vocab_size,
        "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": None,
        "eos_token_id": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }  # fmt: skip
    shapes = {"fc": (64, 128), "norm": (64,), "lm_head": (vocab_size, 64)}
    shapes |= {f"midlayer.self_attn.{name}_proj": (64, 128) for name in "qkv"}
    shapes |= {
        "midlayer.self_attn.o_proj": (64, 64), "midlayer.mlp.gate_proj": (96, 64),
        "midlayer.mlp.up_proj": (96, 64), "midlayer.mlp.down_proj": (64, 96),
        "midlayer.input_layernorm": (64,), "midlayer.post_attention_layernorm": (64,),
        "midlayer.hidden_norm": (64,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"{name}.weight": 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="session")
def random_models(tmp_path_factory):
    """Vocabulary size -> folders of a random model, of one with nearly its weights, and of a head.

    The logits of usual random weights would be almost equal. The head is one of EAGLE-3, random.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    def saved(vocab_size):
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
            initializer_range=0.2, bos_token_id=None, eos_token_id=None, dtype="float32",
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft", "head")]
        save_head(folders[2], vocab_size)
        model.save_pretrained(folders[0])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
        model.save_pretrained(folders[1])
        return [str(folder) for folder in folders]

    return saved
