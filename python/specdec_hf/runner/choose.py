"""The choice of a cache: the first that fits the model, as the self-check measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import Cache

from specdec_hf.arguments import Refused
from specdec_hf.runner.encoded import Encoded, is_encoder_decoder
from specdec_hf.runner.fit import Fit
from specdec_hf.runner.make import ROLLBACK_KINDS, kind_reason, make_runner
from specdec_hf.runner.plain_runner import Prompt
from specdec_hf.runner.policy import ForwardPolicy
from specdec_hf.runner.protocol import Runner, keeps_cache
from specdec_hf.runner.self_check import check_fit

# Where nothing could be measured, these may not fit: "spec" is not Transformers' own, and a state
# may depend on how many tokens are read at once.
MEASURED = ("spec", "snapshot")


def choose_runner(
    model: Any,
    batch_size: int,
    capacity: int,
    kind: str | ChosenKind = "auto",
    *,
    drafts: bool = True,
    tree: bool = False,
    self_check: bool = True,
    prompt: Prompt | None = None,
    inputs: dict[str, Any] | None = None,
    past: Cache | None = None,
    encoded: Encoded | None = None,
    twin: Any = None,
) -> tuple[Runner, list[str]]:
    """A runner whose empty cache fits a model, and notes for the statistics.

    Args:
        model: the model whose forward will fill the cache.
        batch_size: number of sequences B.
        capacity: slots to allocate at first.
        kind: "auto", "spec", "aligned" or "dynamic". "auto" takes the first of them that fits,
            "snapshot" for models that keep a state, or the model's own cache without roll back
            where nothing is drafted. Or what `choose_kind` has chosen.
        drafts: whether tokens will have to be forgotten.
        tree: whether trees of drafts will be fed, which only "spec" can.
        self_check: False trusts what is known of the model without running it.
        prompt, inputs, past, encoded: as in `make_runner`.
        twin: as in `choose_kind`, which has seen it where ``kind`` is chosen.

    Raises:
        ValueError: an unknown kind, or no cache fits; the message names class, cache and reason.
    """
    chosen = kind
    if isinstance(chosen, str):
        chosen = choose_kind(
            model, batch_size, chosen, drafts=drafts, tree=tree, self_check=self_check,
            prompt=prompt, has_inputs=bool(inputs), encoded=encoded, twin=twin,
        )  # fmt: skip
    runner = make_runner(
        chosen.runs, batch_size, capacity, chosen.kind, prompt=prompt, inputs=inputs, past=past,
        encoded=encoded, policy=ForwardPolicy(omits_mask=chosen.fit.omitted),
    )  # fmt: skip
    return runner, chosen.notes(model)


@dataclass(frozen=True)
class ChosenKind:
    """A kind of cache that fits a model.

    Attributes:
        kind: as in `make_runner`.
        fit: what is known of it.
        refused: by kind, why those before it do not fit.
        runs: what fills the cache: the model, or its packed twin.
        unlike: how the packed twin differs from the model, empty where it runs or there is none.
    """

    kind: str
    fit: Fit
    refused: dict[str, str]
    runs: Any
    unlike: str = ""

    def notes(self, model: Any) -> list[str]:
        """Remarks for the statistics of a call with the model."""
        name = type(model).__name__
        notes = [f"{name} runs with cache={self.kind!r}; {r}" for r in _reasons(self.refused)]
        if self.fit.not_measured is not None:
            notes.append(f"cache={self.kind!r} was not checked: {self.fit.not_measured}")
        elif self.fit.remark is not None:
            notes.append(f"cache={self.kind!r}: {self.fit.remark}")
        return notes


def choose_kind(
    model: Any,
    batch_size: int,
    kind: str = "auto",
    *,
    drafts: bool = True,
    tree: bool = False,
    self_check: bool = True,
    prompt: Prompt | None = None,
    has_inputs: bool = False,
    encoded: Encoded | None = None,
    twin: Any = None,
) -> ChosenKind:
    """The kind of the cache that `choose_runner` makes; the arguments and errors are those of it.

    ``has_inputs`` says whether ``inputs`` will be given there. ``twin`` runs in the model's place
    where its logits over the cache are the model's own, or nothing is to be compared.
    """
    check_kind(kind)
    # The decoders of an encoder-decoder begin with the same number of tokens.
    alike = encoded is not None and (prompt is None or bool(prompt.mask.all()))
    padded = not alike and (batch_size > 1 or (prompt is not None and not bool(prompt.mask.all())))
    refused: dict[str, str] = {}
    unlike = ""
    for candidate in _candidates(model, batch_size, kind, drafts, tree, has_inputs):
        checked = self_check and not has_inputs
        runs, options = model, {"padded": padded, "tree": tree, "encoded": encoded}
        if twin is not None and candidate != "plain" and not has_inputs:
            fit = _fit(model, candidate, checked, twin=twin, **options)
            if fit.reason is None and (fit.difference is not None or not checked):
                runs, unlike = twin, ""
            else:
                unlike = f"packed weights differ: {fit.reason or fit.unchecked or fit.remark}"
        if runs is model:
            fit = _fit(model, candidate, checked, **options)
        reason = fit.reason or (fit.unchecked if candidate in MEASURED and kind == "auto" else None)
        if reason is not None:
            refused[candidate] = reason
            continue
        asked = kind_reason(model, kind) if kind not in ("auto", candidate) else None
        if asked is not None:
            refused[kind] = asked
        if runs is model and twin is not None and not unlike:
            unlike = f"cache={candidate!r} was not compared on packed weights"
        return ChosenKind(candidate, fit, refused, runs, unlike)
    doing = "with a tree of drafts" if tree else "with drafts" if drafts else "here"
    cause = _cause_in_modules(model)
    if len(refused) > 1 and len(set(refused.values())) == 1:
        raise Refused(f"{type(model).__name__} cannot be used {doing}: {reason}{cause}")
    raise Refused(
        f"{type(model).__name__} cannot be used {doing}; {'; '.join(_reasons(refused))}{cause}"
    )


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


def check_kind(kind: str) -> None:
    """Raises ValueError for a name of no cache."""
    if kind not in ("auto", *ROLLBACK_KINDS):
        raise ValueError(f"cache must be 'auto', 'spec', 'aligned' or 'dynamic', got {kind!r}")


def _reasons(refused: dict[str, str]) -> list[str]:
    return [f"cache={kind!r}: {reason}" for kind, reason in refused.items()]


def _candidates(
    model: Any, batch_size: int, kind: str, drafts: bool, tree: bool, has_inputs: bool
) -> list[str]:
    """The kinds to try, in order."""
    if tree:
        return ["spec"]
    if not drafts:
        if has_inputs or not keeps_cache(model):
            return ["plain"]
        if kind == "auto":
            return ["plain"] if is_encoder_decoder(model) else ["spec", "plain"]
        return [kind, "plain"]
    if not keeps_cache(model):
        return ["none"]
    if kind == "auto" and model._is_stateful and not is_encoder_decoder(model):
        return ["snapshot"]
    without_spec = has_inputs or (kind == "auto" and is_encoder_decoder(model))
    return [one for one in rollback_kinds(kind, batch_size) if one != "spec" or not without_spec]


def rollback_kinds(kind: str, batch_size: int) -> list[str]:
    """The kinds that an argument ``cache`` allows for drafts, in the order of trying them."""
    if kind != "auto":
        return [kind]
    return [one for one in ROLLBACK_KINDS if one != "aligned" or batch_size > 1]


def _fit(model: Any, kind: str, self_check: bool, **options: Any) -> Fit:
    if self_check:
        return check_fit(model, kind, **options)
    return Fit(reason=kind_reason(model, kind))
