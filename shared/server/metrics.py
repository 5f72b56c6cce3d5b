"""Metrics for Prometheus. Introduced in phase 4.

Names and meanings are those of vLLM with the prefix ``infer:``, so vLLM's dashboards apply. Invariant: labels take
values from small fixed sets, never a client's text.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shared.server.answers.answer_stream import AnswerStream
from shared.text.stopping import FinishReason

SHORT = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Buckets for the seconds between two tokens."""
LONG = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5,
    2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Buckets for the seconds of a request."""
HANDLERS = (
    "completions", "chat_completions", "models", "segments", "chunks", "health", "metrics", "page", "memory", "debug",
    "other",
)  # fmt: skip
disable_created_metrics()  # disables the ..._created samples, which would double the number of series


class GapHistogram(Collector):
    """The seconds between two tokens. The library's histogram takes one value at a time, under two locks. Here the gaps
    of a step's tokens, most of which are equal, are counted at once.
    """

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._family = partial(HistogramMetricFamily, name, text, labels=["model_name"])
        self._model = model_name
        self._counts = [0] * (len(SHORT) + 1)  # per bucket, not cumulative; the last has no bound
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(SHORT, seconds)] += count
        self._sum += count * seconds

    def collect(self) -> Iterator[Metric]:
        """The metric, which the registry requests at each scrape."""
        family = self._family()
        bounds = map(floatToGoString, (*SHORT, math.inf))
        family.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class ServerMetrics:
    """One server's metrics, in a separate registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        ProcessCollector(registry=self.registry)
        self._prompt_tokens = self._counter("infer:prompt_tokens", "Prompt tokens that were prefilled.")
        self._generation_tokens = self._counter("infer:generation_tokens", "Generated tokens.")
        self._preemptions = self._counter("infer:num_preemptions", "Preemptions.")
        self._prefix_queries = self._counter("infer:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("infer:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._drafts = self._counter("infer:spec_decode_num_drafts", "Times that a request had drafts in a step.")
        self._draft_tokens = self._counter("infer:spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted_tokens = self._counter("infer:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_by_position = Counter(
            "infer:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their position among the drafts of a request in a step, from 0.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._ttft = self._histogram("infer:time_to_first_token_seconds", "From arrival to the first token.", LONG)
        self._gaps = GapHistogram("infer:inter_token_latency_seconds", "Between a token and the next.", model_name)
        self.registry.register(self._gaps)
        self._whole = self._histogram("infer:e2e_request_latency_seconds", "From arrival to the end.", LONG)
        self._queued = self._histogram("infer:request_queue_time_seconds", "From arrival to the first step.", LONG)
        self._prefill = self._histogram("infer:request_prefill_time_seconds", "First step to first token.", LONG)
        self._decode = self._histogram("infer:request_decode_time_seconds", "First token to last token.", LONG)
        success = Counter(
            "infer:request_success",
            "Finished requests, by reason: stop, length, abort or error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._ended = {
            reason: success.labels(model_name, label)
            for reason, label in {
                FinishReason.EOS: "stop",
                FinishReason.STOP: "stop",
                FinishReason.LENGTH: "length",
                FinishReason.ABORT: "abort",
                FinishReason.ERROR: "error",
            }.items()
        }
        self._http = Counter(
            "infer:http_requests", "HTTP requests, by route and status.", ["handler", "status"], registry=self.registry
        )

    def watch(self, load: Callable[[], Any], is_alive: Callable[[], bool]) -> None:
        """Read the gauges from ``load``, which returns an ``EngineLoad``, and ``is_alive``, at each scrape."""
        self._gauge("infer:engine_alive", "1 while the engine runs, 0 after it has stopped.", is_alive)
        self._gauge("infer:num_requests_running", "Running requests.", lambda: load().num_running)
        self._gauge("infer:num_requests_waiting", "Waiting requests.", lambda: load().num_waiting)
        self._gauge("infer:kv_cache_usage_perc", "KV cache usage; 1 is 100 percent.", lambda: load().kv_usage)

    def on_first_token(self, stream: AnswerStream) -> None:
        assert stream.first_token is not None
        self._prompt_tokens.inc(stream.num_prompt_tokens)
        self._generation_tokens.inc()
        self._ttft.observe(stream.first_token - stream.arrived)
        if stream.scheduled is not None:
            self._queued.observe(stream.scheduled - stream.arrived)
            self._prefill.observe(stream.first_token - stream.scheduled)

    def on_gaps(self, gaps: Mapping[float, int]) -> None:
        """The tokens of a step that follow other tokens, counted by the seconds since the previous one."""
        self._generation_tokens.inc(sum(gaps.values()))
        for seconds, count in gaps.items():
            self._gaps.observe(seconds, count)

    def on_preemptions(self, count: int) -> None:
        self._preemptions.inc(count)

    def on_prefix_lookups(self, num_queries: int, num_hits: int) -> None:
        """Both count tokens."""
        self._prefix_queries.inc(num_queries)
        self._prefix_hits.inc(num_hits)

    def on_drafts(self, num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Both count tokens by position; each request with drafts has one at position 0."""
        self._drafts.inc(num_drafts[0] if num_drafts else 0)
        self._draft_tokens.inc(sum(num_drafts))
        self._accepted_tokens.inc(sum(num_accepted))
        for position, count in enumerate(num_accepted):
            self._accepted_by_position.labels(self._model, str(position)).inc(count)

    def on_end(self, stream: AnswerStream) -> None:
        assert stream.ended is not None
        assert stream.finish_reason is not None
        self._ended[stream.finish_reason].inc()
        self._whole.observe(stream.ended - stream.arrived)
        if stream.first_token is not None and stream.last_token is not None:
            self._decode.observe(stream.last_token - stream.first_token)

    def on_http(self, handler: str, status: int) -> None:
        """``handler`` is one of HANDLERS."""
        self._http.labels(handler if handler in HANDLERS else "other", str(status)).inc()

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model).set_function(read)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(self._model)
