"""Bounds what drafting may lose against plain decoding, 2 % of its seconds by default."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from statistics import fmean, median

from specdec_hf.arguments import check_flag, check_integer, check_number
from specdec_hf.schedules.costs import Costs

# Share of the seconds of plain decoding that drafting may lose. The inaccuracy of the clock may add
# about 1 %.
MAX_LOSS = 0.02
# A shorter text counts as one of so many tokens, if so many are asked for.
MIN_TOKENS = 32
# Where drafting paid in earlier calls, it counts as several times what is asked for, up to a limit:
# one unlucky round may cost two plain ones, and is not to end the drafts of a short text.
TRUSTED_TOKENS, TRUSTED_TIMES = 256, 4
# A machine changes its speed within a call and between calls. So the last few plain rounds of a
# call count, and drafting without a clear benefit goes on for a few rounds only without another.
# Where these few were slow by chance, drafts look cheap and are made: of them and the last
# MOST_PLAIN_ROUNDS, the faster count.
PLAIN_ROUNDS = 3
MOST_PLAIN_ROUNDS = 32
CLEAR_BENEFIT = 1.25
PATIENCE = 4


class BenefitGuard:
    """Measures the benefit of speculation as it runs, and holds drafting where it does not pay.

    benefit = tokens per sequence and drafting round * seconds of a plain round / seconds of a
    drafting round. The guard keeps an account of what the call has lost: the seconds of its
    drafting rounds beyond those that plain decoding needs for as many tokens, and of drafters that
    were asked in vain. A round drafts only as many tokens as keep the account within ``max_loss``
    of the seconds of plain decoding even if all of them are rejected. Until a draft has paid, the
    first drafts are therefore short, or wait for some plain rounds. Plain rounds are those of the
    same call, the last ones or the faster ones, and half a ``window`` of drafting rounds without a
    clear benefit is followed by a plain round, because a plain round of a slower moment would make
    drafting look cheap. After ``window`` drafting rounds with a benefit below 1 drafting pauses,
    each time for twice as many plain rounds. Where drafting has won time in this call so far, or
    paid in earlier ones, both take `PATIENCE` times as many rounds: a few are below 1 by chance.

    Under rules that read the draft distribution, a round without drafts emits other text than one
    with drafts. There the guard must not pause by the clock (``stops=False``), and the one plain
    round that it needs for comparison is always the same one.

    Args:
        window: number of drafting rounds that are measured before a pause.
        pause: number of plain rounds in the first pause.
        stops: False measures and reports but never pauses.
        max_loss: share of the seconds of plain decoding that drafting may lose, at least 0; None is
            0.02. A text that ends before 32 tokens counts as one of 32, or of as many as were
            asked for where these are fewer; with a drafter that was worth it in earlier calls it
            counts as one of four times as many as were asked for, at most 256. ``math.inf`` drafts
            at once, and only pauses.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: a number out of range.
    """

    def __init__(
        self,
        *,
        window: int = 8,
        pause: int = 16,
        stops: bool = True,
        max_loss: float | None = None,
    ) -> None:
        self.window = check_integer("window", window, 1)
        self.pause = check_integer("pause", pause, 1)
        self.stops = check_flag("stops", stops)
        self.max_loss = check_number("max_loss", MAX_LOSS if max_loss is None else max_loss, 0)
        self.stopped = 0
        self.start(Costs(), MIN_TOKENS)

    def start(self, costs: Costs, budget: int, *, trusted: bool = False) -> None:
        """Begin a call.

        Args:
            costs: what rounds of the call cost; the loop records it.
            budget: most new tokens of a sequence.
            trusted: whether drafting had a benefit in earlier calls.
        """
        self.costs = costs
        self._min_tokens = min(budget, MIN_TOKENS)
        if trusted:
            self._min_tokens = min(TRUSTED_TIMES * budget, TRUSTED_TOKENS)
        self._trusted = trusted
        self._plain_times: deque[float] = deque(maxlen=MOST_PLAIN_ROUNDS)  # of this call
        self._rounds_since_plain = 0
        self._drafts = False  # whether this call has drafted
        self._tokens = 0.0  # per sequence
        self._lost = 0.0  # seconds
        self._draft_times: deque[float] = deque(maxlen=PATIENCE * self.window)
        self._draft_tokens: deque[float] = deque(maxlen=PATIENCE * self.window)
        self._rounds_to_pause = 0

    @property
    def plain_step(self) -> float | None:
        """Seconds of the call's plain rounds, or of those of earlier calls; None before any.

        Of the call's, the lower one of two medians: of the last three, and of the last 32.
        """
        times = list(self._plain_times)
        if not times:
            return self.costs.plain
        return min(median(times[-PLAIN_ROUNDS:]), median(times))

    @property
    def benefit(self) -> float | None:
        """Benefit over the last drafting rounds, None before both kinds of rounds were seen."""
        plain = self.plain_step
        if plain is None or not self._draft_times:
            return None
        recent = -self._rounds_that_decide
        tokens = fmean(list(self._draft_tokens)[recent:])
        return tokens * plain / max(median(list(self._draft_times)[recent:]), 1e-12)

    @property
    def _rounds_that_decide(self) -> int:
        return PATIENCE * self.window if self._trusted or self._lost < 0 else self.window

    @property
    def pausing(self) -> bool:
        """Whether the next round belongs to a pause."""
        return self._rounds_to_pause > 0

    def affordable(self, number: int, length: int) -> int:
        """How many tokens the next round of a call may draft, 0 for a plain round.

        Args:
            number: of the round, from 0.
            length: tokens that it would draft; in trees, their depth.
        """
        if not self.stops:
            # Neither times nor the other sequences of the batch may decide here.
            return 0 if number == self.window // 2 + 1 else length
        if self.pausing:
            return 0
        plain, costs = self.plain_step, self.costs
        if math.isinf(self.max_loss):
            # The comparison still needs one plain round.
            return length if plain is not None or len(self._draft_times) < self.window // 2 else 0
        if plain is None or self._needs_plain_round:
            return 0
        earned = costs.prefill + plain * max(self._tokens, self._min_tokens)
        left = self.max_loss * earned - self._lost
        if not self._drafts:
            left -= costs.draft_prefill

        def loss(length: int) -> float:
            return (costs.round(length) or plain) - plain

        return length if loss(length) <= left else bisect_right(range(1, length), left, key=loss)

    @property
    def _needs_plain_round(self) -> bool:
        """Whether what is known of plain rounds may be out of date."""
        if not self.costs.measured:
            return False
        if not self._plain_times and not self._trusted:
            return True
        benefit = self.benefit
        clear = benefit is not None and benefit >= CLEAR_BENEFIT
        return not clear and self._rounds_since_plain >= max(self._rounds_that_decide // 2, 1)

    def observe(
        self, drafted: int, tokens_per_sequence: float, seconds: float, in_vain: float = 0.0
    ) -> str | None:
        """Record one round, which `Costs.observe` has recorded already.

        Args:
            drafted: tokens drafted for each sequence in this round.
            tokens_per_sequence: tokens emitted per active sequence.
            seconds: duration of the round.
            in_vain: seconds of a drafter that drafted nothing.

        Returns:
            A note for the user when the benefit was found to be below 1, else None.
        """
        self._tokens += tokens_per_sequence
        if drafted == 0:
            self._lost += in_vain
            self._plain_times.append(seconds - in_vain)
            self._rounds_since_plain = 0
            self._rounds_to_pause = max(self._rounds_to_pause - 1, 0)
            return None
        self._drafts = True
        self._rounds_since_plain += 1
        self._draft_times.append(seconds)
        self._draft_tokens.append(tokens_per_sequence)
        self._lost += seconds - tokens_per_sequence * (self.plain_step or seconds)
        benefit = self.benefit
        too_few = len(self._draft_times) < self._rounds_that_decide
        if benefit is None or too_few or benefit >= 1.0:
            return None
        measured = f"speculation is slower than plain decoding here (benefit {benefit:.2f})"
        self._draft_times.clear()
        self._draft_tokens.clear()
        if not self.stops:
            return measured + "; drafting goes on because the text must not depend on time"
        self.stopped += 1
        self._rounds_to_pause, self.pause = self.pause, self.pause * 2
        return measured + f"; drafting pauses for {self._rounds_to_pause} rounds"
