"""What the ranks run in tests of verification over a sharded vocabulary."""

from __future__ import annotations

import contextlib
import io
from unittest import mock

import torch
import torch.distributed as dist

from specdec_kernels import SampledDraft, SparseDraft
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.sharded import distribution, verify_chain, verify_chain_sharded


def even_starts(vocab, ranks):
    """Where the shards of a vocabulary start: the first ones are larger by one, where need be."""
    return [rank * (vocab // ranks) + min(rank, vocab % ranks) for rank in range(ranks)]


def rank_arguments(a, begin, end):
    """Arguments of `verify_chain_sharded` for the rank that holds these columns."""
    draft = a.draft
    if a.draft_ids is not None:
        draft = SparseDraft(a.draft_ids, draft)
    elif draft is not None:
        draft = draft[..., begin:end]
        if a.draft_logsumexp is not None:
            temperature = a.draft_temperature
            if a.draft_temperatures is not None:
                temperature = a.draft_temperatures
            draft = SampledDraft(
                draft, a.draft_logsumexp, a.draft_threshold, temperature, a.draft_bitmask
            )
    pairs = (
        (name, getattr(a, f"{name}s"), getattr(a, name))
        for name in ("temperature", "top_k", "top_p", "min_p")
    )
    return dict(
        target_shard=a.target[..., begin:end], draft_token_ids=a.draft_token_ids,
        draft_shard=draft, rule=a.rule_name,
        **{name: scalar if vector is None else vector for name, vector, scalar in pairs},
        **{
            name: getattr(a, name)
            for name in (
                "token_bitmask", "seeds", "positions", "target_indptr", "uniforms",
                "eos_token_ids", "max_new_tokens", "with_logprobs", "with_accept_probs",
            )
        },
    )  # fmt: skip


def columns_of_rank(rank, starts, vocab):
    """Where the shard of a rank begins and ends: none is left but to the last of one start."""
    begin = starts[rank]
    if begin in starts[rank + 1 :]:
        return begin, begin
    return begin, min([s for s in starts if s > begin], default=vocab)


def verify_on_rank(group, args, starts=None, **changes):
    """Calls `verify_chain_sharded` with this rank's part of the arguments of `verify_chain`.

    args: in the order of the schema. starts: of the ranks' shards, in any order; where some are
    equal, all but the last of these shards are empty.
    """
    a = ChainArguments(*args)
    vocab = a.target.shape[-1]
    starts = starts or even_starts(vocab, dist.get_world_size(group))
    begin, end = columns_of_rank(dist.get_rank(group), starts, vocab)
    arguments = rank_arguments(a, begin, end) | {"vocab_start": begin} | changes
    return verify_chain_sharded(group=group, **arguments)


def verify_with_all_changed(group, args, changes):
    """`verify_on_rank`; all ranks change some of the arguments."""
    return verify_on_rank(group, args, **changes)


def verify_with_changes(group, args, rank, changes, starts=None):
    """`verify_on_rank`; one rank changes some of the arguments."""
    return verify_on_rank(group, args, starts, **(changes if dist.get_rank(group) == rank else {}))


def verify_outside(_group, args):
    """`verify_on_rank` with a group that does not contain this rank."""
    return verify_on_rank(dist.GroupMember.NON_GROUP_MEMBER, args, [0])


# Where a function is looked up, so that a test can replace it.
PLACES = {
    "pack_maxima": (verify_chain, "pack_maxima"),
    "masses": (distribution.RowStats, "masses"),
    "draft_on_shard": (verify_chain, "draft_on_shard"),
}


def fail_on_rank(group, args, rank, name):
    """`verify_on_rank`; on one rank the first call of a function of `PLACES` raises."""
    if dist.get_rank(group) != rank:
        return verify_on_rank(group, args)
    place, attribute = PLACES[name]
    function, planted = getattr(place, attribute), [MemoryError("planted")]

    def fails_once(*given, **options):
        if planted:
            raise planted.pop()
        return function(*given, **options)

    with mock.patch.object(place, attribute, fails_once):
        return verify_on_rank(group, args)


def decide_alone(group, args):
    """`verify_on_rank` with probabilities of each shard alone, which differ between ranks."""
    add_up = distribution.RowStats.add_up

    def without_other_ranks(stats, total, vocab):
        own = stats.masses(distribution.Shard(0, 0, vocab)).sum(-1)
        add_up(stats, own.clamp(min=1), vocab)

    with mock.patch.object(distribution.RowStats, "add_up", without_other_ranks):
        return verify_on_rank(group, args)


def run_program(_group, program):
    """What a program prints that initialises and destroys the default group, which exists here."""
    printed = io.StringIO()
    lasting = {"init_process_group": lambda *_, **__: None, "destroy_process_group": lambda: None}
    with mock.patch.multiple(dist, **lasting), contextlib.redirect_stdout(printed):
        exec(program, {})
    return printed.getvalue()


def count_bytes(group, args):
    """(calls, bytes) that this rank hands to collectives in one verification."""
    seen = []

    def counted(function):
        def call(*given, **options):
            payload = given[1] if function.__name__ == "all_gather" else given[0]
            seen.append(payload.numel() * payload.element_size())
            return function(*given, **options)

        return call

    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "all_to_all")
    with mock.patch.multiple(dist, **{name: counted(getattr(dist, name)) for name in names}):
        verify_on_rank(group, args)
    return len(seen), sum(seen)


def sharded_provider(ranks, size, *given):
    """An implementation of the op `verify_chain`, whose vocabulary `size` ranks share.

    given: more arguments of `verify_on_rank`. It fails unless all ranks give the
    same bits.
    """

    def op(*args):
        verdicts = ranks.run(size, verify_on_rank, args, *given)
        for verdict in verdicts[1:]:
            for got, want in zip(verdict, verdicts[0], strict=True):
                assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        return verdicts[0]

    return op
