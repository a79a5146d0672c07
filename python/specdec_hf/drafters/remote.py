"""A drafter in another process, which may be on another machine.

The process of the target has a `RemoteDrafter`, and another rank of the same process group runs
`serve_drafter`. They exchange histories, drafts and outcomes as objects of `torch.distributed`, so
the ranks must trust each other as ranks do, and a group on the CPU, such as gloo's, must join them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.resolve import parts_of
from specdec_hf.drafting.context import Candidates, DraftContext, History
from specdec_hf.drafting.drafter import Draft, Drafter, DraftOutcome
from specdec_hf.request.inputs import RULE, is_language_model
from specdec_hf.runner.protocol import num_parameters
from specdec_kernels import SampledDraft

_ATTRIBUTES = (
    "rules", "size", "depth", "noise", "draws", "several", "candidates", "reports_confidence",
)  # fmt: skip
_COSTS = ("relative_cost", "drafts_at_once", "reads_prompt")  # of a call


@dataclass(eq=False)
class _Target:
    """As much of the target as a drafter in another process may know."""

    config: Any
    device: torch.device
    size: int

    def parameters(self) -> list[torch.Tensor]:
        """Parameters without values, for their number."""
        return [torch.empty(self.size, device="meta")]


class RemoteDrafter(Drafter):
    """Drafts with the drafter that another rank serves; each round waits for its answer.

    Args:
        rank: the rank that runs `serve_drafter`, in the default process group.
        group: a group that holds both ranks; None is the default group.

    Raises:
        TypeError: ``rank`` is no integer.
        ValueError: ``rank`` is this process's own, or not in the group.
        RuntimeError: torch.distributed is not initialized.
    """

    name = "remote"

    def __init__(self, rank: int, group: Any = None) -> None:
        self.rank = check_integer("rank", rank)
        _check_initialized("RemoteDrafter")
        others = set(range(dist.get_world_size())) - {dist.get_rank()}
        if rank not in others:
            raise ValueError(f"rank must be one of {sorted(others)}, got {rank}")
        self._group: Any = group
        vars(self).update(self._ask("describe", None))

    def start(self, context: DraftContext) -> None:
        """Begin a new call there.

        Raises:
            ValueError: a call that reads an encoder's input, which is not sent.
        """
        if context.encoder is not None:
            raise ValueError(
                "drafter must not be a RemoteDrafter for an encoder-decoder, "
                f"got {type(self).__name__}"
            )
        self._context = context
        fields = (
            "rule", "temperature", "top_k", "top_p", "min_p", "seeds", "batch_size", "max_length",
            "max_draft", "self_check", "num_proposals", "first_draft_index",
        )  # fmt: skip
        values = {name: _on_host(getattr(context, name)) for name in fields}
        size = num_parameters(context.model)
        values |= {"config": context.model.config, "size": size}
        values["sampled"] = context.sampled_seeds()
        vars(self).update(self._ask("start", values))

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        asked, fields = self._ask("propose", (_shown(history), limits.copy()))
        self._context.asked_for_noise |= asked
        if fields is None:
            return None
        draft, device = Draft(**fields), self._context.model.device
        if draft.distribution is None:
            return draft
        logits, sums, thresholds, temperature = draft.distribution
        if temperature is None:
            temperature = self._context.temperature
        draft.tokens = draft.tokens.to(device)
        draft.distribution = SampledDraft(
            logits.to(device), sums.to(device), thresholds.to(device), temperature
        )
        return draft

    def observe(self, history: History, candidates: Candidates) -> None:
        self._ask("observe", (_shown(history), candidates))

    def commit(self, outcome: DraftOutcome) -> None:
        self._ask("commit", outcome)

    def finish(self, history: History) -> None:
        self._ask("finish", _shown(history))

    def close(self) -> None:
        """Let `serve_drafter` return there."""
        self._ask("close", None)

    def _ask(self, what: str, value: Any) -> Any:
        dist.send_object_list([what, value], dst=self.rank, group=self._group)
        answer: list[Any] = [None, None, None]
        dist.recv_object_list(answer, src=self.rank, group=self._group)
        error, found, notes = answer
        for note in notes:
            self._context.note(note)
        if error is not None:
            raise error
        return found


def serve_drafter(drafter: Any, rank: int = 0, group: Any = None) -> None:
    """Answer the `RemoteDrafter` of another rank until it is closed.

    An error of the drafter is raised there, and serving goes on.

    Args:
        drafter: a `Drafter` or a draft model, on any device.
        rank: that of the target's process.
        group: as in `RemoteDrafter`.

    Raises:
        TypeError: ``drafter`` is neither.
        RuntimeError: torch.distributed is not initialized.
    """
    _check_initialized("serve_drafter")
    if is_language_model(drafter):
        drafter = ModelDrafter(drafter)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter or {RULE}, got {type(drafter).__name__}")
    server = _Server(drafter)
    what = ""
    while what != "close":
        message: list[Any] = [None, None]
        dist.recv_object_list(message, src=rank, group=group)
        what, value = message
        error = found = None
        try:
            with torch.inference_mode():
                found = getattr(server, what)(value)
        except Exception as raised:  # it belongs to the process that asked
            error = raised.with_traceback(None)
        notes, server.notes = server.notes, []
        dist.send_object_list([error, found, notes], dst=rank, group=group)


class _Server:
    """What `serve_drafter` does for each message, which bears the name of a method."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.notes: list[str] = []
        self._target: _Target | None = None

    def describe(self, _: None) -> dict[str, Any]:
        known = {name: getattr(self.drafter, name, None) for name in _ATTRIBUTES}
        return {name: value for name, value in known.items() if value is not None}

    def start(self, values: dict[str, Any]) -> dict[str, Any]:
        device = getattr(getattr(self.drafter, "model", None), "device", torch.device("cpu"))
        target = self._same_target(_Target(values.pop("config"), device, values.pop("size")))
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        self.context = DraftContext(target, **moved, note=self.notes_append)
        self.drafter.start(self.context)
        return {name: getattr(self.drafter, name) for name in _COSTS}

    def _same_target(self, target: _Target) -> _Target:
        """That of the last call if it is equal, since what a drafter keeps goes by the object."""
        if self._target is None or vars(self._target) != vars(target):
            self._target = target
        return self._target

    def notes_append(self, text: str) -> None:
        self.notes.append(text)

    def propose(self, value: tuple[Any, ...]) -> tuple[bool, Any]:
        shown, limits = value
        self.context.asked_for_noise = False
        draft = self.drafter.propose(History(*shown), limits)
        asked = self.context.asked_for_noise
        if draft is None:
            return asked, None
        draft = draft if isinstance(draft, Draft) else Draft(draft)
        fields = {name: _on_host(value) for name, value in vars(draft).items()}
        if (rows := draft.distribution) is not None:
            own = rows.temperature is self.context.temperature
            temperature = None if own else _on_host(rows.temperature)
            fields["distribution"] = (*map(_on_host, rows[:3]), temperature)
        return asked, fields

    def observe(self, value: tuple[Any, Candidates]) -> None:
        shown, candidates = value
        self.drafter.observe(History(*shown), candidates)

    def commit(self, outcome: DraftOutcome) -> None:
        self.drafter.commit(outcome)

    def finish(self, history: tuple[NDArray[Any], ...]) -> None:
        for part in parts_of(self.drafter):
            part.finish(History(*history))

    def close(self, _: None) -> None:
        """Do nothing, because `serve_drafter` returns after this message."""


def _shown(history: History) -> tuple[NDArray[Any], ...]:
    """A history as it is sent."""
    return history.tokens.copy(), history.lengths.copy(), history.active.copy()


def _on_host(value: Any) -> Any:
    """A tensor as one of its own on the host, since no view is sent; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.inference_mode(False):
        return value.detach().cpu().clone()


def _check_initialized(name: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{name} needs torch.distributed: call torch.distributed.init_process_group first"
        )
