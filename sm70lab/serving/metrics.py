"""Prometheus metrics under vLLM's names, so that what reads a vLLM server reads this one."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from sm70lab.serving.job import Job

TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
ROUND = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)


class Metrics:
    """The server's counters, gauges and histograms, in a registry of their own."""

    def __init__(self, model: str, draft_tokens: int) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model, "engine": "0"}
        self.prompt_tokens = self._counter("prompt_tokens", "Prefill tokens processed.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens out of the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Generation tokens delivered.")
        self._rejected = self._counter("admission_rejections", "Requests refused at the queue limit.")
        self._success = Counter(
            "vllm:request_success", "Finished requests.", (*self._labels, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens a request.", TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens a request.", TOKENS)
        self._budget = self._histogram("request_params_max_tokens", "max_tokens of requests.", TOKENS)
        self.iteration = self._histogram("iteration_tokens_total", "Tokens an engine step.", ROUND)
        self.first_token = self._histogram("time_to_first_token_seconds", "Time to first token.", FIRST)
        self.between = self._histogram("inter_token_latency_seconds", "Time between tokens.", BETWEEN)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens, a request.", BETWEEN
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end.", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to slot.", SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "Slot to end.", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Slot to first token.", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.", SECONDS)
        if draft_tokens:
            self._drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted.")
            self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
            self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            labels = (*self._labels, "position")
            by_position = Counter(name, "Accepted drafts, by position.", labels, registry=self.registry)
            self._positions = [
                by_position.labels(**self._labels, position=str(i)) for i in range(draft_tokens)
            ]

    def watch(
        self, running: Callable[[], float], waiting: Callable[[], float], used: Callable[[], float]
    ) -> None:
        """Where the gauges read: requests in slots, requests queued, share of the KV caches in use."""
        for name, text, read in (
            ("num_requests_running", "Requests in slots.", running),
            ("num_requests_waiting", "Requests in the queue.", waiting),
            ("kv_cache_usage_perc", "Share of the KV caches in use, 0 to 1.", used),
        ):
            gauge = Gauge(f"vllm:{name}", text, tuple(self._labels), registry=self.registry)
            gauge.labels(**self._labels).set_function(read)

    def rejected(self) -> None:
        """A request found the queue full."""
        self._rejected.inc()

    def round(self, drafted: int, accepted: int) -> None:
        """One request's part of a round that drafted."""
        self._drafts.inc()
        self._draft_tokens.inc(drafted)
        self._accepted.inc(accepted)
        for position in self._positions[:accepted]:
            position.inc()

    def finished(self, job: Job, reason: str) -> None:
        """A request's end, whatever it was."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        times, tokens = job.times, job.tokens
        self._whole.observe(times.finished - times.arrived)
        self._prompt_length.observe(len(job.request.prompt_ids))
        self._output_length.observe(tokens)
        self._budget.observe(job.delivery.max_tokens)
        if times.admitted:
            self._queue.observe(times.admitted - times.arrived)
            self._inference.observe(times.finished - times.admitted)
        if times.first_token:
            self._prefill.observe(times.first_token - times.admitted)
            self._decode.observe(times.last_token - times.first_token)
        if tokens > 1:
            self._per_token.observe((times.last_token - times.first_token) / (tokens - 1))

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, tuple(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = tuple(self._labels)
        histogram = Histogram(f"vllm:{name}", text, labels, registry=self.registry, buckets=buckets)
        return histogram.labels(**self._labels)
