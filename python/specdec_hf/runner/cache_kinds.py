"""The kinds of caches, in the order of trying them: which model each refuses, and its runners."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import Cache

from specdec_hf.runner.forwards import AS_THE_MODEL, ForwardPolicy
from specdec_hf.runner.plain_runner import NoCacheRunner, PlainRunner
from specdec_hf.runner.protocol import CacheRequest, Runner, is_encoder_decoder, keeps_cache
from specdec_hf.runner.spec_runner import SpecRunner, unsupported_reason


class CacheKind:
    """A kind of cache; `CACHE_KINDS` has one object of each.

    Attributes:
        name: what statistics and messages call it.
        has_slots: as in `Runner`.
        runs_separately: whether the sequences of a batch run one after the other.
        is_compared: whether it can differ from what plain generation runs.
        must_be_compared: whether "auto" takes it only where the self-check could compare it.
        min_batch_size: the fewest sequences for which "auto" tries it.
        reads_singly: whether the self-check reads new tokens as plain generation does, one by one.
    """

    name: str
    has_slots = False
    runs_separately = False
    is_compared = True
    must_be_compared = False
    min_batch_size = 1
    reads_singly = False

    def refuses(self, model: Any) -> str | None:
        """Why a model cannot use it, or None; `check_cache` measures the rest."""
        # A wrapper has the method of the model that it forwards to.
        if getattr(model._sample, "__func__", None) is not GenerationMixin._sample:
            return "it generates with a loop of its own"
        return None

    def runner_class(self) -> type[PlainRunner]:
        """The class of its runners."""
        raise NotImplementedError

    def make(
        self, model: Any, capacity: int, request: CacheRequest, past: Cache | None = None,
        policy: ForwardPolicy = AS_THE_MODEL,
    ) -> Runner:  # fmt: skip
        """A runner with an empty cache, or over ``past``, the first columns of the prompt.

        Where sequences run separately, only one has a past, and "spec" takes none. The capacity is
        the slots that a `SpecRunner` allocates at first, and the policy is its own.
        """
        runner, prompt, encoded = self.runner_class(), request.prompt, request.encoded
        if request.batch_size == 1 or not self.runs_separately:
            return runner(model, request.batch_size, prompt=prompt, past=past, encoded=encoded)
        from specdec_hf.extras.rollback_runner import SeparateRunner  # noqa: PLC0415  # rare

        padded = prompt is not None and not bool(prompt.mask.all())
        runners = []
        for b in range(request.batch_size):
            own, read = prompt and prompt.of_sequence(b), encoded and encoded.select([b])
            runners.append(runner(model, prompt=own, keep_mask=padded, encoded=read))
        return SeparateRunner(runners)


class _RollbackKind(CacheKind):
    """Kinds that forget rejected drafts without a state."""

    takes_cache = True

    def refuses(self, model: Any) -> str | None:
        reason, takes_cache = super().refuses(model), keeps_cache(model)
        if reason is not None:
            return reason
        if model._is_stateful:
            return "it keeps a state that cannot be rolled back to before a rejected draft"
        if takes_cache and not model._supports_default_dynamic_cache():
            return "it keeps a cache of its own kind, which cannot be rolled back"
        config = model.config.get_text_config(decoder=True)
        if "reference_sliding_attention" in (getattr(config, "layer_types", None) or ()):
            # The first forward fixes which tokens its layers keep for good; no roll back undoes it.
            return "its cache takes drafts of the first window for a part of the prompt"
        if takes_cache != self.takes_cache:
            return "its forward takes " + ("a cache" if takes_cache else "no cache")
        return None


class SpecKind(_RollbackKind):
    """A static cache of ours, in which each sequence has slots of its own."""

    name = "spec"
    has_slots = True
    must_be_compared = True  # it is not Transformers' own

    def refuses(self, model: Any) -> str | None:
        reason = super().refuses(model)
        if reason is not None:
            return reason
        if is_encoder_decoder(model):
            return "its decoder also caches the keys of cross-attention, which this cache lacks"
        # Its config may name a window that the self-check does not reach.
        if model.config.get_text_config(decoder=True).model_type == "gpt_neo":
            return "its local attention counts from the cache's length"
        return unsupported_reason(model)

    def make(
        self, model: Any, capacity: int, request: CacheRequest, past: Cache | None = None,
        policy: ForwardPolicy = AS_THE_MODEL,
    ) -> Runner:  # fmt: skip
        return SpecRunner(model, request.batch_size, capacity, policy)


class AlignedKind(_RollbackKind):
    """A cache of Transformers that all sequences share, which are moved to end in one column."""

    name = "aligned"
    min_batch_size = 2

    def runner_class(self) -> type[PlainRunner]:
        from specdec_hf.extras.rollback_runner import AlignedRunner  # noqa: PLC0415  # rare

        return AlignedRunner


class DynamicKind(_RollbackKind):
    """A cache of Transformers for each sequence."""

    name = "dynamic"
    runs_separately = True

    def runner_class(self) -> type[PlainRunner]:
        from specdec_hf.extras.rollback_runner import DynamicRunner  # noqa: PLC0415  # rare

        return DynamicRunner


class SnapshotKind(CacheKind):
    """A state of each sequence, which is copied before each window."""

    name = "snapshot"
    runs_separately = True
    must_be_compared = True  # a state may depend on how many tokens are read at once
    reads_singly = True

    def refuses(self, model: Any) -> str | None:
        return super().refuses(model) or (None if model._is_stateful else "it keeps no state")

    def runner_class(self) -> type[PlainRunner]:
        from specdec_hf.extras.state_runner import StateRunner  # noqa: PLC0415  # rarely used

        return StateRunner


class PlainKind(CacheKind):
    """Whatever the model keeps, never rolled back."""

    name = "plain"
    is_compared = False

    def runner_class(self) -> type[PlainRunner]:
        return PlainRunner


class NoCacheKind(_RollbackKind):
    """No cache: each forward reads the whole sequence again."""

    name = "none"
    runs_separately = True
    takes_cache = False

    def runner_class(self) -> type[PlainRunner]:
        return NoCacheRunner


NAMED_KINDS = (SpecKind(), AlignedKind(), DynamicKind())  # those that ``cache`` may name
SPEC, SNAPSHOT, PLAIN, NO_CACHE = NAMED_KINDS[0], SnapshotKind(), PlainKind(), NoCacheKind()
# In the order of trying them.
CACHE_KINDS: dict[str, CacheKind] = {
    kind.name: kind for kind in (*NAMED_KINDS, SNAPSHOT, PLAIN, NO_CACHE)
}


def rollback_kinds(request: CacheRequest) -> list[CacheKind]:
    """Those of `NAMED_KINDS` that a request allows."""
    if request.kind != "auto":
        return [CACHE_KINDS[request.kind]]
    return [kind for kind in NAMED_KINDS if request.batch_size >= kind.min_batch_size]


def kinds_to_try(model: Any, request: CacheRequest) -> list[CacheKind]:
    """The kinds that may serve a request, in the order of trying them."""
    if request.tree:
        return [SPEC]
    if not keeps_cache(model):
        return [NO_CACHE if request.drafts else PLAIN]
    kinds, auto = rollback_kinds(request), request.kind == "auto"
    if auto and is_encoder_decoder(model):
        kinds.remove(SPEC)
    elif auto and model._is_stateful and request.drafts:
        return [SNAPSHOT]
    if request.drafts:
        return kinds
    return [*(kind for kind in kinds if kind is SPEC or not auto), PLAIN]
