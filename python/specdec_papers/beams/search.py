"""Beam search with drafts: the beams of a draft model, verified in one forward of the target.

The draft model continues the target's w beams by u >= w beams for gamma steps. The drafted tokens
form a tree, since beams share prefixes, and one forward of the target reads all of it. Then the
target's own steps are made from its logits, as long as its w best beams are among those drafted.
The step in which one is not still counts, because the logits that it is made from were read. So the
beams are those of the target alone, and a forward makes up to gamma + 1 steps instead of one.

Source: Leviathan et al., arXiv 2211.17192, appendix A.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from specdec_hf.arguments import Refused, shown
from specdec_hf.drafters.model import DraftModel, ModelDrafter
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.call import DrafterCall, Forwards
from specdec_hf.drafting.registry import AUTO
from specdec_hf.loop.begin import SLOTS_AHEAD, committed_prompts
from specdec_hf.loop.draft_choice import DraftChoice, asked_choice, nothing
from specdec_hf.loop.draft_length import (
    DraftLengthPolicy,
    Pace,
    costs_of,
    timing_notes,
)
from specdec_hf.loop.output import SpecOutput
from specdec_hf.loop.plan import token_budgets
from specdec_hf.loop.statistics import Phases, RoundRecord, SequenceStats, SpecStats
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS, Options
from specdec_hf.request.call import Call
from specdec_hf.runner.choose import choose_cache, has_exact_text
from specdec_hf.runner.forwards import pack_for
from specdec_hf.runner.protocol import (
    CacheRequest,
    Prompt,
    context_length,
    rereads_at_rope_switch,
    to_device,
    tokens_before_rope_switch,
    vocab_size_of,
)
from specdec_hf.schedules.base import ConstantSchedule, Outcome

from specdec_papers.beams.scores import Beams, Rows, drafted_below, log_prob_rows
from specdec_papers.beams.tree import BeamTree, DraftedBeams, Integers, TreeModel, draft_beams


def check_beam_options(call: Call, options: Options, choice: DraftChoice) -> None:
    """Raises ValueError for an argument that does not go together with ``num_beams``, by name."""
    assert call.beams is not None
    beams = f"with num_beams={call.beams.num_beams}"
    values = {**vars(options), **vars(choice)}
    for option in fields(Options):
        allowed, value = option.metadata["with_beams"], values[option.name]
        if allowed is not None and value not in allowed:
            listed = " or ".join(map(repr, allowed))
            raise ValueError(f"{option.name} must be {listed} {beams}, got {shown(value)}")
    if "hidden_states" in call.output.per_token:
        raise ValueError(f"output_hidden_states must be False {beams}, whose rows are no sequences")
    if call.past is not None:
        raise ValueError(f"past_key_values must be None {beams}")
    if call.prefill is not None:
        raise ValueError(f"{', '.join(call.prefill.names)} cannot be given {beams}")


def draft_model_of(model: Any, call: Call, choice: DraftChoice) -> ModelDrafter | None:
    """The draft model of a beam search, None for beams without drafts.

    Raises:
        TypeError: not a drafter.
        ValueError: another drafter than a model, which has no beams.
    """
    assert call.beams is not None
    drafter = resolve_drafter(choice.drafter, None, model, call.assistant.target_tokenizer)
    if drafter is None or isinstance(drafter, ModelDrafter):
        return drafter
    raise ValueError(
        f"drafter must be None or a draft model with num_beams={call.beams.num_beams}, "
        f"got {drafter.name}"
    )


def draft_size(call: Call, options: Options, choice: DraftChoice) -> tuple[int, int]:
    """Steps gamma of a draft, and its beam width u.

    Raises:
        ValueError: fewer beams than the target has.
    """
    assert call.beams is not None
    width, number = options.num_assistant_beams, choice.num_assistant_tokens
    num_beams = call.beams.num_beams
    if width is not None and width < num_beams:
        raise ValueError(f"num_assistant_beams must be at least {num_beams=}, got {width}")
    gamma = DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number
    return gamma, 2 * num_beams if width is None else width


def beam_search(model: Any, call: Call, options: Options) -> SpecOutput:
    """All rounds of a call with ``num_beams``.

    Args:
        model: the target.
        call: with ``beams``.
        options: those of the loop; the drafter is None or a draft model.

    Raises:
        TypeError: an option of a wrong type.
        ValueError: an argument that beam search does not take, by name.
        RuntimeError: logits that hold no distribution.
    """
    assert call.beams is not None
    num_beams = call.beams.num_beams
    choice = asked_choice(options, call.assistant)
    check_beam_options(call, options, choice)
    if choice.drafter == AUTO and choice.tree is None:
        choice = nothing(choice, f"num_beams={num_beams} needs a draft model")
    call = replace(call, notes=[*call.notes, *choice.notes])
    room = tokens_before_rope_switch(model, int(call.mask.sum(axis=1).max()))
    if rereads_at_rope_switch(model) and room is not None and room < call.stopping.max_new_tokens:
        reason = f"after {room} more tokens its plain search reads all beams again"
        if choice.drafter is None:
            return own_search(model, call, options, reason)
        raise ValueError(
            f"drafter must be None with num_beams={num_beams} for {type(model).__name__}, "
            f"got {shown(choice.drafter)}: {reason}"
        )
    if choice.drafter is None and options.cache == "auto":
        try:
            choose_cache(model, _request(call, options))
        except Refused as error:
            return own_search(model, call, options, str(error))
    search = BeamSearch(model, call, options, choice)
    while not search.beams.done:
        search.run_round()
    return search.output()


def _request(call: Call, options: Options) -> CacheRequest:
    return CacheRequest(
        len(call.mask), options.cache, tree=True, self_check=options.self_check,
        prompt=Prompt(call.prompt_ids, call.mask),
    )  # fmt: skip


@torch.no_grad()
def own_search(model: Any, call: Call, options: Options, reason: str) -> SpecOutput:
    """The beam search of the model's own ``generate``, without drafts.

    Args:
        model, call, options: as in `beam_search`.
        reason: why the loop does not search.
    """
    assert call.beams is not None
    assert call.beams.own_search is not None
    started = options.clock()
    output = call.beams.own_search()
    indices, count = output.beam_indices, call.beams.num_return_sequences
    prompt = to_device(call.mask.repeat(count, axis=0), indices.device)
    steps = indices.shape[1]
    stop_reason = "length" if steps == call.stopping.max_new_tokens else "eos"
    note = f"{type(model).__name__} searches with its own generate, which counts no rounds"
    stats = SpecStats(
        sequences=[
            SequenceStats(prompt_tokens=int(n), new_tokens=steps, stop_reason=stop_reason)
            for n in call.mask.sum(axis=1)
        ],
        total_seconds=options.clock() - started,
        rule="greedy",
        drafter="none",
        cache="plain",
        seeds=[0] * len(call.mask),
        notes=[*call.notes, f"{note}: {reason}"],
    )
    return SpecOutput(
        sequences=output.sequences,
        attention_mask=torch.cat([prompt, indices >= 0], dim=1).long(),
        stats=stats,
        sequences_scores=output.sequences_scores,
        beam_indices=indices,
        **{name: getattr(output, name) for name in call.output.per_token},
    )


class BeamSearch:
    """The state of a beam search from round to round.

    Args:
        model, call, options: as in `beam_search`.
        choice: what drafts; "auto" is no drafter here.
        make_beams: makes the beams for model, call and steps, which say how a step is made.
    """

    def __init__(
        self,
        model: Any,
        call: Call,
        options: Options,
        choice: DraftChoice,
        make_beams: Callable[[Any, Call, int], Beams] = Beams,
    ) -> None:
        assert call.beams is not None
        drafter = draft_model_of(model, call, choice)
        self.gamma, self.width = draft_size(call, options, choice)
        self.model, self.call, self.options = model, call, options
        self.started = options.clock()
        lengths, budgets = token_budgets(model, call)
        self.stats = SpecStats(
            sequences=[SequenceStats(prompt_tokens=int(n)) for n in lengths],
            rule="greedy",
            drafter="none" if drafter is None else drafter.name,
            cache="spec",
            seeds=[0] * len(lengths),
            notes=list(call.notes),
        )
        steps = int(budgets.min())
        if steps < call.stopping.max_new_tokens:
            self.stats.note("stopped at the model's context length")
        self.beams = make_beams(model, call, steps)
        self.text = committed_prompts(call, lengths, int(lengths.max()) + steps)
        size = call.beams.num_beams + self.gamma * self.width  # nodes of one round
        packed_model, self.stats.packed = pack_for(model, options.compile)
        chosen = choose_cache(model, _request(call, options), packed_model)
        if self.stats.packed is not None:
            self.stats.packed.refuse(chosen.why_not_packed)
            self.stats.packed.report(model, self.stats.note)
        self.stats.notes += chosen.notes
        capacity = int(lengths.max()) + min(steps, SLOTS_AHEAD) + size
        self.target = TreeModel(chosen.make(capacity))
        self.tree = BeamTree(len(lengths))
        made = None if drafter is None else self._start(drafter, size)
        self.drafter = None if made is None else TreeModel(made.runner)
        exact, vocab_size = has_exact_text(model, chosen, packed_model), vocab_size_of(model)
        by_clock = bool(options.guard)
        costs = costs_of(model, "greedy", lengths, exact=exact, by_clock=by_clock)
        if drafter is not None and not exact:
            self.stats.notes += timing_notes(model, "greedy", costs)
        others = self.beams.width - 1  # a plain round reads all beams
        pace = Pace.start(ConstantSchedule(), costs, 1, self.gamma, vocab_size, trees=False)
        self.length_policy = DraftLengthPolicy(
            pace, options.guard, drafter, model=model, rule="greedy",
            batch_size=len(lengths), stats=self.stats, clock=options.clock,
            padded=lambda nodes: nodes + others,
        )  # fmt: skip
        if made is not None:
            self.length_policy.begin(made.cost, None, steps)
        self.rows: dict[str, list[torch.Tensor]] = {name: [] for name in call.output.per_token}

    def _start(self, drafter: ModelDrafter, size: int) -> DraftModel:
        """The draft model with an empty cache."""
        zeros = torch.zeros(len(self.text.lengths), dtype=torch.int64, device=self.model.device)
        greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        call = DrafterCall.of(
            self.model, "greedy", greedy, seeds=zeros,
            max_length=self.text.tokens.shape[1], max_draft=size, note=self.stats.note_round,
            forwards=Forwards(
                self.options.self_check, self.options.compile,
                packed=None if self.stats.packed is None else self.stats.packed.drafts,
            ),
        )  # fmt: skip
        self.stats.tree = f"{self.width} beams"
        weights = drafter.draft_weights
        return DraftModel(drafter.model, call, drafter.cache_kind, tree=True, draft_weights=weights)

    @torch.inference_mode()
    def run_round(self) -> None:
        """One forward of the target, and the steps that its logits allow."""
        phases = Phases(self.options.clock, self.target.runner)
        prompt = int(self.text.lengths.max()) if self.tree.size == 0 else None
        drafted = None
        phases.begin("draft")
        gamma = 0 if prompt is not None else self._draft_length()
        if gamma:
            assert self.drafter is not None
            drafted = draft_beams(
                self.drafter, self.text, self.tree, self.beams.running_scores,
                width=self.width, gamma=gamma, eos=self.call.stopping.eos,
            )  # fmt: skip
        phases.begin("target")
        logits = self._forward(drafted)
        phases.begin("verification")
        steps = self._make_steps(logits, drafted)
        phases.stop()
        batch_size = len(self.text.lengths)
        nodes = 0 if drafted is None else drafted.tokens.shape[1]
        for one in self.stats.sequences:
            one.record(gamma, steps - 1, steps)
        record = RoundRecord(
            began=phases.began - self.started,
            **phases.seconds,
            drafted=[gamma] * batch_size,
            accepted=[steps - 1] * batch_size,
            emitted=[steps] * batch_size,
        )
        outcome = Outcome(np.array([gamma]), np.array([steps - 1]), np.array([steps <= gamma]))
        self.length_policy.learn(record, outcome, nodes, prompt=prompt)
        self.stats.record_round(nodes, record)

    def _draft_length(self) -> int:
        """gamma of this round; 0 drafts nothing."""
        if self.drafter is None:
            return 0
        # The round makes one step beyond the draft, so the last step is never drafted.
        room = self.beams.max_length - self.beams.length - 1
        depth = self.beams.length - self.beams.prompt_length
        longest = int(self.call.mask.sum(axis=1).max()) + depth
        context, turn = (
            context_length(self.drafter.model),
            tokens_before_rope_switch(self.model, longest),
        )
        if context is not None:
            room = min(room, context - longest)
        if turn is not None:
            room = min(room, turn)
        return int(self.length_policy.limits(np.array([max(int(room), 0)]))[0])

    def _forward(self, drafted: DraftedBeams | None) -> torch.Tensor:
        """The target's logits [B, R, V]: of the root, or of the beams and then the draft."""
        logits = self.target.catch_up(self.text)
        if logits is not None:
            return logits
        device = self.model.device
        tokens = to_device(self.tree.tokens[:, -self.beams.width :], device)
        parents = to_device(self.tree.parents, device)
        if drafted is not None:
            tokens = torch.cat([tokens, drafted.tokens.to(device)], dim=1)
            parents = torch.cat([parents, drafted.parents.to(device)], dim=1)
        return self.target.feed(self.text, tokens, parents)

    def _make_steps(self, logits: torch.Tensor, drafted: DraftedBeams | None) -> int:
        """Make the target's steps while its beams are among the drafted ones; how many."""
        width, batch_size = self.beams.width, len(logits)
        first = max(self.tree.size - width, -1)  # number of the node of row 0; -1 is the root
        rows = log_prob_rows(self.call, self.beams, logits, first, drafted)
        if drafted is not None:
            self.tree.extend(rows.tokens, rows.parents)
        nodes: Integers = np.full((batch_size, width), -1, dtype=np.int64)
        if first >= 0:
            nodes += np.arange(first, first + width) + 1
        steps = 0
        while True:
            index = nodes - first
            self._record(logits, rows, index)
            steps += 1
            origins, tokens = self.beams.step(*rows.best(index), partial(rows.whole, index))
            above = np.take_along_axis(nodes, origins, axis=1)
            inside = None if self.beams.done else drafted_below(rows, first + width, above, tokens)
            if inside is None:
                break
            nodes = inside
        self._keep(above, tokens)
        return steps

    def _keep(self, above: Integers, tokens: Integers) -> None:
        """Keep the nodes of the beams, whose last tokens [B, w] follow the nodes ``above``."""
        lengths = self.text.lengths.copy()
        kept, shared, texts, above = self.tree.prune(above)
        for model in (self.target, self.drafter):
            if model is not None:
                model.keep(lengths, kept, shared)
        for b, text in enumerate(texts):
            self.text.append(b, text)
        self.tree.extend(tokens, above)

    def _record(self, logits: torch.Tensor, rows: Rows, index: Integers) -> None:
        """Keep rows of one step, [B, w] of them, for the output."""
        if not self.rows:
            return
        chosen = to_device(index, logits.device)
        for name, kept in self.rows.items():
            x = logits.float() if name == "logits" else rows.log_probs
            kept.append(x.take_along_dim(chosen[:, :, None], dim=1).flatten(0, 1))

    def output(self) -> SpecOutput:
        """The best sequences and what the caller wants of the search."""
        assert self.call.beams is not None
        sequences, scores, indices = self.beams.best()
        device, count = self.model.device, self.call.beams.num_return_sequences
        prompt = torch.from_numpy(self.call.mask).repeat_interleave(count, dim=0)
        rows: dict[str, Any] = {name: tuple(steps) for name, steps in self.rows.items()}
        reason = "length" if self.beams.length == self.beams.max_length else "eos"
        for one in self.stats.sequences:
            one.stop_reason = reason
        self.stats.total_seconds = self.options.clock() - self.started
        self.length_policy.finish()
        return SpecOutput(
            sequences=sequences.to(device),
            attention_mask=torch.cat([prompt, indices >= 0], dim=1).long().to(device),
            stats=self.stats,
            sequences_scores=scores.to(device) if "scores" in self.rows else None,
            beam_indices=indices.to(device),
            **rows,
        )
