"""The choice of a cache: the first that suits the model, as the self-check measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from specdec_hf.arguments import Refused
from specdec_hf.runner.cache_kinds import CACHE_KINDS, NAMED_KINDS, CacheKind, kinds_to_try
from specdec_hf.runner.comparison import CacheCheck, coarse_arithmetic
from specdec_hf.runner.forwards import ForwardPolicy
from specdec_hf.runner.packed.model import PackedModel
from specdec_hf.runner.protocol import CacheRequest, Runner


@dataclass(frozen=True)
class ChosenCache:
    """A kind of cache that suits a model.

    Attributes:
        request: what was asked.
        kind: the kind.
        check: what is known of it.
        reasons: by kind, why those before it do not suit the model.
        model: what fills the cache: the model, or its packed model.
        why_not_packed: how the packed model differs; empty where it runs or there is none.
    """

    request: CacheRequest
    kind: CacheKind
    check: CacheCheck
    reasons: dict[str, str]
    model: Any
    why_not_packed: str

    def make(self, capacity: int, past: Cache | None = None) -> Runner:
        """A runner with an empty cache, or over ``past``, as in `CacheKind.make`."""
        policy = ForwardPolicy(omits_mask=self.check.omitted)
        return self.kind.make(self.model, capacity, self.request, past, policy)

    @property
    def notes(self) -> list[str]:
        """Remarks for the statistics of a call."""
        cache, check = f"cache={self.kind.name!r}", self.check
        name = type(self.model).__name__
        notes = [f"{name} runs with {cache}; {reason}" for reason in _listed(self.reasons)]
        if check.not_measured is not None:
            notes.append(f"{cache} was not checked: {check.not_measured}")
        elif check.remark is not None:
            notes.append(f"{cache}: {check.remark}")
        return notes


def choose_cache(
    model: Any, request: CacheRequest, packed: PackedModel | None = None
) -> ChosenCache:
    """The first kind of cache that suits a model; a `Refused` names class, caches and reasons.

    The packed model runs in the model's place where its logits over the cache are the model's
    own, or nothing is to be compared.
    """
    check_kind(request.kind)
    reasons: dict[str, str] = {}
    why_not_packed = ""
    for kind in kinds_to_try(model, request):
        runs = model
        if packed is not None and kind.is_compared:
            check = _check(model, kind, request, packed)
            compared = check.difference is not None or not request.self_check
            if check.reason is None and compared:
                runs, why_not_packed = packed.model, ""
            else:
                difference = check.reason or check.unchecked or check.remark
                why_not_packed = f"packed weights differ: {difference}"
        if runs is model:
            check = _check(model, kind, request)
        reason = check.reason
        if reason is None and kind.must_be_compared and request.kind == "auto":
            reason = check.unchecked
        if reason is not None:
            reasons[kind.name] = reason
            continue
        if request.kind not in ("auto", kind.name):
            named = CACHE_KINDS[request.kind].refuses(model)
            if named is not None:
                reasons[request.kind] = named
        if runs is model and packed is not None and not why_not_packed:
            why_not_packed = f"cache={kind.name!r} was not compared on packed weights"
        return ChosenCache(request, kind, check, reasons, runs, why_not_packed)
    doing = "with a tree of drafts" if request.tree else "with drafts" if request.drafts else "here"
    same = len(reasons) > 1 and len(set(reasons.values())) == 1
    why = f": {reason}" if same else f"; {'; '.join(_listed(reasons))}"
    raise Refused(f"{type(model).__name__} cannot be used {doing}{why}{_cause_in_modules(model)}")


def _check(model: Any, kind: CacheKind, request: CacheRequest, packed: Any = None) -> CacheCheck:
    if not request.self_check:
        return CacheCheck(reason=kind.refuses(model))
    from specdec_hf.runner.self_check import check_cache  # noqa: PLC0415  # once for a model

    return check_cache(
        model,
        kind,
        padded=request.padded,
        tree=request.tree,
        encoded=request.encoded,
        packed=packed,
    )


def check_kind(kind: str) -> None:
    """Raises ValueError for a name of no cache."""
    if kind not in ("auto", *(named.name for named in NAMED_KINDS)):
        *names, last = (repr(named.name) for named in NAMED_KINDS)
        raise ValueError(f"cache must be 'auto', {', '.join(names)} or {last}, got {kind!r}")


def _cause_in_modules(model: Any) -> str:
    """The end of a refusal: the modules whose outputs depend on what else a forward holds."""
    kinds = [type(m) for m in model.modules() if "quantized.dynamic" in type(m).__module__]
    if not kinds:
        return ""
    return (
        f". Its {len(kinds)} modules {kinds[0].__module__}.{kinds[0].__name__} quantise what they "
        "read by the range of a whole forward, so that the logits of a token depend on the tokens "
        "beside it: quantise the weights alone, or give drafter=None"
    )


def _listed(reasons: dict[str, str]) -> list[str]:
    return [f"cache={kind!r}: {reason}" for kind, reason in reasons.items()]


def has_exact_text(model: Any, chosen: ChosenCache | None, packed: PackedModel | None) -> bool:
    """Whether the text of a call cannot depend on how much is drafted."""
    if coarse_arithmetic(model) is None:
        return True
    if packed is None or chosen is None or chosen.model is not packed.model:
        return False
    if torch.is_autocast_enabled("cpu"):
        return False  # its products are torch's own then
    return packed.invariant and chosen.kind.has_slots
