"""Counts and latencies of a server, which Prometheus reads at /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from specdec_hf.loop.streaming import Step

# Seconds; the last bucket holds all that took longer.
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
COUNTERS = {
    "prompt_tokens": "tokens of the prompts that were submitted",
    "generation_tokens": "tokens of the answers",
    "rounds": "forwards of the target that a text had a part in",
    "draft_tokens": "tokens that were drafted",
    "accepted_tokens": "drafted tokens that were accepted",
    "prediction_tokens": "drafted tokens of the field prediction",
    "accepted_prediction_tokens": "accepted tokens of the field prediction",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("from the request to the first token of a text", LONG),
    "time_per_output_token_seconds": ("from one token of a text to the next, on average", SHORT),
    "request_seconds": ("from the request to the end of a text", LONG),
}


Values = Mapping[str, tuple[str, Callable[[], float]]]


class _Counted:
    """Counters of other objects, read when Prometheus does."""

    def __init__(self, counts: Values) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (text, value) in self._counts.items():
            yield CounterMetricFamily(f"specdec_{name}", text, value=value())


class Metrics:
    """Counts what the texts of a server do.

    Args:
        gauges: by name, a description and a function that gives the value.
        counts: the same for what only grows, and is counted elsewhere.
    """

    def __init__(self, gauges: Values, counts: Values) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry, "namespace": "specdec"}
        self.counters = {name: Counter(name, text, **named) for name, text in COUNTERS.items()}
        self.ends = Counter("texts", "texts that have ended, by the reason", ["finished"], **named)
        self.seconds = {
            name: Histogram(name, text, buckets=buckets, **named)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, **named).set_function(value)
        self.registry.register(_Counted(counts))

    def exposition(self) -> bytes:
        """The body that Prometheus reads, of the type `CONTENT_TYPE_LATEST`."""
        return generate_latest(self.registry)


class TextMetrics:
    """Counts the steps of one text.

    Args:
        metrics: to which they are added.
        began: when the request came, by `time.perf_counter`.
        prompt: tokens of the prompt.
    """

    def __init__(self, metrics: Metrics, began: float, prompt: int) -> None:
        self._metrics, self._began = metrics, began
        self._first, self._tokens, self._ended = 0.0, 0, False
        metrics.counters["prompt_tokens"].inc(prompt)

    def add(self, step: Step) -> None:
        """Count a round."""
        now, counters = time.perf_counter(), self._metrics.counters
        accepted = sum(step.from_draft)
        if step.tokens:
            self._first = self._first or now
            self._tokens += len(step.tokens)
            counters["rounds"].inc()
            counters["generation_tokens"].inc(len(step.tokens))
            counters["draft_tokens"].inc(step.drafted)
            counters["accepted_tokens"].inc(accepted)
            counters["prediction_tokens"].inc(step.drafted * step.predicted)
            counters["accepted_prediction_tokens"].inc(accepted * step.predicted)
        if step.finished:
            self.end(step.finished)

    def end(self, reason: str) -> None:
        """Count the text, unless that was done."""
        if self._ended:
            return
        self._ended, now, seconds = True, time.perf_counter(), self._metrics.seconds
        self._metrics.ends.labels(reason).inc()
        if self._tokens:
            seconds["time_to_first_token_seconds"].observe(self._first - self._began)
            seconds["request_seconds"].observe(now - self._began)
        if self._tokens > 1:
            each = (now - self._first) / (self._tokens - 1)
            seconds["time_per_output_token_seconds"].observe(each)
