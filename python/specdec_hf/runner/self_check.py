"""The self-check: does a model say the same through a cache of the loop as it says alone?

A model may read its positions from the cache's length, make a mask of its own, or keep a state, and
a cache that does not fit it gives wrong text without an error. So the first time a model class and
configuration is used with a cache, two short sequences of different lengths go through it as a call
would send them: prompt and drafts, a roll back by different numbers of drafts, another window, and
where trees are used a tree of which one path is kept. What the model says there is compared with a
forward of each whole sequence alone, without cache or padding. The check leaves no trace in a
model: its attributes, buffers, modes and the random state stay as they were.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from specdec_hf.arguments import is_integer
from specdec_hf.runner.cache_kinds import CacheKind
from specdec_hf.runner.comparison import CacheCheck, Comparison, checks_of, compare, tolerance_of
from specdec_hf.runner.forwards import FIRST, SINGLE, ForwardPolicy
from specdec_hf.runner.plain_runner import NoCacheRunner, PlainRunner
from specdec_hf.runner.protocol import (
    CacheRequest,
    Lengths,
    Prompt,
    context_length,
    is_encoder_decoder,
    to_device,
    vocab_size_of,
)

if TYPE_CHECKING:
    from specdec_hf.extras.encoded import Encoded

SHORT, PADDING = 3, 4  # tokens of the shorter prompt, and how many more the other has
PASSING = (torch.OutOfMemoryError, MemoryError)  # which say nothing about the model
# Hooks of these libraries make a model run at all; other hooks are the caller's.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")

changing = threading.RLock()  # held while a model is changed for its checks


def logits_alone(
    model: Any, tokens: torch.Tensor, encoded: Encoded | None = None, b: int = 0
) -> torch.Tensor:
    """Logits [n, V] of one sequence, read as plain ``generate`` reads a prompt, without a cache."""
    ids = tokens.numpy()[None]
    prompt = Prompt(ids, np.ones(ids.shape, dtype=bool))
    own = None if encoded is None else encoded.select([b])
    runner = NoCacheRunner(model, prompt=prompt, encoded=own)
    return runner.forward(tokens[None].to(model.device), np.array([0]), keep=len(tokens))[0].float()


class WindowError(Exception):
    """A model that has read a prompt cannot be fed several tokens at once."""


def logits_as_generated(
    model: Any,
    texts: list[torch.Tensor],
    padded: bool,
    encoded: Encoded | None,
    *,
    singly: bool = False,
) -> list[torch.Tensor]:
    """Logits [n, V] of each text that plain ``generate`` continues from a prompt, in one batch.

    Some models treat a prompt otherwise than what follows it, or drop from their own cache what a
    forward without one sees. Those that keep a state may read several tokens at once in another way
    than one after the other, as plain generation does, so ``singly`` feeds them that way.
    """
    sizes = (SHORT + PADDING, SHORT if padded else SHORT + PADDING)
    prompt = padded_prompt([text[:n] for text, n in zip(texts, sizes, strict=False)])
    rest = [text[n:] for text, n in zip(texts, sizes, strict=False)]
    width = prompt.mask.shape[1]
    ids = torch.from_numpy(prompt.input_ids)
    ids = torch.cat([ids, pad_sequence(rest, batch_first=True)], dim=1)
    runner = PlainRunner(model, len(texts), prompt=prompt, encoded=encoded)
    first = prompt.mask.sum(axis=1) - width
    rows = []
    last = ids.shape[1] - 1
    windows = [(0, width), (width, last), (last, last + 1)]
    if singly:
        windows[1:2] = [(i, i + 1) for i in range(width, last)]
    for start, end in (window for window in windows if window[0] < window[1]):
        fed = ids[:, start:end].to(model.device)
        try:
            rows.append(runner.forward(fed, first + start, keep=end - start))
        except Exception as error:
            if start == 0 or isinstance(error, PASSING):
                raise
            raise WindowError(one_line(error)) from error
    logits = torch.cat(rows, dim=1).float()
    return [logits[b, -n:][: len(texts[b])] for b, n in enumerate((last + 1 + first).tolist())]


def padded_prompt(texts: list[torch.Tensor]) -> Prompt:
    """Texts on the host, left-padded to one length."""
    width = max(len(text) for text in texts)
    ids = np.zeros((len(texts), width), dtype=np.int64)
    for b, text in enumerate(texts):
        ids[b, width - len(text) :] = text.numpy()
    lengths = np.array([[len(text)] for text in texts])
    return Prompt(ids, np.arange(width) >= width - lengths)


def one_line(error: Exception) -> str:
    """The type of an error and the first 120 characters of its message, for messages of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Run forwards that leave no trace in the model or in the random state.

    Two threads would restore each other's changes, so one of them waits.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    with changing, torch.random.fork_rng(devices=devices):
        kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
        try:
            for module, _, _ in kept:
                module.training = False
                module._forward_hooks = _library_hooks(module._forward_hooks)
                module._forward_pre_hooks = _library_hooks(module._forward_pre_hooks)
            yield
        finally:
            for module, attributes, buffers in kept:
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _library_hooks(hooks: Any) -> Any:
    homes = {
        n: getattr(hook, "__module__", None) or type(hook).__module__ for n, hook in hooks.items()
    }
    return type(hooks)((n, hooks[n]) for n in hooks if homes[n].split(".")[0] in _LIBRARIES)


LARGEST_WINDOW = 192  # tokens; the self-check passes the end of sliding windows up to this size
_LONG, _DRAFTS = 7, 3
# Parents of the nodes of the checked tree. Of its two paths, the kept one is numbered last.
_PARENTS, _PATH = (-1, -1, 0, 1), (1, 3)
_KEPT_OF_TREE = [0, *(1 + node for node in _PATH)]  # columns, that of the root first
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")

# Sequence, position and logits [V] of a kept token.
Row = tuple[int, int, torch.Tensor]
# Tokens [B, n] that are fed, from which places [B] on, the ends [B] of what is kept, and whether
# they are a tree.
_Window = tuple[torch.Tensor, Lengths, Lengths, bool]


class CheckPlan:
    """The tokens of the self-check, and in which steps they go through a cache.

    Args:
        model: that of the cache.
        num_sequences: 1 or 2.
        padded: whether the sequences differ in length.
        tree: whether a tree is fed.
        number: plans of other numbers have other tokens at other positions.
    """

    def __init__(
        self, model: Any, num_sequences: int, padded: bool, tree: bool, number: int = 0
    ) -> None:
        self.model, self.padded, self.tree = model, padded, tree
        windows = sorted(_attention_windows(model))
        prompt, self.remark = _LONG + number, None
        for window in windows:
            if window <= LARGEST_WINDOW:
                prompt = max(prompt, window + 2 + number)
            else:
                self.remark = f"attention beyond a window of {window} tokens is not covered"
        self.context = context_length(model)
        extra = 2 * _DRAFTS + len(_PARENTS) + 3
        if self.context is not None:
            prompt = min(prompt, self.context - extra)
        self.too_short = prompt < SHORT
        lengths = [prompt, SHORT if padded else prompt]
        self.prompts: Lengths = np.array(lengths[:num_sequences], dtype=np.int64)
        self.capacity = max(prompt, _LONG) + extra
        # In the first window the first sequence keeps all drafts and the second keeps one; in the
        # second window the first keeps none and the second keeps all.
        self.kept = (
            np.array([_DRAFTS, 1][:num_sequences]), np.array([0, _DRAFTS][:num_sequences])
        )  # fmt: skip
        draw = torch.Generator("cpu").manual_seed(7 + number)
        ids = _ordinary_ids(model)
        shape = (num_sequences, prompt + 3 * extra)
        self._ids = ids[torch.randint(len(ids), shape, generator=draw, device="cpu")]
        self._next = prompt
        self.texts = [self._ids[b, :n] for b, n in enumerate(self.prompts)]  # whole, in the end
        self._windows: list[_Window] = []
        self._write()

    def _write(self) -> None:
        """The windows, and the whole text of each sequence."""
        before = torch.from_numpy(padded_prompt(self.texts).input_ids)
        one = np.ones_like(self.prompts)  # the pending token
        tree = [(len(_PARENTS) + 1, None)] if self.tree else []
        for size, kept in (
            (_DRAFTS, self.kept[0]), (_DRAFTS + 1, self.kept[1] + one), (_DRAFTS + 1, one),
            *tree, (1, one),
        ):  # fmt: skip
            self._next += size
            window = self._ids[:, self._next - size : self._next]  # tokens that were not used yet
            starts = np.array([len(text) for text in self.texts]) - before.shape[1]
            for b, text in enumerate(self.texts):
                columns = _KEPT_OF_TREE if kept is None else slice(int(kept[b]))
                self.texts[b] = torch.cat([text, window[b, columns]])
            ends = np.array([len(text) for text in self.texts])
            fed = torch.cat([before, window], dim=1)
            self._windows.append((fed, starts, ends, kept is None))
            before = before[:, :0]

    @property
    def fed(self) -> torch.Tensor:
        """All tokens [n] that the cache is fed with, those of rejected drafts included."""
        return self._ids[:, : self._next].flatten()

    def run(self, runner: Any) -> list[Row]:
        """Sequence, position and logits [V] of each row that the runner gave for a kept token.

        A `SpecRunner` must not read prompts one by one: their padding is to be checked.
        """
        rows = list[Row]()
        device = self.model.device
        for tokens, starts, ends, is_tree in self._windows:
            if is_tree:
                parents = torch.tensor(_PARENTS, device=device).expand(len(starts), -1)
                logits = runner.forward_tree(tokens.to(device), starts, parents)
                path = torch.tensor(_PATH, device=device).expand(len(starts), -1)
                runner.compact(to_device(starts + 1, device), path)
                logits, first = logits[:, _KEPT_OF_TREE], starts
            else:
                keep = min(tokens.shape[1], _DRAFTS + 1)
                logits = runner.forward(tokens.to(device), starts, keep)
                first = starts + tokens.shape[1] - keep
            runner.truncate(ends)
            rows += [
                (b, i, logits[b, i - int(first[b])].float())
                for b, end in enumerate(ends.tolist())
                for i in range(int(first[b]), end)
            ]
        return rows


def _attention_windows(model: Any) -> set[int]:
    """Sizes of the local attention windows that a config names."""
    config, sizes = model.config.get_text_config(decoder=True), set[int]()
    for name in _WINDOW_NAMES:
        if name == "attention_window" and is_encoder_decoder(model):
            continue  # that of the encoder
        value = getattr(config, name, None)
        for size in value if isinstance(value, list | tuple) else [value]:
            if is_integer(size) and size > 0:
                sizes.add(size)
    return sizes


def _ordinary_ids(model: Any) -> torch.Tensor:
    """The ids of the vocabulary that the config does not name, such as image tokens."""
    special = set(_named_ids(model.config.to_dict()))
    ids = [i for i in range(min(vocab_size_of(model), 4096)) if i not in special]
    return torch.tensor(ids or [0], device="cpu")


def _named_ids(value: Any, name: str = "") -> Iterator[int]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else ((name, inner) for inner in value)
        for key, inner in items:
            yield from _named_ids(inner, str(key))
    elif isinstance(value, int) and ("token" in name or name.endswith("_id")):
        yield value


# The loop itself names logits that are not finite.
_NOT_FINITE = "the model's logits are not finite or all equal"
DIFFERENT = "its logits differ from the model's own"


def check_cache(
    model: Any,
    kind: CacheKind,
    *,
    padded: bool = True,
    tree: bool = False,
    encoded: Encoded | None = None,
    packed: Any = None,
) -> CacheCheck:
    """Compare a model, `undisturbed`, with itself through a cache; the result is remembered.

    Args:
        model, kind: the model and the kind of its cache.
        padded: whether sequences will be padded, as those of a batch are. The check then takes two
            of different lengths. The decoders of an encoder-decoder begin alike, so that those of a
            batch may differ in length after the first round only.
        tree: whether a tree is checked too, which only "spec" takes.
        encoded: what the decoder of an encoder-decoder reads of its encoder. Its first two
            sequences serve the check.
        packed: the `PackedModel` that runs over the cache in the model's place, or None. Where its
            weights are rounded, it is compared with the model on the same panels, so that these are
            not checked, and else with the model.

    Raises:
        torch.OutOfMemoryError, MemoryError: no memory for the check; the next call checks again.
    """
    reason = kind.refuses(model)
    if reason is not None or not kind.is_compared:
        return CacheCheck(reason=reason)
    num_sequences, names = 1 + padded, tuple[str, ...]()
    if encoded is not None:
        names = tuple(sorted(encoded.inputs))
        if not kind.runs_separately:
            num_sequences = 2  # even without padding
        encoded = encoded.select([b % encoded.batch_size for b in range(num_sequences)])
    rounded = packed is not None and packed.rounded
    key = (kind.name, padded, tree, names, packed is not None, rounded)
    with changing:
        known = checks_of(model)
        check = known.get(key)
        if check is None:
            with undisturbed(model), torch.inference_mode():
                plan = CheckPlan(model, num_sequences, padded, tree)
                own = packed.unfused(model) if rounded else model
                runs = own if packed is None else packed.model
                check = _measure(own, runs, kind, plan, encoded)
            if check.difference is not None or check.reason is not None:
                known[key] = check
    return check


def _measure(
    model: Any, runs: Any, kind: CacheKind, plan: CheckPlan, encoded: Encoded | None
) -> CacheCheck:
    if plan.too_short:
        return CacheCheck(unchecked=f"the model's context holds {plan.context} tokens")
    try:
        generated = own = logits_as_generated(
            model, plan.texts, plan.padded, encoded, singly=kind.reads_singly
        )
        if not kind.runs_separately:
            own = [logits_alone(model, text, encoded, b) for b, text in enumerate(plan.texts)]
    except WindowError as error:
        return CacheCheck(reason=f"its forward raised {error}")
    except PASSING:
        raise
    except Exception as error:
        return CacheCheck(unchecked=f"a forward on text alone raised {one_line(error)}")
    finite = all(bool(rows.isfinite().all()) for rows in (*own, *generated))
    if not finite or min(float(rows.std(dim=-1).min()) for rows in own) == 0:
        return CacheCheck(remark=_NOT_FINITE)
    prompt = None
    if kind.runs_separately:
        prompt = padded_prompt([text[:n] for text, n in zip(plan.texts, plan.prompts, strict=True)])
    request = CacheRequest(len(plan.prompts), prompt=prompt, encoded=encoded)
    omits_mask = frozenset[str]() if plan.padded else frozenset((FIRST, SINGLE))
    policy = ForwardPolicy(omits_mask=omits_mask, one_by_one=False)
    try:
        runner = kind.make(runs, plan.capacity, request, policy=policy)
        rows = plan.run(runner)
    except PASSING:
        raise
    except Exception as error:
        return CacheCheck(reason=f"its forward raised {one_line(error)}")
    # A sequence must say the same alone, with padding, and as the continuation of a prompt.
    rows += [(b, i, row) for b, text in enumerate(generated) for i, row in enumerate(text)]
    for b, position, row in rows:
        if row.shape != own[b][position].shape:
            shapes = f"{list(row.shape)}, not {list(own[b][0].shape)}"
            return CacheCheck(reason=f"its logits are {shapes}")
    found = compare_rows(model, rows, own)
    if math.isinf(found.difference) and not logits_alone(model, plan.fed, encoded).isfinite().all():
        return CacheCheck(remark=_NOT_FINITE)  # a rejected draft did that, not the cache
    reason = None if found.fault is None else f"{DIFFERENT} {found.fault}"
    omitted = frozenset(runner.omitted)
    return CacheCheck(found.difference, found.tolerance, reason, None, plan.remark, omitted)


def compare_rows(model: Any, rows: Sequence[Row], own: Sequence[torch.Tensor]) -> Comparison:
    """Compare rows of logits with those of the texts ``own`` [n, V]."""
    wanted = (own[b][position] for b, position, _ in rows)
    return compare((row for *_, row in rows), wanted, tolerance_of(model))
