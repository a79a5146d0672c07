"""The decoding loop behind Hugging Face's argument names.

`generate` is the whole of it. `SpeculativeDecoder` is the same as an object, for
``model.generate(custom_generate=...)`` and for streaming step by step.

This module is not called ``generate`` because importing a submodule of that name would put the
module in the place of the lazily loaded function ``specdec_hf.generate``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import StopStringCriteria

from specdec_hf.arguments import check_integers, shown
from specdec_hf.beams.search import beam_search
from specdec_hf.cache.encoded import is_encoder_decoder
from specdec_hf.compiled.call import CompileStats
from specdec_hf.decode.arguments import (
    check_stop_strings,
    check_streamer_type,
    resolve_num_assistant_tokens,
)
from specdec_hf.decode.assistant import with_assistant
from specdec_hf.decode.begin import begin
from specdec_hf.decode.output import SpecOutput, finish
from specdec_hf.decode.own_generate import by_own_generate, plain_output
from specdec_hf.decode.rounds import step
from specdec_hf.decode.session import Options, Session
from specdec_hf.decode.streaming import Step, Streamer, Trace, put_step
from specdec_hf.drafting.registry import AUTO
from specdec_hf.hf_arguments.call import Call
from specdec_hf.hf_arguments.caller import kept_arguments
from specdec_hf.hf_arguments.custom_generate import call_from_hugging_face
from specdec_hf.hf_arguments.inputs import has_own_generate, one_of
from specdec_hf.hf_arguments.language_model import check_language_model
from specdec_hf.hf_arguments.prepare import prepare_call
from specdec_hf.schedules.base import Schedule
from specdec_hf.schedules.benefit_guard import BenefitGuard
from specdec_hf.trees import as_layout


def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    drafter: Any = AUTO,
    num_assistant_tokens: int | None = None,
    gamma: int | None = None,
    num_speculative_tokens: int | None = None,
    num_assistant_tokens_schedule: str | Schedule | None = None,
    num_assistant_beams: int | None = None,
    rule: str = "auto",
    tree: Any = None,
    cache: str = "auto",
    self_check: bool = True,
    seed: Any = None,
    guard: bool | BenefitGuard | None = None,
    compile: bool = False,
    fixed_width: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    streamer: Streamer | None = None,
    **kwargs: Any,
) -> Any:
    """Generate text speculatively with the unmodified ``model``, without loss.

    All other arguments are those of ``model.generate`` and mean the same: ``attention_mask``,
    ``max_new_tokens``, ``max_length``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p`` (scalar, or one per sequence), ``logits_processor``, ``stopping_criteria``,
    ``stop_strings`` with ``tokenizer``, ``assistant_tokenizer`` with ``tokenizer`` (a drafter with
    another vocabulary), ``tokenizer`` alone (to check what drafters read from files),
    ``eos_token_id``, ``pad_token_id``, ``past_key_values``,
    ``generation_config``, ``return_dict_in_generate``, penalties. Defaults come from
    ``model.generation_config``. Processors and criteria are called for one sequence at a time, and
    processors also for prefixes that end in a draft which is then rejected. They must therefore be
    pure functions of their arguments.

    Args:
        model: causal LM or encoder-decoder, left on its device and in its dtype.
        inputs: alias of ``input_ids``, as in ``model.generate``, or what the encoder reads.
        input_ids: [B, T] int64 prompts, padded on the left; of an encoder-decoder the encoder's,
            padded on any side.
        drafter: "auto" for a tree of copied text and, where the model has one, the drafts of a
            head; chains or plain decoding answer calls that refuse trees, and ``stats.drafter`` and
            a note say so, see docs/loop.md#the-default-drafter. None for plain decoding, a name of
            `specdec_hf.drafting.registry` such as "prompt_lookup", a causal LM of the same
            vocabulary, or a `Drafter`, which may draft trees of its own; with
            ``tree`` also a list of them, and without it a list of draft models from large to small,
            as in `VerticalCascade`.
        num_assistant_tokens: tokens to draft per round; ``gamma`` and ``num_speculative_tokens``
            are aliases. None is the value of the generation config, or 5.
        num_assistant_tokens_schedule: how much to draft: "constant", "heuristic", "confidence",
            "confidence_tuned", "specdec++", "egag", "optimal" or "budget", with parameters as in
            "egag:gamma_max=8,beta=0.5", or a `Schedule`; see docs/loop.md#schedules. None is
            "optimal" for the tree of drafter "auto", else "constant".
        num_assistant_beams: with ``num_beams``, the beam width of the draft model, which may be
            larger; None is twice ``num_beams``. See docs/loop.md#beam-search.
        rule: acceptance rule: "token", "block", "greedy", or "match", whose sampled output equals
            plain decoding with the same seed; see docs/rules.md. "auto" is greedy without sampling;
            with it, block for the drafts of a model and token for others. With ``tree`` the rule is
            one of the lossless rules of `specdec_kernels.verify_tree`, and "auto" of sampled calls
            is multi_draft_wor for a tree of draft models, multi_draft where each model drafts a
            chain (`TrieTree`), and target_only for trees that are not drawn from a distribution.
        tree: None for chains; a `TreeSpec` or a tuple of branchings, such as (4, 2, 1), drafted by
            one or more draft models (prompt lookup fills as many nodes); an `EagleTree`, drafted by
            one draft model; a `TrieTree`, by any drafters. One forward of the target verifies the
            whole tree, which needs the cache "spec".
        cache: "spec" (one static cache), "aligned" (Transformers' own for the whole batch),
            "dynamic" (one for each sequence, one forward after the other), or "auto": the first of
            them that fits the model, with a note in the statistics where it is not "spec". Without
            a drafter the model's own cache serves too, and no roll back is needed.
        self_check: whether the first use of a cache with a model class and configuration compares
            the model with itself through the cache on a few tokens; see `check_model`.
        seed: None draws one seed for each sequence of a sampled call from torch's default generator
            (``torch.manual_seed``). An int is the seed of sequence 0, from which those of the
            others are derived. A list, array or tensor of ints gives them one by one.
            ``stats.seeds`` holds the seeds; with ``seed=stats.seeds`` the same call gives the same
            text again. See docs/loop.md#seeds.
        guard: whether drafting waits or pauses, so that it loses at most about 3 % of the seconds
            of plain decoding, of 8 % where drafts paid in earlier calls or are those of "auto" with
            a head that this package ships; see docs/loop.md. None: yes where the text
            cannot change by it (greedy, match, target_only), else the guard only adds a note to the
            statistics; in bfloat16 and float16 by expected costs. True: always, by the clock; where
            that changes the text, which then depends on timing, a note says so. False: never, and
            drafting begins in the second round. A `BenefitGuard` has limits of your own.
        compile: whether forwards run on packed weights and compiled layers; see docs/compile.md.
            The first call with a model takes longer, unless `warm_up` was called before, and a
            second copy of the weights of its linear layers is kept as long as the model. A model
            that cannot be compiled runs eagerly, with a warning that says why.
        fixed_width: None, or how many tokens a row every forward has, those of the prompt included.
            In bfloat16 and float16 the text then does not depend on how much was drafted; see
            docs/compile.md#fixed-width.
        clock: seconds, for tests.
        streamer: Hugging Face streamer; one sequence only.

    Returns:
        [B, W] int64 token ids, or `SpecOutput` with ``return_dict_in_generate=True``.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument unknown, unsupported or out of range, by name.
        RuntimeError: logits that are not finite, by sequence and position; a drafter that another
            call is using.
    """
    check_language_model("model", model)
    check_streamer_type(streamer)
    check_stop_strings(kwargs.get("stop_strings"), kwargs.get("tokenizer"))
    options = Options(
        drafter=drafter,
        num_assistant_tokens=resolve_num_assistant_tokens(
            num_assistant_tokens, gamma, num_speculative_tokens, tree=tree
        ),
        num_assistant_tokens_schedule=num_assistant_tokens_schedule,
        num_assistant_beams=num_assistant_beams,
        rule=rule,
        tree=as_layout(tree),
        cache=cache,
        self_check=self_check,
        seed=seed,
        guard=guard,
        compile=compile,
        fixed_width=fixed_width,
        clock=clock,
    )
    if has_own_generate(model):
        given = {"inputs": inputs, "input_ids": input_ids}
        if not is_encoder_decoder(model):
            given = {"input_ids": one_of(inputs, input_ids)}
        decoder = SpeculativeDecoder(
            streamer=streamer,
            tokenizer=kwargs.pop("tokenizer", None),
            stop_strings=kwargs.pop("stop_strings", None),
        )
        decoder.options = options
        return by_own_generate(model, given, decoder, seed, kwargs)
    call = prepare_call(model, input_ids, inputs=inputs, **kwargs)
    if streamer is not None:
        _check_streamer(call)
        streamer.put(torch.from_numpy(call.input_ids))
    return _decode(model, call, options, streamer)


class SpeculativeDecoder:
    """The loop as an object: ``model.generate(**inputs, custom_generate=SpeculativeDecoder(...))``.

    ``model.generate`` drops ``tokenizer`` before it reads ``stop_strings`` where it calls a
    ``custom_generate``, so this object takes both itself. It also takes a streamer; one given to
    ``model.generate`` is used as well. All other arguments stay with ``model.generate``.

    Args:
        drafter, num_assistant_tokens, gamma, num_speculative_tokens,
            num_assistant_tokens_schedule, num_assistant_beams, rule, tree, cache, self_check,
            seed, guard, compile, fixed_width, streamer: as in `generate`.
        tokenizer, stop_strings: end sequences at these strings. Drafters that read a file are
            checked with the tokenizer.
        trace: called after every round with a `TracedRound`; not with ``tree``.
    """

    def __init__(
        self,
        drafter: Any = AUTO,
        *,
        num_assistant_tokens: int | None = None,
        gamma: int | None = None,
        num_speculative_tokens: int | None = None,
        num_assistant_tokens_schedule: str | Schedule | None = None,
        num_assistant_beams: int | None = None,
        rule: str = "auto",
        tree: Any = None,
        cache: str = "auto",
        self_check: bool = True,
        seed: Any = None,
        guard: bool | BenefitGuard | None = None,
        compile: bool = False,
        fixed_width: int | None = None,
        streamer: Streamer | None = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        trace: Trace | None = None,
    ) -> None:
        check_stop_strings(stop_strings, tokenizer)
        check_streamer_type(streamer)
        self.options = Options(
            drafter=drafter,
            num_assistant_tokens=resolve_num_assistant_tokens(
                num_assistant_tokens, gamma, num_speculative_tokens, tree=tree
            ),
            num_assistant_tokens_schedule=num_assistant_tokens_schedule,
            num_assistant_beams=num_assistant_beams,
            rule=rule,
            tree=as_layout(tree),
            cache=cache,
            self_check=self_check,
            seed=seed,
            guard=guard,
            compile=compile,
            fixed_width=fixed_width,
            trace=trace,
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
        seed: Any = None,
        inputs_tensor: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``model.generate``; same result as `generate`.

        ``model.generate(custom_generate=..., seed=...)`` hands ``seed`` over because it is named in
        this signature. None means the ``seed`` of this object. ``inputs_tensor`` is what the
        encoder of an encoder-decoder read, which Transformers hands over in the same way.
        """
        criteria = type(stopping_criteria)(stopping_criteria)
        if self.stop_strings is not None:
            criteria.append(StopStringCriteria(self.tokenizer, self.stop_strings))
        kept = {"tokenizer": self.tokenizer, **kept_arguments(model, self)}
        model_kwargs["inputs_tensor"] = inputs_tensor
        call = call_from_hugging_face(
            model, input_ids, logits_processor, criteria, generation_config, model_kwargs, kept
        )
        streamer = kept.get("streamer")
        if streamer is not None and self.streamer is not None:
            raise ValueError(
                "streamer must be given to model.generate or to SpeculativeDecoder, got both"
            )
        if streamer is None and self.streamer is not None:
            streamer = self.streamer
            streamer.put(torch.from_numpy(call.input_ids))  # model.generate does it for its own
        if streamer is not None:
            _check_streamer(call)
        output = _decode(model, call, self._options(seed), streamer)
        if call.return_dict and is_encoder_decoder(model) and has_own_generate(model):
            return plain_output(output)
        return output

    def stream(
        self, model: Any, input_ids: torch.Tensor | None = None, *, seed: Any = None, **kwargs: Any
    ) -> Generator[Step, None, SpecOutput]:
        """Yield a `Step` per sequence and round; the generator returns a `SpecOutput`.

        ``seed`` is that of this call; None means the ``seed`` of this object.

        Raises:
            ValueError: this object has a streamer, which would get nothing.
        """
        if self.streamer is not None:
            raise ValueError(
                "streamer must be None with stream, which yields the text, got "
                f"{shown(self.streamer)}"
            )
        check_language_model("model", model)
        for name in ("tokenizer", "stop_strings"):
            if getattr(self, name) is not None:
                kwargs.setdefault(name, getattr(self, name))
        check_stop_strings(kwargs.get("stop_strings"), kwargs.get("tokenizer"))
        call = prepare_call(model, input_ids, **kwargs)
        if call.beams is not None:
            raise ValueError(
                f"num_beams must be 1 with stream, got {call.beams.num_beams}: which beam is best "
                "is known at the end"
            )
        session = _begin(model, call, self._options(seed))
        try:
            while not session.done:
                yield from step(session)
            return finish(session)
        finally:
            session.lease.release()

    def _options(self, seed: Any) -> Options:
        """The options of one call."""
        return self.options if seed is None else replace(self.options, seed=seed)


def run(session: Session, streamer: Streamer | None = None) -> Any:
    """Run all rounds of a session; returns its output."""
    try:
        while not session.done:
            for appended in step(session):
                put_step(streamer, appended)
        if streamer is not None:
            streamer.end()
        output = finish(session)
    finally:
        session.lease.release()
    return output if session.call.return_dict else output.sequences


def _begin(model: Any, call: Call, options: Options) -> Session:
    return begin(model, call, with_assistant(options, call.assistant))


def _decode(model: Any, call: Call, options: Options, streamer: Streamer | None) -> Any:
    """The output of a call: the rounds of a session, or of a beam search."""
    if call.beams is None:
        return run(_begin(model, call, options), streamer)
    output = beam_search(model, call, with_assistant(options, call.assistant))
    return output if call.return_dict else output.sequences


def _check_streamer(call: Call) -> None:
    batch_size = len(call.mask)
    if call.beams is not None:
        raise ValueError(f"streamer must be None with num_beams={call.beams.num_beams}")
    if batch_size != 1:
        raise ValueError(
            f"streamer needs batch size 1, got {batch_size}; use SpeculativeDecoder(...).stream"
        )


def warm_up(
    model: Any,
    batch_sizes: Iterable[int] = (1,),
    *,
    drafter: Any = AUTO,
    tree: Any = None,
    **options: Any,
) -> dict[int, CompileStats]:
    """Make everything that compiled calls with a model need, before the first of them.

    Weights are packed, graphs are made for the target and for the model or head that drafts, and
    their logits are compared with eager ones. ``generate(model, ..., compile=True)`` of these batch
    sizes and with the same options then makes no graphs and spends no seconds in a warm-up, until
    the model is changed. On a CPU all batch sizes above 1 share their graphs. On CUDA devices those
    of the last batch size are kept, see docs/compile.md#cuda-graphs.

    Args:
        model: causal LM, as in `generate`.
        batch_sizes: numbers B of sequences that calls will have, those of ``num_return_sequences``
            included.
        drafter, tree, options: as in `SpeculativeDecoder`. They decide whether chains or trees are
            verified, which need a comparison each. A drafter that reads a file and is given by its
            name is packed in every call: give the object of the calls.

    Returns:
        What was made, by batch size; ``stats.compiled.eager`` says why such calls run eagerly,
        empty where they do not.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: a number below 1, no batch size, or options that do not fit the model.
        RuntimeError: a drafter that a call is using.

    >>> from specdec_hf import generate, warm_up
    >>> warm_up(model, batch_sizes=(1, 8))  # doctest: +SKIP
    >>> generate(model, **inputs, compile=True)  # doctest: +SKIP
    """
    check_language_model("model", model)
    sizes = check_integers("batch_sizes", batch_sizes, 1)
    if not sizes:
        raise ValueError("batch_sizes must have at least one number, got none")
    decoder = SpeculativeDecoder(drafter, tree=tree, compile=True, **options)
    made = {}
    for size in sizes:
        ids = torch.zeros(size, 2, dtype=torch.int64, device=model.device)
        call = prepare_call(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False,
            num_beams=1, num_return_sequences=1,
        )  # fmt: skip
        session = begin(model, call, decoder.options)
        session.lease.release()
        assert session.stats.compiled is not None
        made[size] = session.stats.compiled
    return made
