"""Speculative decoding with a tensor-parallel model whose logits stay where they are.

`torchrun --nproc-per-node 2 examples/tensor_parallel.py [MODEL]`; a tiny random Llama by default.
Each rank computes its columns of the logits, prompt lookup drafts, and the ranks verify together.
Every round reads the whole text again, because caches are not the subject here.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from specdec_kernels import ngram_propose
from specdec_kernels.sharded import verify_chain_sharded

GAMMA, NEW_TOKENS = 4, 24


def tiny_llama(folder):
    """Saves a random model, the same one on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def main():
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            sys.argv[1] if len(sys.argv) > 1 else tiny_llama(folder),
            # The plan "auto" with one rule changed: it would gather the logits of all ranks.
            distributed_config=DistributedConfig(tp_plan={"lm_head": "colwise"}),
        )
    text = torch.tensor([[5, 17, 31, 8, 5, 17, 31]], device=model.device)
    seeds = torch.tensor([1], device=model.device)
    end, rounds = text.shape[1] + NEW_TOKENS, 0
    while text.shape[1] < end:
        length = torch.tensor([text.shape[1]], device=model.device)
        drafts = ngram_propose(text, length, gamma=GAMMA, min_ngram=1).tokens
        drafted = drafts[:, : int((drafts >= 0).sum())]
        logits = model(input_ids=torch.cat([text, drafted], 1), use_cache=False).logits
        verdict = verify_chain_sharded(
            logits[:, -drafted.shape[1] - 1 :], drafted, rule="match", temperature=0.7, top_k=20,
            seeds=seeds, positions=length, max_new_tokens=end - length,
            vocab_size=model.config.vocab_size,
        )  # fmt: skip
        text = torch.cat([text, verdict.tokens[:, : int((verdict.tokens >= 0).sum())]], 1)
        rounds += 1
    columns = logits.shape[-1]
    line = f"rank {dist.get_rank()}: {columns} columns, {rounds} rounds: {text[0].tolist()}\n"
    print(line, end="")  # in one piece: torchrun does not buffer what the ranks print
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
