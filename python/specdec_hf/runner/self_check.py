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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specdec_hf.arguments import is_integer
from specdec_hf.runner.encoded import Encoded, is_encoder_decoder
from specdec_hf.runner.fit import Comparison, Fit, compare, fits_of, tolerance_of
from specdec_hf.runner.make import kind_reason, make_runner
from specdec_hf.runner.plain_runner import PlainRunner, Prompt
from specdec_hf.runner.policy import FIRST, SINGLE, ForwardPolicy
from specdec_hf.runner.protocol import Lengths, context_length, to_device, vocab_size_of
from specdec_hf.runner.spec_runner import SpecRunner

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
    runner = PlainRunner(model, 1, "none", prompt=prompt, encoded=own)
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
    prompts = [text[:n] for text, n in zip(texts, sizes, strict=False)]
    prompt = padded_prompt(prompts)
    width = prompt.mask.shape[1]
    rest = max(len(text) - len(start) for text, start in zip(texts, prompts, strict=True))
    ids = torch.zeros(len(texts), width + rest, dtype=torch.int64, device="cpu")
    ids[:, :width] = torch.from_numpy(prompt.input_ids)
    for b, text in enumerate(texts):
        follows = text[len(prompts[b]) :]
        ids[b, width : width + len(follows)] = follows
    runner = PlainRunner(model, len(texts), "plain", prompt=prompt, encoded=encoded)
    first = np.array([len(start) - width for start in prompts])
    rows = []
    last = width + rest - 1
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
    return [logits[b, -n:][: len(texts[b])] for b, n in enumerate((width + rest + first).tolist())]


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
    with changing:
        yield from _undisturbed(model)


def _undisturbed(model: Any) -> Iterator[None]:
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
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
    kept = type(hooks)()
    for number, hook in hooks.items():
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.split(".")[0] in _LIBRARIES:
            kept[number] = hook
    return kept


LARGEST_WINDOW = 192  # tokens; the self-check passes the end of sliding windows up to this size
_LONG, _DRAFTS = 7, 3
# Parents of the nodes of the checked tree. Of its two paths, the kept one is numbered last.
_PARENTS, _PATH = (-1, -1, 0, 1), (1, 3)
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")

# Sequence, position and logits [V] of a kept token.
Row = tuple[int, int, torch.Tensor]


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
        self.texts: list[torch.Tensor] = []
        self._steps: list[Callable[[Any], Iterator[Row]]] = []
        self._write()

    def _take(self, size: int) -> torch.Tensor:
        """[B, size] tokens that were not used before."""
        self._next += size
        return self._ids[:, self._next - size : self._next]

    def _write(self) -> None:
        """The steps, and the whole text of each sequence."""
        sequences = range(len(self.prompts))
        texts = [self._ids[b, : self.prompts[b]] for b in sequences]
        for number, kept in enumerate((*self.kept, np.zeros_like(self.prompts))):
            lengths, counts = np.array([len(text) for text in texts]), kept
            window = self._take(_DRAFTS if number == 0 else _DRAFTS + 1)
            if number == 0:
                width = int(lengths.max())
                tokens = torch.zeros(len(texts), width, dtype=torch.int64, device="cpu")
                for b in sequences:
                    tokens[b, width - len(texts[b]) :] = texts[b]
                tokens, starts = torch.cat([tokens, window], dim=1), lengths - width
            else:
                tokens, starts = window, lengths
                counts = kept + 1  # the pending token
            texts = [torch.cat([texts[b], window[b, : counts[b]]]) for b in sequences]
            ends = np.array([len(text) for text in texts])
            self._steps.append(_window_step(self.model, tokens, starts, ends))
        if self.tree:
            roots = np.array([len(text) for text in texts])
            window = self._take(len(_PARENTS) + 1)
            self._steps.append(_tree_step(self.model, window, roots))
            kept_columns = [0, *(1 + node for node in _PATH)]
            texts = [torch.cat([texts[b], window[b, kept_columns]]) for b in sequences]
        ends = np.array([len(text) for text in texts])
        window = self._take(1)
        self._steps.append(_window_step(self.model, window, ends, ends + 1))
        texts = [torch.cat([texts[b], window[b]]) for b in sequences]
        self.texts = texts

    @property
    def fed(self) -> torch.Tensor:
        """All tokens [n] that the cache is fed with, those of rejected drafts included."""
        return self._ids[:, : self._next].flatten()

    def run(self, runner: Any) -> list[Row]:
        """Sequence, position and logits [V] of each row that the runner gave for a kept token.

        A `SpecRunner` must not read prompts one by one: their padding is to be checked.
        """
        return [row for step in self._steps for row in step(runner)]


def _window_step(model: Any, tokens: torch.Tensor, starts: Lengths, ends: Lengths) -> Any:
    """Feed ``tokens`` from ``starts`` on and keep what lies before ``ends``."""

    def step(runner: Any) -> Iterator[Row]:
        keep = min(tokens.shape[1], _DRAFTS + 1)
        logits = runner.forward(tokens.to(model.device), starts, keep)
        last = starts + tokens.shape[1]
        for b in range(len(starts)):
            for position in range(int(last[b]) - keep, int(ends[b])):
                yield b, position, logits[b, position - int(last[b])].float()
        runner.truncate(ends)

    return step


def _tree_step(model: Any, tokens: torch.Tensor, roots: Lengths) -> Any:
    """Feed a root and its tree and keep one path."""

    def step(runner: Any) -> Iterator[Row]:
        assert isinstance(runner, SpecRunner)
        device = model.device
        parents = torch.tensor(_PARENTS, device=device).expand(len(roots), -1)
        logits = runner.forward_tree(tokens.to(device), roots, parents)
        for b in range(len(roots)):
            for depth, column in enumerate([0, *(1 + node for node in _PATH)]):
                yield b, int(roots[b]) + depth, logits[b, column].float()
        path = torch.tensor(_PATH, device=device).expand(len(roots), -1)
        runner.compact(to_device(roots + 1, device), path)
        runner.truncate(roots + 1 + len(_PATH))

    return step


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
    special: set[int] = set()

    def collect(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, str(key))
        elif isinstance(value, list):
            for inner in value:
                collect(inner, name)
        elif isinstance(value, int) and ("token" in name or name.endswith("_id")):
            special.add(value)

    collect(model.config.to_dict())
    size = vocab_size_of(model)
    ids = [i for i in range(min(size, 4096)) if i not in special]
    return torch.tensor(ids or [0], device="cpu")


# The loop itself names logits that are not finite.
_NOT_FINITE = "the model's logits are not finite or all equal"
DIFFERENT = "its logits differ from the model's own"
_SEPARATE = ("dynamic", "none", "snapshot")  # caches that feed one sequence after the other


def check_fit(
    model: Any,
    kind: str,
    *,
    padded: bool = True,
    tree: bool = False,
    encoded: Encoded | None = None,
    twin: Any = None,
) -> Fit:
    """Compare a model with itself through a cache; the result is remembered for the process.

    The caller's random state, the model's attributes and buffers, and its training mode are as
    before afterwards, and hooks that the caller registered do not run.

    Args:
        model: a causal LM.
        kind: as in `make_runner`.
        padded: whether sequences will be padded, as those of a batch are. The check then takes two
            of different lengths. The decoders of an encoder-decoder begin alike, so that those of a
            batch may differ in length after the first round only.
        tree: whether a tree is checked too; kind "spec" only.
        encoded: what the decoder of an encoder-decoder reads of its encoder. Its first two
            sequences serve the check.
        twin: what runs over the cache in the model's place, or None. It is compared with the model.

    Raises:
        torch.OutOfMemoryError, MemoryError: no memory for the check; the next call checks again.
    """
    reason = kind_reason(model, kind)
    if reason is not None or kind == "plain":
        return Fit(reason=reason)
    num_sequences, names = 1 + padded, tuple[str, ...]()
    if encoded is not None:
        names = tuple(sorted(encoded.inputs))
        if kind == "aligned":
            num_sequences = 2  # even without padding
        encoded = encoded.select([b % encoded.batch_size for b in range(num_sequences)])
    key = (kind, padded, tree, names, twin is not None)
    with changing:
        known = fits_of(model)
        fit = known.get(key)
        if fit is None:
            with undisturbed(model), torch.inference_mode():
                plan = CheckPlan(model, num_sequences, padded, tree)
                fit = _measure(model, model if twin is None else twin, kind, plan, encoded)
            if fit.difference is not None or fit.reason is not None:
                known[key] = fit
    return fit


def _measure(model: Any, runs: Any, kind: str, plan: CheckPlan, encoded: Encoded | None) -> Fit:
    if plan.too_short:
        return Fit(unchecked=f"the model's context holds {plan.context} tokens")
    try:
        own, generated = _own_logits(model, kind, plan, encoded)
    except WindowError as error:
        return Fit(reason=f"its forward raised {error}")
    except PASSING:
        raise
    except Exception as error:
        return Fit(unchecked=f"a forward on text alone raised {one_line(error)}")
    if not _comparable(own, generated):
        return Fit(remark=_NOT_FINITE)
    try:
        rows, omitted = _rows_through_cache(runs, kind, plan, encoded)
    except PASSING:
        raise
    except Exception as error:
        return Fit(reason=f"its forward raised {one_line(error)}")
    # A sequence must say the same alone, with padding, and as the continuation of a prompt.
    rows += [(b, i, row) for b, text in enumerate(generated) for i, row in enumerate(text)]
    for b, position, row in rows:
        if row.shape != own[b][position].shape:
            return Fit(reason=f"its logits are {list(row.shape)}, not {list(own[b][0].shape)}")
    found = compare_rows(model, rows, own)
    if not math.isfinite(found.difference) and not bool(
        logits_alone(model, plan.fed, encoded).isfinite().all()
    ):
        return Fit(remark=_NOT_FINITE)  # a rejected draft did that, not the cache
    reason = None if found.fault is None else f"{DIFFERENT} {found.fault}"
    return Fit(found.difference, found.tolerance, reason, remark=plan.remark, omitted=omitted)


def _own_logits(
    model: Any, kind: str, plan: CheckPlan, encoded: Encoded | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits [n, V] of each text: those to compare with, and those of plain generation."""
    generated = logits_as_generated(
        model, plan.texts, plan.padded, encoded, singly=kind == "snapshot"
    )
    if kind in _SEPARATE:
        return generated, generated
    own = [logits_alone(model, text, encoded, b) for b, text in enumerate(plan.texts)]
    return own, generated


def _comparable(own: Sequence[torch.Tensor], generated: Sequence[torch.Tensor]) -> bool:
    """Whether logits are finite and tell tokens apart."""
    spread = min(float(x.std(dim=-1).min()) for x in own)
    return spread != 0 and all(bool(x.isfinite().all()) for x in (*own, *generated))


def _rows_through_cache(
    model: Any, kind: str, plan: CheckPlan, encoded: Encoded | None
) -> tuple[list[Row], frozenset[str]]:
    """What the model says through a new cache, and which forwards had no mask."""
    prompt = None
    if kind in _SEPARATE:
        prompt = padded_prompt([text[:n] for text, n in zip(plan.texts, plan.prompts, strict=True)])
    omits_mask = frozenset[str]() if plan.padded else frozenset((FIRST, SINGLE))
    runner = make_runner(
        model, len(plan.prompts), plan.capacity, kind, prompt=prompt, encoded=encoded,
        policy=ForwardPolicy(omits_mask=omits_mask, one_by_one=False),
    )  # fmt: skip
    rows = plan.run(runner)
    return rows, frozenset(runner.omitted if isinstance(runner, SpecRunner) else ())


def compare_rows(model: Any, rows: Sequence[Row], own: Sequence[torch.Tensor]) -> Comparison:
    """Compare rows of logits with those of the texts ``own`` [n, V]."""
    wanted = (own[b][position] for b, position, _ in rows)
    return compare((row for *_, row in rows), wanted, tolerance_of(model))
