"""The state of a call from round to round, and how it begins.

The tokens of a call are stored once, in ``Session.history``, without padding. Only where Hugging
Face's objects or the caller read them is the padding of ``input_ids`` put in front again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.choose import check_kind, choose_cache
from specdec_hf.cache.handover import import_cache
from specdec_hf.cache.hidden_states import keep_hidden_states
from specdec_hf.cache.plain import Prompt
from specdec_hf.cache.protocol import Lengths, RollbackCache, context_length, vocab_size_of
from specdec_hf.decode.arguments import check_option_types
from specdec_hf.decode.draft_length import DraftLengthPolicy, begin_schedule
from specdec_hf.decode.history import CommittedTokens
from specdec_hf.decode.prefill import prefill
from specdec_hf.decode.rules import resolve_rule
from specdec_hf.decode.statistics import SequenceStats, SpecStats
from specdec_hf.decode.token_outputs import TokenOutputs
from specdec_hf.decode.tracing import Trace
from specdec_hf.drafters.checks import describe
from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.drafter import Drafter
from specdec_hf.drafters.lease import Lease
from specdec_hf.drafters.resolve import parts_of, resolve_drafter
from specdec_hf.drafters.tree_drafter import TreeDrafter
from specdec_hf.hf_arguments.call import Call
from specdec_hf.hf_arguments.sampling import sequence_seeds
from specdec_hf.schedules.base import Schedule, ScheduleContext
from specdec_hf.schedules.benefit_guard import BenefitGuard
from specdec_hf.schedules.costs import Costs
from specdec_hf.trees.layouts import Layout
from specdec_kernels import LOSSLESS_RULES, LOSSLESS_TREE_RULES

DEFAULT_NUM_ASSISTANT_TOKENS = 5
SLOTS_AHEAD = 512  # cache slots allocated beyond the prompt before the cache has to grow


@dataclass
class Options:
    """The loop's own arguments; see `generate`."""

    drafter: Any = None
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | Schedule | None = None
    num_assistant_beams: int | None = None
    rule: str = "auto"
    tree: Layout | None = None
    cache: str = "auto"
    self_check: bool = True
    seed: Any = None
    guard: bool | BenefitGuard | None = None
    clock: Callable[[], float] = time.perf_counter
    trace: Trace | None = None

    def __post_init__(self) -> None:
        check_option_types(self)


@dataclass
class Session:
    """The state of one call between rounds.

    Attributes:
        length_policy: says how many tokens each sequence drafts.
        history: all committed tokens.
        prompt_lengths: [B] tokens of each prompt, without padding.
        budgets: [B] most new tokens of each sequence.
        logprobs: [B] lists, of the new tokens.
        lease: keeps the drafter from other calls.
        outputs: collects what the caller wants of every new token, or None.
        first_logits: [B, 1, V], those of the model's own prefill until the first round reads them.
        trace: called with what each round compared, once its time is taken.
    """

    model: Any
    call: Call
    rule: str
    cache: RollbackCache
    drafter: Drafter | TreeDrafter | None
    context: DraftContext | None
    length_policy: DraftLengthPolicy
    history: CommittedTokens
    prompt_lengths: Lengths
    budgets: NDArray[np.int64]
    logprobs: list[list[float]]
    seeds: torch.Tensor
    lease: Lease
    stats: SpecStats
    clock: Callable[[], float]
    started: float
    outputs: TokenOutputs | None = None
    first_logits: torch.Tensor | None = None
    trace: Trace | None = None

    @property
    def new_tokens(self) -> NDArray[np.int64]:
        """[B], how many tokens each sequence has beyond its prompt."""
        return self.history.lengths - self.prompt_lengths

    @property
    def padding_fed(self) -> NDArray[np.int64]:
        """[B], tokens of padding that plain generation has fed by this round, without drafts."""
        return np.where(self.history.active, 0, self.stats.rounds - self.new_tokens)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.history.active.any()

    def padded_ids(self, b: int) -> NDArray[np.int64]:
        """The tokens of sequence ``b`` as ``model.generate`` holds them: with left padding."""
        begin, end = self.prompt_lengths[b], self.history.lengths[b]
        return np.concatenate([self.call.input_ids[b], self.history.tokens[b, begin:end]])


def begin(model: Any, call: Call, options: Options) -> Session:
    """Set up the cache, the drafter and the schedules of one call.

    Raises:
        TypeError: a drafter or seed of a wrong type.
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
        RuntimeError: a drafter that another call is using.
    """
    drafter = resolve_drafter(options.drafter, options.tree)
    drafts_tree = isinstance(drafter, TreeDrafter)
    if options.num_assistant_beams is not None:
        raise ValueError(
            f"num_assistant_beams must be None without num_beams, got {options.num_assistant_beams}"
        )
    rule = resolve_rule(
        options.rule, call.do_sample, LOSSLESS_RULES if drafter is None else drafter.rules
    )
    forwards = isinstance(drafter, Drafter) and type(drafter).forward is not Drafter.forward
    if "hidden_states" in call.outputs and forwards:
        raise ValueError(
            "output_hidden_states must be False with a drafter that makes the target's forward "
            f"itself, got {describe(drafter)}"
        )
    check_kind(options.cache)
    kind = options.cache
    if drafts_tree:
        _check_tree_options(options)
        kind = "spec"
    started = options.clock()
    batch_size = len(call.mask)
    lengths, budgets = token_budgets(model, call)
    max_length = int((lengths + budgets).max())
    if isinstance(drafter, TreeDrafter):
        draft_length, draft_size = drafter.depth, drafter.size
    else:
        number = options.num_assistant_tokens
        draft_length = draft_size = DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number
    costs = Costs()
    vocab_size = vocab_size_of(model)
    schedule = begin_schedule(
        options.num_assistant_tokens_schedule or "constant",
        drafter,
        ScheduleContext(batch_size, draft_length, vocab_size, drafts_tree, costs),
    )
    if not drafts_tree:
        draft_size = max(draft_size, schedule.max_draft)
    seeds = sequence_seeds(
        options.seed,
        batch_size,
        do_sample=call.do_sample,
        num_return_sequences=call.num_return_sequences,
    )
    seed_tensor = torch.tensor(seeds, dtype=torch.int64, device=model.device)
    capacity = min(max_length, int(lengths.max()) + SLOTS_AHEAD) + draft_size + 1
    prompt = Prompt(call.prompt_ids, call.mask)
    needs: dict[str, Any] = {
        "drafts": drafter is not None,
        "tree": drafts_tree,
        "self_check": options.self_check,
    }
    if call.prefill is None:
        needs["encoded"] = call.encoded
    first_logits = None
    if call.prefill is not None:
        cache, first_logits, notes = prefill(model, call, capacity, kind, **needs)
    elif call.past is None:
        cache, notes = choose_cache(model, batch_size, capacity, kind, prompt=prompt, **needs)
    else:
        cache, notes = import_cache(model, call.past, prompt, capacity, kind, **needs)
    stats = SpecStats(
        sequences=[SequenceStats(prompt_tokens=int(n)) for n in lengths],
        rule=rule,
        lossless=rule in LOSSLESS_RULES or rule in LOSSLESS_TREE_RULES,
        drafter="none" if drafter is None else drafter.name,
        cache=cache.kind,
        tree="" if options.tree is None else str(options.tree),
        seeds=seeds,
        notes=[*call.notes, *notes],
    )
    lease = Lease(parts_of(drafter))
    context = None
    if drafter is not None:
        context = DraftContext(
            model, rule, **copy.deepcopy(call.sampling.to_dict()), seeds=seed_tensor.clone(),
            batch_size=batch_size, max_length=max_length, max_draft=max(draft_size, 16),
            note=stats.note_round,
            self_check=options.self_check,
            encoder=call.encoder,
            cache=cache,
            round_noise=schedule.reads_token_stats and rule != "match",  # exact with any drafts
        )  # fmt: skip
        try:
            drafter.start(context)
        except BaseException:
            lease.release()  # at once, since the traceback keeps it alive
            raise
    length_policy = DraftLengthPolicy(
        schedule, costs, options.guard, drafter, model=model, rule=rule, budget=int(budgets.max()),
        stats=stats, clock=options.clock,
    )  # fmt: skip
    if context is not None and schedule.reads_token_stats:
        context.goes_on = length_policy.goes_on
    return Session(
        model=model,
        call=call,
        rule=rule,
        cache=cache,
        drafter=drafter,
        context=context,
        length_policy=length_policy,
        history=committed_prompts(call, lengths, max_length),
        prompt_lengths=lengths.copy(),
        budgets=budgets,
        logprobs=[[] for _ in range(batch_size)],
        seeds=seed_tensor,
        lease=lease,
        stats=stats,
        clock=options.clock,
        started=started,
        outputs=_token_outputs(call, cache),
        first_logits=first_logits,
        trace=options.trace,
    )


def _check_tree_options(options: Options) -> None:
    if options.num_assistant_tokens is not None:
        raise ValueError(
            "num_assistant_tokens must not be given with a drafter of trees, which says what is "
            f"drafted, got {options.num_assistant_tokens}"
        )
    if options.trace is not None:
        raise ValueError("trace must be None with tree: only rounds of chains are traced")
    if options.cache not in ("auto", "spec"):
        raise ValueError(f"cache must be 'auto' or 'spec' with tree, got {options.cache!r}")


def committed_prompts(call: Call, lengths: Lengths, max_length: int) -> CommittedTokens:
    """The prompts without padding, with room for ``max_length`` tokens each."""
    tokens = np.zeros((len(lengths), max_length), dtype=np.int64)
    for b, ids in enumerate(call.prompt_ids):
        tokens[b, : lengths[b]] = ids[call.mask[b]]
    return CommittedTokens(tokens, lengths, np.ones(len(lengths), dtype=bool))


def token_budgets(model: Any, call: Call) -> tuple[Lengths, Lengths]:
    """[B] prompt lengths, and [B] the most new tokens of each sequence."""
    lengths = call.mask.sum(axis=1).astype(np.int64)
    budgets = np.full(len(lengths), call.max_new_tokens, dtype=np.int64)
    context = context_length(model)
    if context is None:
        return lengths, budgets
    if lengths.max() >= context:
        raise ValueError(
            f"prompt of sequence {int(lengths.argmax())} has {int(lengths.max())} tokens, "
            f"but the model's context is {context}"
        )
    return lengths, np.minimum(budgets, context - lengths)


def _token_outputs(call: Call, cache: RollbackCache) -> TokenOutputs | None:
    if not call.outputs:
        return None
    if "hidden_states" in call.outputs and call.prefill is None:
        keep_hidden_states(cache)
    return TokenOutputs(call.outputs, cache, len(call.mask))
