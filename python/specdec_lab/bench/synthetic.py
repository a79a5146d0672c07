"""The command ``bench-synthetic``: the loop on a model of random weights, at a set acceptance rate.

Nothing of it tells how a real model and drafter fare: it tells what the loop makes of an acceptance
rate at the sizes of a real model, where no weights are at hand.
"""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from specdec_hf.cli import options
from specdec_hf.cli.checks import Settings, check
from specdec_hf.cli.devices import find_device
from specdec_hf.cli.options import DTYPES, SHARE, at_least, check_choice, one_of, option
from specdec_hf.cli.run import progress_bar
from specdec_hf.cli.speeds import GENERATE
from specdec_hf.cli.terminal import fail
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH

from specdec_lab.bench.command import (
    BatchSizes,
    Dtypes,
    Markdown,
    Runs,
    check_outputs,
    once,
    repeated,
)
from specdec_lab.bench.results import Results

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded

    from specdec_lab.bench.runs import Config, PromptBatch

# Sizes of Llama 3: hidden states, feed-forward layer, layers, attention heads, key-value heads.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2),
    "1B": (2048, 8192, 16, 32, 8),
    "8B": (4096, 14336, 32, 32, 8),
}
VOCABULARY = {"tiny": 512}
LLAMA_3_VOCABULARY = 128256
CONTEXT = 131072
LABEL = "SYNTHETIC"


def bench_synthetic(
    shape: Annotated[
        str, option("--shape NAME", f"{', '.join(SHAPES)}, Llama's sizes.", one_of(*SHAPES))
    ] = "1B",
    acceptance: Annotated[
        list[float],
        repeated(
            "--acceptance X",
            "Probability that a draft is the target's next token.",
            ".6, .8, .9",
            SHARE,
        ),
    ] = (),  # type: ignore[assignment]
    dtype: Dtypes = (),  # type: ignore[assignment]
    device: options.Device = None,
    num_assistant_tokens: options.NumAssistantTokens = None,
    batch_size: BatchSizes = (),  # type: ignore[assignment]
    prompt_tokens: Annotated[
        int, option("--prompt-tokens N", "Tokens of the longest prompt.", at_least(1))
    ] = 256,
    max_new_tokens: options.MaxNewTokens = 128,
    compile: options.Compile = None,
    limit: Annotated[int, option("--limit N", "How many batches are answered.", at_least(1))] = 4,
    runs: Runs = 3,
    json_file: options.JsonFile = None,
    markdown: Markdown = None,
) -> None:
    """Measure the loop on a Llama of random weights, at acceptance rates set by construction.

    The figures are synthetic: they say nothing about a real model or drafter.
    """
    check_outputs([], json_file, markdown)
    rates = list(dict.fromkeys(acceptance)) or [0.6, 0.8, 0.9]
    sizes, dtypes = once(batch_size, 1), once(dtype, "float32")
    for size in sizes:
        options.must_be("in [1, 2**31)", lambda value: 1 <= value < 2**31)("--batch-size", size)
    gamma = DEFAULT_NUM_ASSISTANT_TOKENS if num_assistant_tokens is None else num_assistant_tokens
    if not 1 <= gamma <= MAX_DRAFT_LENGTH:
        fail(f"--num-assistant-tokens must be in [1, {MAX_DRAFT_LENGTH}], got {gamma}")
    chosen = []
    for one in dtypes:
        check_choice("--dtype", one, DTYPES[:-1])
        settings, _ = check(
            Settings(drafter=("none",), dtype=one, device=device, max_new_tokens=max_new_tokens)
        )
        chosen.append(settings)
    if prompt_tokens + max_new_tokens > CONTEXT:
        fail(
            f"--prompt-tokens and --max-new-tokens must sum up to at most {CONTEXT}, the model's "
            f"context, got {prompt_tokens + max_new_tokens}"
        )
    results = Results(synthetic=True, shape=shape, acceptances=rates)
    for settings in chosen:
        with progress_bar() as say:
            say(f"{LABEL}: making {shape}")
            loaded = load_synthetic(shape, settings)
            configs = synthetic_configs(loaded, rates, gamma, compiled=compile)
        for size in sizes:
            batches = _batches(loaded, size, limit, prompt_tokens)
            results.measure(loaded, configs, batches, settings, runs, {})
    results.write(json_file, markdown)


def load_synthetic(shape: str, settings: Settings) -> Loaded:
    """A model that counts: after token t it is sure of token t + 1, whatever else it computes.

    The rows of the output head are those of the embedding, shifted by one token, and the weights of
    the layers are so small that they hardly change the embedding on its way. Their sizes, and with
    them the time of a forward, are those of the shape.
    """
    import torch
    from specdec_hf.cli.load import Loaded
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, intermediate, layers, heads, key_value_heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCABULARY.get(shape, LLAMA_3_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=CONTEXT,
        initializer_range=1e-3,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(find_device(settings.device)):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    embedding = torch.nn.init.normal_(model.get_input_embeddings().weight)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0))
    return Loaded(model.eval(), None, [], f"{LABEL} Llama {shape} of random weights")


def synthetic_configs(
    loaded: Loaded, rates: list[float], gamma: int, *, compiled: bool | None
) -> list[Config]:
    """``model.generate``, this library without drafts, and a drafter for each acceptance rate."""
    from specdec_hf.decoder import SpeculativeDecoder

    from specdec_lab.bench.runs import WITHOUT, Config
    from specdec_lab.bench.synthetic_drafter import SyntheticDrafter

    vocabulary = loaded.model.config.vocab_size
    drafters = {f"{LABEL}, alpha {rate:g}": SyntheticDrafter(rate, vocabulary) for rate in rates}
    without = Config(WITHOUT, SpeculativeDecoder(None, compile=compiled), without_drafts=True)
    options: dict[str, Any] = {"num_assistant_tokens": gamma, "guard": False, "compile": compiled}
    drafting = [
        Config(name, SpeculativeDecoder(drafter, **options)) for name, drafter in drafters.items()
    ]
    return [Config(GENERATE), without, *drafting]


def _batches(loaded: Loaded, size: int, count: int, longest: int) -> list[PromptBatch]:
    """Ragged batches: prompts from half of ``longest`` tokens on, padded on the left."""
    import torch

    from specdec_lab.bench.runs import PromptBatch

    batches = []
    device, generator = loaded.model.device, torch.Generator().manual_seed(0)
    shape = (size, longest)
    for number in range(count):
        ids = torch.randint(loaded.model.config.vocab_size, shape, generator=generator)
        lengths = torch.randint((longest + 1) // 2, longest + 1, (size, 1), generator=generator)
        lengths[0] = longest
        mask = (torch.arange(longest) >= longest - lengths).long()
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        batches.append(PromptBatch([f"{LABEL} {number}"] * size, "", inputs))
    return batches
