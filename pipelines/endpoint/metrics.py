"""What a server counts and times, for Prometheus."""

from dataclasses import asdict
from typing import Any

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

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds


class ServingMetrics:
    """The metrics of one server."""

    def __init__(
        self, queue: DecoderQueue, switch: Switch, recorder: Recorder | None
    ) -> None:
        self._registry, self._switch = CollectorRegistry(), switch
        to: dict[str, Any] = {"namespace": "vlmdistill", "registry": self._registry}
        self._requests = Counter(
            "requests", "Chat requests by outcome", ["outcome"], **to
        )
        self._counters = {
            "prompt_tokens": Counter(
                "prompt_tokens", "Tokens of prompts, visual ones included", **to
            ),
            "tokens": Counter("completion_tokens", "Generated tokens", **to),
            "accepted": Counter(
                "accepted_tokens", "Generated tokens that the drafter proposed", **to
            ),
            "calls": Counter(
                "target_calls", "Calls of the target after the prefill", **to
            ),
            "seconds": Counter(
                "decoding_seconds", "Time of decoding, prefill included", **to
            ),
        }
        self._drafts = Counter("drafts", "Drafts that the target verified", **to)
        verified = (
            "Drafts whose likeliest chain was accepted before this position, from 0"
        )
        accepted = "Of these, drafts whose token at this position was accepted"
        self._chains = {
            "chain_tried": Counter("chain_tried_tokens", verified, ["position"], **to),
            "chain_accepted": Counter(
                "chain_accepted_tokens", accepted, ["position"], **to
            ),
        }
        text = "Time from a request to its first text, waiting included"
        self.first_text = Histogram("first_text_seconds", text, buckets=BUCKETS, **to)
        waiting = Gauge("requests_waiting", "Requests in the queue", **to)
        waiting.set_function(lambda: queue.waiting)
        Gauge("requests_running", "Requests being decoded", **to).set_function(
            queue.turn.locked
        )
        swaps = Gauge(
            "drafter_swaps", "New versions of the drafter that took over", **to
        )
        swaps.set_function(lambda: switch.trials.swaps)
        rollbacks = Gauge(
            "drafter_rollbacks",
            "Versions that were withdrawn, as they accepted less",
            **to,
        )
        rollbacks.set_function(lambda: switch.trials.rollbacks)
        if recorder:
            recorded = Gauge(
                "responses_recorded", "Responses in the log of --record", **to
            )
            recorded.set_function(lambda: recorder.recorded)
            lost = Gauge(
                "responses_unrecorded",
                "Responses that could not be written to it",
                **to,
            )
            lost.set_function(lambda: recorder.lost)
        self._versions = Gauge(
            "drafter", "1 for the version of the drafter in use", ["version"], **to
        )
        gained = "Tokens for each call of the target, a mean over the last requests of a version"
        self._gained = Gauge("drafter_tokens_per_call", gained, ["version"], **to)

    def ended(self, response: ServedResponse, outcome: str) -> None:
        """Count a request: outcome stop, length, refused, disconnected or error."""
        self._requests.labels(outcome).inc()
        counted = {"prompt_tokens": response.prompt_tokens, **asdict(response.decoding)}
        for name, counter in self._counters.items():
            counter.inc(counted[name])
        self._drafts.inc(counted["calls"] if response.drafter_name else 0)
        for name, counter in self._chains.items():
            for position, count in enumerate(counted[name]):
                counter.labels(str(position)).inc(count)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self._versions.clear()
        if name := self._switch.current.drafter_name:
            self._versions.labels(name).set(1)
        for version, gained in self._switch.trials.means().items():
            self._gained.labels(version).set(gained)
        return generate_latest(self._registry)
