"""GET /metrics of the scripted server: vLLM's names, moved by the tokens that are served."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sm70lab.serving.script import Counters
from sm70lab.serving.script_tokens import Step

OTHER_ANSWER = 200  # tokens of one of other people's answers
_LABELS = ["model_name", "engine"]


class Served(Collector):
    """What one server has served so far."""

    def __init__(self, counters: Counters, model: str) -> None:
        self.counters, self.model = counters, model
        self.running = 0
        self.prompt_tokens = 0
        self.tokens = 0
        self.finished: Counter[str] = Counter()
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted = [0] * counters.drafts
        self._started = time.monotonic()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, step: Step) -> None:
        """A chunk goes out."""
        self.tokens += len(step.tokens)
        if step.drafted:
            self.drafts += 1
            self.draft_tokens += step.drafted
            self.accepted += [0] * (step.drafted - len(self.accepted))
            for position in range(min(step.accepted, len(self.accepted))):
                self.accepted[position] += 1

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        other = int(self.counters.other_traffic * (time.monotonic() - self._started))
        busy = self.running + (self.counters.other_traffic > 0)
        yield self._gauge("num_requests_running", busy)
        yield self._gauge("num_requests_waiting", 0)
        yield self._counter("prompt_tokens", self.prompt_tokens + other // OTHER_ANSWER * 20)
        yield self._counter("generation_tokens", self.tokens + other)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests finished.", labels=[*_LABELS, "finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            done = self.finished[reason] + (other // OTHER_ANSWER if reason == "length" else 0)
            success.add_metric([self.model, "0", reason], done)
        yield success
        if self.accepted:
            yield from self._speculation(other)

    def _speculation(self, other: int) -> Iterator[Metric]:
        silent = [0.0] * (len(self.accepted) - self.counters.drafts)  # a recorded run's further drafts
        rates = [*self.counters.acceptance, *silent]
        rounds = int(other / (1 + sum(rates)))  # of other people's answers
        accepted = [n + int(rounds * rate) for n, rate in zip(self.accepted, rates, strict=True)]
        yield self._counter("spec_decode_num_drafts", self.drafts + rounds)
        yield self._counter("spec_decode_num_draft_tokens", self.draft_tokens + rounds * self.counters.drafts)
        yield self._counter("spec_decode_num_accepted_tokens", sum(accepted))
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "By draft.", labels=[*_LABELS, "position"]
        )
        for position, number in enumerate(accepted):
            by_position.add_metric([self.model, "0", str(position)], number)
        yield by_position

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
        family.add_metric([self.model, "0"], value)
        return family

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
        family.add_metric([self.model, "0"], value)
        return family
