"""Batches as the V1 runner of vLLM hands them to its samplers."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

V = 40


def sampling(number, *, temperature=0.0, top_k=None, top_p=None, generators=None, **given):
    """The sampling parameters of a batch, scalars or lists."""

    def vector(value, dtype=torch.float32):
        return None if value is None else torch.tensor(value, dtype=dtype).expand(number).clone()

    temperatures = vector(temperature)
    greedy = temperatures == 0
    defaults = dict(
        temperature=None if greedy.all() else temperatures,
        all_greedy=bool(greedy.all()),
        all_random=not bool(greedy.any()),
        top_p=vector(top_p),
        top_k=vector(top_k, torch.int32),
        generators=generators or {},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(number),
        presence_penalties=torch.zeros(number),
        repetition_penalties=torch.ones(number),
        output_token_ids=[[] for _ in range(number)],
        spec_token_ids=[[] for _ in range(number)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return SamplingMetadata(**defaults | given)


def metadata(drafts):
    """That of a batch, with rows and indices as the runner lays them out."""
    made = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    ends = made.cu_num_sampled_tokens.long()
    made.bonus_logits_indices = (ends - 1).int()
    rows = torch.arange(int(ends[-1]), dtype=torch.int32)
    made.target_logits_indices = rows[~torch.isin(rows, made.bonus_logits_indices)]
    made.logits_indices = rows
    return made


def certain(tokens):
    """Logits that leave no doubt about the tokens."""
    logits = torch.full((len(tokens), V), -50.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)] = 50.0
    return logits
