"""The counts and times of a server, for Prometheus."""

from dataclasses import asdict

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from vlmdistill.pipelines.endpoint.decoder_queue import DecoderQueue
from vlmdistill.pipelines.endpoint.served_decoder import ServedResponse
from vlmdistill.pipelines.endpoint.switch import Switch
from vlmdistill.pipelines.request_log import Recorder

NAMESPACE = "vlmdistill"
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds


class ServingMetrics:
    """The metrics of one server."""

    def __init__(
        self, queue: DecoderQueue, switch: Switch, recorder: Recorder | None
    ) -> None:
        self._registry, self._switch = CollectorRegistry(), switch
        self._requests = self._counter(
            "requests", "Chat requests by outcome", "outcome"
        )
        self._count_decodings()
        self.first_text = Histogram(
            "first_text_seconds",
            "Time from a request to its first text, waiting included",
            buckets=BUCKETS,
            namespace=NAMESPACE,
            registry=self._registry,
        )
        self._watch_queue(queue)
        self._watch_switch(switch)
        if recorder:
            self._watch_recorder(recorder)

    def _count_decodings(self) -> None:
        """The counters of tokens, calls and seconds, by their field of `Decoding`."""
        self._counters = {
            "prompt_tokens": self._counter(
                "prompt_tokens", "Tokens of prompts, visual ones included"
            ),
            "tokens": self._counter("completion_tokens", "Generated tokens"),
            "accepted": self._counter(
                "accepted_tokens", "Generated tokens that the drafter proposed"
            ),
            "calls": self._counter(
                "target_calls", "Calls of the target after the prefill"
            ),
            "seconds": self._counter(
                "decoding_seconds", "Time of decoding, prefill included"
            ),
        }
        self._drafts = self._counter("drafts", "Drafts that the target verified")
        self._chains = {
            "chain_tried": self._counter(
                "chain_tried_tokens",
                "Drafts whose likeliest chain was accepted before this position, from 0",
                "position",
            ),
            "chain_accepted": self._counter(
                "chain_accepted_tokens",
                "Of these, drafts whose token at this position was accepted",
                "position",
            ),
        }

    def _watch_queue(self, queue: DecoderQueue) -> None:
        waiting = self._gauge("requests_waiting", "Requests in the queue")
        waiting.set_function(lambda: queue.waiting)
        running = self._gauge("requests_running", "Requests being decoded")
        running.set_function(queue.turn.locked)

    def _watch_switch(self, switch: Switch) -> None:
        swaps = self._gauge(
            "drafter_swaps", "New versions of the drafter that took over"
        )
        swaps.set_function(lambda: switch.trials.swaps)
        rollbacks = self._gauge(
            "drafter_rollbacks", "Versions that were withdrawn, as they accepted less"
        )
        rollbacks.set_function(lambda: switch.trials.rollbacks)
        self._versions = self._gauge(
            "drafter", "1 for the version of the drafter in use", "version"
        )
        self._tokens_per_call = self._gauge(
            "drafter_tokens_per_call",
            "Tokens for each call of the target, a mean over the last requests of a version",
            "version",
        )

    def _watch_recorder(self, recorder: Recorder) -> None:
        recorded = self._gauge("responses_recorded", "Responses in the log of --record")
        recorded.set_function(lambda: recorder.recorded)
        lost = self._gauge(
            "responses_unrecorded", "Responses that could not be written to it"
        )
        lost.set_function(lambda: recorder.lost)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self._registry)

    def ended(self, response: ServedResponse, outcome: str) -> None:
        """Count a request: outcome stop, length, refused, disconnected or error."""
        self._requests.labels(outcome).inc()
        counts = {"prompt_tokens": response.prompt_tokens, **asdict(response.decoding)}
        for name, counter in self._counters.items():
            counter.inc(counts[name])
        if response.drafter_name:
            self._drafts.inc(counts["calls"])
        for name, counter in self._chains.items():
            for position, count in enumerate(counts[name]):
                counter.labels(str(position)).inc(count)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self._versions.clear()
        version_in_use = self._switch.current.drafter_name
        if version_in_use:
            self._versions.labels(version_in_use).set(1)
        for version, tokens_per_call in self._switch.trials.means().items():
            self._tokens_per_call.labels(version).set(tokens_per_call)
        return generate_latest(self._registry)
