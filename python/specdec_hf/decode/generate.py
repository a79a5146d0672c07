"""The decoding loop behind Hugging Face's argument names; its rounds are in rounds.py.

`generate` is the whole of it; `SpeculativeDecoder` is the same as an object, for
``model.generate(custom_generate=...)`` and for streaming step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from transformers import StopStringCriteria

from specdec_hf.decode.rounds import begin, finish, step
from specdec_hf.decode.session import DEFAULT_GAMMA, MAX_GAMMA, Options, Session, SpecOutput
from specdec_hf.decode.streaming import Step, Streamer, put_step
from specdec_hf.hf_arguments.call import call_from_hugging_face, prepare_call
from specdec_hf.schedules.schedules import BenefitGuard
from specdec_hf.trees.layouts import as_layout


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    drafter: Any = None,
    num_assistant_tokens: int | None = None,
    gamma: int | None = None,
    num_speculative_tokens: int | None = None,
    gamma_policy: str = "constant",
    acceptance: str = "auto",
    tree: Any = None,
    cache: str = "auto",
    seed: Any = None,
    guard: bool | BenefitGuard | None = None,
    clock: Callable[[], float] = time.perf_counter,
    streamer: Streamer | None = None,
    **kwargs: Any,
) -> Any:
    """Generate text speculatively with the unmodified ``model``; lossless.

    All other arguments are those of ``model.generate`` and mean the same: ``attention_mask``,
    ``max_new_tokens``, ``max_length``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p`` (scalar, or one per row), ``logits_processor``, ``stopping_criteria``,
    ``stop_strings`` with ``tokenizer``, ``eos_token_id``, ``pad_token_id``, ``past_key_values``,
    ``generation_config``, ``return_dict_in_generate``, penalties. Defaults come from
    ``model.generation_config``. Processors and criteria are called one row at a time, possibly with
    tokens that are then rejected: they must be pure functions of their arguments.

    Args:
        model: causal LM, left on its device and in its dtype.
        inputs: alias of ``input_ids``, as in ``model.generate``.
        input_ids: [B, T] int64 prompts, padded on the left.
        drafter: None for plain decoding, "prompt_lookup", a causal LM of the same vocabulary, or a
            `Drafter`; with ``tree`` also a list of them.
        num_assistant_tokens: tokens to draft per round; ``gamma`` and ``num_speculative_tokens``
            are aliases.
        gamma_policy: "constant", or "heuristic" (+2 after full acceptance, else -1).
        acceptance: "token", "block", "greedy", or "match", whose sampled output equals plain
            decoding with the same seed. "auto" is greedy without sampling; with it, block for the
            drafts of a model and token for others. With ``tree`` the lossless rules of
            `specdec_kernels.verify_tree`, and "auto" of sampling is multi_draft_wor for a
            tree of draft models, multi_draft where each brings a sequence (`TrieTree`), target_only
            for trees that are not drawn; how children are drawn follows the rule.
        tree: None for chains; a `TreeSpec` or a tuple of branchings, such as (4, 2, 1), drafted by
            one or more draft models (prompt lookup fills as many nodes); an `EagleTree`, by one
            draft model; a `TrieTree`, by any drafters. The target judges it in one pass; needs the
            cache "spec".
        cache: "auto", "spec" (static, ragged rows) or "dynamic" (one row).
        seed: an int, or one per row. Noise depends on (seed, position) alone, so equal rows with
            equal seeds give equal text. None is 0.
        guard: whether drafting stops while it measurably does not pay. None: yes, except for rules
            that compare with the draft's law (token, block, most of trees) with an explicit seed:
            their text would depend on timing; there it only notes.
        clock: seconds, for tests.
        streamer: Hugging Face streamer; one row only.

    Returns:
        [B, W] int64 token ids, or `SpecOutput` with ``return_dict_in_generate=True``.

    Raises:
        ValueError: an argument unknown, unsupported or out of range, by name.
        RuntimeError: logits that are not finite, by row and position.
    """
    options = Options(
        drafter=drafter,
        num_assistant_tokens=resolve_gamma(
            num_assistant_tokens, gamma, num_speculative_tokens, tree=tree
        ),
        gamma_policy=gamma_policy,
        acceptance=acceptance,
        tree=as_layout(tree),
        cache=cache,
        seed=seed,
        guard=guard,
        clock=clock,
    )
    call = prepare_call(model, inputs if input_ids is None else input_ids, **kwargs)
    if streamer is not None:
        _check_streamer(len(call.mask))
        streamer.put(torch.from_numpy(call.input_ids))
    return run(begin(model, call, options), streamer)


class SpeculativeDecoder:
    """The loop as an object: ``model.generate(**inputs, custom_generate=SpeculativeDecoder(...))``.

    ``model.generate`` keeps streamer, tokenizer and ``stop_strings`` from a ``custom_generate``
    callable, so this object takes them itself. Sampling arguments stay with ``generate``.

    Args:
        drafter, num_assistant_tokens, gamma, num_speculative_tokens, gamma_policy, acceptance,
            tree, cache, seed, guard, streamer: as in `generate`.
        tokenizer, stop_strings: end rows at these strings.
    """

    def __init__(
        self,
        drafter: Any = None,
        *,
        num_assistant_tokens: int | None = None,
        gamma: int | None = None,
        num_speculative_tokens: int | None = None,
        gamma_policy: str = "constant",
        acceptance: str = "auto",
        tree: Any = None,
        cache: str = "auto",
        seed: Any = None,
        guard: bool | BenefitGuard | None = None,
        streamer: Streamer | None = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
    ) -> None:
        if stop_strings is not None and tokenizer is None:
            raise ValueError("stop_strings needs tokenizer")
        self.options = Options(
            drafter=drafter,
            num_assistant_tokens=resolve_gamma(
                num_assistant_tokens, gamma, num_speculative_tokens, tree=tree
            ),
            gamma_policy=gamma_policy,
            acceptance=acceptance,
            tree=as_layout(tree),
            cache=cache,
            seed=seed,
            guard=guard,
        )
        self.streamer = streamer
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``model.generate``; same result as `generate`."""
        criteria = type(stopping_criteria)(stopping_criteria)
        if self.stop_strings is not None:
            criteria.append(StopStringCriteria(self.tokenizer, self.stop_strings))
        call = call_from_hugging_face(
            model, input_ids, logits_processor, criteria, generation_config, model_kwargs
        )
        if self.streamer is not None:
            _check_streamer(len(call.mask))
            self.streamer.put(torch.from_numpy(call.input_ids))
        return run(begin(model, call, self.options), self.streamer)

    def stream(
        self, model: Any, input_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> Generator[Step, None, SpecOutput]:
        """Yield a `Step` per row and round; the generator's return value is a `SpecOutput`."""
        for name in ("tokenizer", "stop_strings"):
            if getattr(self, name) is not None:
                kwargs.setdefault(name, getattr(self, name))
        session = begin(model, prepare_call(model, input_ids, **kwargs), self.options)
        while not session.done:
            yield from step(session)
        return finish(session)


def run(session: Session, streamer: Streamer | None = None) -> Any:
    """All rounds of a session, then its output."""
    while not session.done:
        for made in step(session):
            put_step(streamer, made)
    if streamer is not None:
        streamer.end()
    output = finish(session)
    return output if session.call.return_dict else output.sequences


def resolve_gamma(*values: int | None, tree: Any = None) -> int:
    """The one of the aliases that was given.

    Raises:
        ValueError: two aliases disagree, not an integer in [0, `MAX_GAMMA`], or given with a tree.
    """
    given = {value for value in values if value is not None}
    if given and tree is not None:
        raise ValueError(
            "num_assistant_tokens must not be given with tree, which says what is drafted, "
            f"got {sorted(given)}"
        )
    if len(given) > 1:
        raise ValueError(
            "num_assistant_tokens, gamma and num_speculative_tokens are the same argument, "
            f"got {sorted(given)}"
        )
    gamma = given.pop() if given else DEFAULT_GAMMA
    if not isinstance(gamma, int) or isinstance(gamma, bool) or not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(
            f"num_assistant_tokens must be an integer in [0, {MAX_GAMMA}], got {gamma!r}"
        )
    return gamma


def _check_streamer(batch_size: int) -> None:
    if batch_size != 1:
        raise ValueError(
            f"streamer needs batch size 1, got {batch_size}; use SpeculativeDecoder(...).stream"
        )
