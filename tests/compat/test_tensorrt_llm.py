"""TensorRT-LLM's acceptance by ids: random cases as in its tests, one by one, and rule greedy."""

import pytest
import torch

from specdec_kernels.compat.tensorrt_llm import accept_draft_tokens_by_ids

SLOTS, LENGTH, VOCAB, DRAFTS = 64, 16, 32, 8


def case(seed):
    """Random slots: the target's tokens may end before the drafts, and often equal them."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    numbers = integers(1, DRAFTS + 1, SLOTS)
    contexts = integers(0, LENGTH - DRAFTS, SLOTS)
    new = (torch.rand(SLOTS, generator=generator) * (numbers + 1)).int()
    drafts, target = integers(1, VOCAB - 1, SLOTS, DRAFTS), integers(1, VOCAB, SLOTS, LENGTH)
    finished = torch.zeros(DRAFTS + 1, SLOTS, dtype=torch.uint8)
    for s in range(SLOTS):
        for i in range(int(new[s])):
            if torch.rand((), generator=generator) < 0.8:
                target[s, contexts[s] + i] = drafts[s, i]
        finished[int(new[s]) :, s] = 1 << int(integers(0, 4))
    return dict(
        draft_ids=drafts, target_ids=target, context_lengths=contexts, nums_draft_tokens=numbers,
        sequence_lengths=contexts + new, finished=finished,
        finished_final=torch.full((SLOTS,), 77, dtype=torch.uint8),
        finished_sum=torch.full((SLOTS,), 77, dtype=torch.int32),
    )  # fmt: skip


def accept_one(c, s):
    """(length, finished state) of a slot, token by token."""
    begin, end = int(c["context_lengths"][s]), int(c["sequence_lengths"][s])
    last = min(end, begin + int(c["nums_draft_tokens"][s]))
    for i in range(last - begin):
        if c["draft_ids"][s, i] != c["target_ids"][s, begin + i]:
            return min(begin + i + 1, LENGTH), int(c["finished"][i, s])
    return end, int(c["finished"][max(last - begin, 0), s])


@pytest.mark.parametrize("every", [1, 2])
def test_random_slots(every):
    slots = torch.arange(0, SLOTS, every, dtype=torch.int32)
    for seed in range(3):
        arguments = case(seed)
        want = [accept_one(arguments, s) for s in range(SLOTS)]
        before = arguments["sequence_lengths"].tolist()
        accept_draft_tokens_by_ids(**arguments, batch_slots=None if every == 1 else slots)
        for s, (length, state) in enumerate(want):
            mine = s % every == 0
            assert arguments["sequence_lengths"][s] == (length if mine else before[s])
            assert arguments["finished_final"][s] == (state if mine else 77)
            done = int(state in (1, 2, 4))
            assert arguments["finished_sum"][s] == (done if mine else 77)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target_ids", torch.zeros(SLOTS - 1, 9).int(), r"= \[64, 9\], got \[63, 9\]"),
        ("finished", torch.zeros(DRAFTS, SLOTS).byte(), r"\[D\+1, S\] = \[9, 64\]"),
        ("batch_slots", torch.tensor([-1, 3]).int(), r"in \[0, 63\], got -1"),
        ("batch_slots", torch.tensor([3, 64]).int(), r"in \[0, 63\], got 64"),
    ],
)
def test_wrong_sizes_and_slots_of_tensorrt_llm_are_named(name, value, message):
    """Wrong types and shapes are in test_interfaces.py."""
    with pytest.raises(RuntimeError, match=message):
        accept_draft_tokens_by_ids(**case(0) | {name: value})
