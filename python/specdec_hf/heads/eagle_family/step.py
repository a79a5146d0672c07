"""The part of a head that runs at each draft step, and its compiled form.

A graph takes weights, buffers, widths and the number of slots as inputs, so all heads of the same
sizes share the graphs of a process. A head needs two for one sequence and two for a batch: for one
pair and for several.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from specdec_hf.heads.eagle_family.cache import HeadCache
from specdec_hf.heads.eagle_family.head import PairHead
from specdec_hf.heads.eagle_family.layer import HeadLayer
from specdec_hf.runner.comparison import compare, tolerance_of
from specdec_hf.runner.forwards import is_long
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.module_copy import copied
from specdec_hf.runner.packed.blocks import rounded_linear, rounded_to_int8
from specdec_hf.runner.packed.linear import LinearWithPackedCopy, bytes_of, unpacked_reason
from specdec_hf.runner.packed.model import PackedStats, check_packable, resident_bytes
from specdec_kernels import PackedLinear, kv_append_, pack_linear


class PairStep(nn.Module):
    """A forward of a `PairHead` over the keys and values of earlier pairs.

    All its products are those of linear layers, also that with the output matrix, so that all of
    them can be packed. It shares the head's weights.

    Args:
        head: in the dtype and on the device that it drafts in.
    """

    def __init__(self, head: PairHead) -> None:
        super().__init__()
        self.fc, self.norm = head.fc, head.norm
        self.midlayer: Any = head.midlayer
        rows, size = head.lm_head.shape
        self.output = nn.Linear(size, rows, bias=False, device="meta")
        self.output.weight = nn.Parameter(head.lm_head, requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """The head's."""
        dtype: torch.dtype = self.output.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The head's."""
        device: torch.device = self.output.weight.device
        return device

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`states` of n pairs, and their logits [B, n, draft_vocab_size]."""
        hidden = self.states(**inputs)
        return hidden, self.logits(hidden)

    def states(
        self,
        *,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        places: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        mask: torch.Tensor | None,
        visible: int | None = None,
    ) -> torch.Tensor:
        """The hidden states [B, n, H] of n pairs, whose keys and values are written.

        Args:
            embeddings: [B, n, H] of their tokens.
            hidden: [B, n, H].
            places: [B, n] int64, for the rotary embedding.
            cosines, sines: [P, D], those of place p in row p.
            keys, values: buffers [B, K, S, D], changed in place.
            starts: [B] int64, slot of the first pair.
            mask: [B, n, visible] bool, which slots each pair sees; None lets several pairs see
                those up to their own, and a single one all.
            visible: slots that the pairs see; only given without a mask.
        """
        angles = cosines[places], sines[places]
        if not isinstance(self.midlayer, HeadLayer):  # a `FusedLayer`
            pairs, caches = torch.cat([embeddings, hidden], dim=-1), (keys, values)
            states: torch.Tensor = self.midlayer.run(pairs, angles, caches, starts, mask, visible)
            return states
        rotary = angles[0][:, None], angles[1][:, None]
        q, k, v, residual = self.midlayer.project(embeddings, hidden, rotary)
        kv_append_([keys, values], [k, v], starts)
        slots = visible if mask is None else mask.shape[2]
        attended = attend(q, keys[:, :, :slots], values[:, :, :slots], mask)
        out: torch.Tensor = self.midlayer.finish(residual, attended)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft_vocab_size] from hidden states [..., H]."""
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention [B, H, n, D] of queries whose heads share keys [B, K, S, D]."""
    attention = functional.scaled_dot_product_attention
    out: torch.Tensor
    if mask is None and q.shape[2] > 1:
        out = attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out
    # The queries that share a key are fed as more places of one head, so that it is read once.
    share = q.shape[1] // keys.shape[1]
    together = q.unflatten(1, (-1, share)).flatten(2, 3)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, share, 1)
    out = attention(together, keys, values, attn_mask=mask).unflatten(2, (share, -1))
    return out.flatten(1, 2)


PAIRS = (1, 5)  # of a sequence: each has a graph
SLOTS = 12  # that the compared pairs see


def takes(pairs: int, slots: int) -> bool:
    """Whether a step of so many pairs of each sequence runs compiled."""
    return not is_long(pairs) and slots > 1


class PackedStep:
    """A `PairStep` on packed weights.

    Args:
        head: whose weights no longer change.
        rounded: whether they are rounded to 8 bits, where `rounded_to_int8` takes them.
        fused: whether its layer runs in one op, where it can.

    Attributes:
        packed: the step on packed weights, without a graph.
        eager: what drafts where graphs do not: ``packed``, or the step on the head's own weights
            where logits of ``packed`` were found to be wrong.
    """

    def __init__(self, head: PairHead, *, rounded: bool, fused: bool) -> None:
        self.rounded, self.fused = rounded, fused
        self.packed: Any = copied(PairStep(head), self._replace)
        self.eager = self.packed
        self._compared = False
        self._lock = threading.RLock()

    def _replace(self, module: Any) -> Any:
        if self.fused and isinstance(module, HeadLayer):
            from specdec_hf.heads.eagle_family import fused_layer  # noqa: PLC0415  # on a CPU

            norms = module.norms_of_parts()
            return None if norms is None else fused_layer.FusedLayer(module, norms, self._pack)
        if unpacked_reason(module) is not None:
            return None
        stored = rounded_to_int8 if self.rounded else None
        return LinearWithPackedCopy(module, stored, apart=self.rounded)

    def _pack(self, weight: torch.Tensor) -> PackedLinear:
        return (rounded_to_int8(weight) if self.rounded else None) or pack_linear(weight)

    @property
    def weights(self) -> list[PackedLinear]:
        """All that are packed."""
        layers = [m for m in self.packed.modules() if isinstance(m, LinearWithPackedCopy)]
        return [layer.packed_weight for layer in layers] + getattr(
            self.packed.midlayer, "weights", []
        )

    def _own(self, head: PairHead) -> PairStep:
        """The head's own step, on the weights that `packed` multiplies by."""
        if not self.rounded:
            return PairStep(head)
        return cast("PairStep", copied(PairStep(head), rounded_linear))

    def compare(self, head: PairHead) -> str | None:
        """Compare logits of `packed` with the head's own; gives the reason of a first failure."""
        with self._lock, torch.inference_mode():
            if self._compared:
                return None
            self._compared = True
            if (reason := difference_of(self.packed, self._own(head), 1)) is None:
                return None
            self.eager = PairStep(head)
            return f"on packed weights {reason}"


def difference_of(
    step: Any, own: PairStep, batch_size: int, seed: int = 0, cache: HeadCache | None = None
) -> str | None:
    """How logits of a step differ from those of the head's own, or None.

    Args:
        step: what is compared.
        own: the head's own step.
        batch_size: number of sequences.
        seed: of the inputs.
        cache: gives the step its buffers.
    """
    tolerance = tolerance_of(own)
    for pairs in PAIRS:
        inputs = inputs_of(own, batch_size, pairs, seed)
        if cache is not None:
            for name, kept in zip(("keys", "values"), cache.buffers(0), strict=True):
                inputs[name] = kept.zero_()
                kept[:, :, : 2 * SLOTS] = inputs_of(own, batch_size, pairs, seed)[name]
        _, got = step(**inputs)
        _, want = own(**inputs_of(own, batch_size, pairs, seed))
        if fault := compare([got], [want], tolerance).fault:
            return f"its logits differ from the head's own {fault}"
    return None


def packed_step(
    head: PairHead, *, rounded: bool, check: bool, note: Callable[[str], None]
) -> tuple[Any, PackedStats]:
    """The step of a head on packed weights, or on its own where that is not possible.

    Args:
        head: on a CPU, whose weights no longer change.
        rounded: as in `PackedStep`.
        check: whether the first use of a head compares logits with its own.
        note: told why the head drafts on its own weights.
    """
    record, started = record_of(head), time.perf_counter()
    known = rounded in record.packed
    try:
        if not known:
            check_packable(PairStep(head))
    except ValueError as error:
        note(f"the head drafts on unpacked weights: {error}")
        return PairStep(head), PackedStats(reason=str(error))
    if not known:
        with torch.inference_mode(False), torch.no_grad():
            record.packed[rounded] = PackedStep(head, rounded=rounded, fused=True)
    made: PackedStep = record.packed[rounded]
    if check and (reason := made.compare(head)) is not None:
        note(f"the head drafts on unpacked weights: {reason}")
    weights = made.weights
    return made.eager, PackedStats(
        layers=len(weights),
        blocks=sum(weight.panels.dtype == torch.uint8 for weight in weights),
        bytes=bytes_of(weights),
        resident_bytes=resident_bytes(),
        seconds=0.0 if known else time.perf_counter() - started,
        reason="" if made.eager is made.packed else "its logits on packed weights differ",
    )


def inputs_of(step: PairStep, batch_size: int, pairs: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of `PairStep.states` for pairs after a few others, the same for the same seed."""
    layer, device, slots = step.midlayer, step.device, SLOTS - seed
    generator = torch.Generator("cpu").manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, step.dtype)

    starts = torch.arange(batch_size, device=device) + slots - pairs - batch_size
    places = starts[:, None] + torch.arange(pairs, device=device)
    kept = (batch_size, layer.projected[1] // layer.head_dim, 2 * SLOTS, layer.head_dim)
    inputs: dict[str, Any] = {
        "embeddings": noise(batch_size, pairs, step.output.in_features),
        "hidden": noise(batch_size, pairs, step.output.in_features),
        "places": places,
        "starts": starts,
        "mask": torch.arange(slots, device=device) <= places[:, :, None],
    }
    # These are made outside of inference mode in calls too, which a graph is sensitive to.
    with torch.inference_mode(False):
        angles = torch.linspace(0, 1, 64 * layer.head_dim, device=device).view(64, -1)
        inputs["cosines"] = angles.cos().to(step.dtype)
        inputs["sines"] = angles.sin().to(step.dtype)
        inputs["keys"], inputs["values"] = noise(*kept), noise(*kept)
    return inputs
