"""`vlmdistill eval --engine openai:URL`: what a running server accepts, how fast it is, and when it fails."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import tiny
from tests.pipelines.bench.conftest import held_out
from tests.pipelines.bench.made_up import SOFTWARE
from tests.served_app import Served, serving
from tests.stores import web
from vlmdistill.cli.main import main
from vlmdistill.drafters.decoding.clock import Cycle
from vlmdistill.pipelines.bench import server_client
from vlmdistill.pipelines.bench.evaluate import Settings
from vlmdistill.pipelines.bench.records import FORMAT, Leak, write
from vlmdistill.pipelines.bench.served import ServerOptions, evaluate_server
from vlmdistill.pipelines.bench.served_records import (
    ServedEvaluation,
    ServedLoad,
    ServerCounts,
    ServerRun,
    TimedRequest,
    load_figures,
)
from vlmdistill.pipelines.endpoint.chat import ChatRequest
from vlmdistill.pipelines.endpoint.metrics import ServingMetrics
from vlmdistill.pipelines.endpoint.served_decoder import ServedDecoder, open_decoder
from vlmdistill.pipelines.report.results import ServerResult, of_servers
from vlmdistill.pipelines.report.tables import served
from vlmdistill.pipelines.workspace.workspace import Workspace

TREE, PROMPTS, TOKENS = "chain-4", 8, "24"


@pytest.fixture(scope="module")
def workspace(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Workspace:
    """A tiny target with eight held-out prompts: with no, one, two and three images, some rotated."""
    folder, contents = tmp_path_factory.mktemp("served"), []
    for number in range(PROMPTS):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is {number}?"}]
        for shown in range(number % 4):
            name = f"{number}-{shown}.{'png' if shown else 'jpg'}"
            image = tiny.picture(28 * (1 + shown), 56, number)
            exif = image.getexif()
            exif[0x0112] = 6 if number == 3 else 1
            image.save(folder / name, exif=exif)
            parts.insert(2 * shown, {"type": "image", "image": name})
        contents.append(parts)
    return held_out(str(checkpoint("qwen2_5_vl")), folder, contents)


@pytest.fixture(scope="module")
def decoder(workspace: Workspace) -> ServedDecoder:
    return open_decoder(workspace, "lookahead", tree=TREE)


@pytest.fixture(scope="module")
def server(decoder: ServedDecoder) -> Iterator[Served]:
    with serving(decoder) as served:
        yield served


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def url(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"


def arguments(workspace: Workspace, *more: str) -> list[str]:
    runs = str(workspace.root.parent)
    return [
        "eval",
        "--model",
        workspace.model,
        "--runs",
        runs,
        "--max-new-tokens",
        TOKENS,
        *more,
    ]


def records(workspace: Workspace, name: str) -> list[Path]:
    return [*(workspace.reports / "served").glob(f"{name}.*.json")]


def record(workspace: Workspace, name: str) -> ServedEvaluation:
    (file,) = records(workspace, name)
    return msgspec.json.decode(file.read_bytes(), type=ServedEvaluation)


@pytest.fixture
def measure(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Run the command with --json: its JSON, and stderr if the exit status is 1."""

    def run(*more: str, status: int = 0) -> Any:
        capsys.readouterr()
        assert main(arguments(workspace, "--json", *more)) == status
        shown = capsys.readouterr()
        return (json.loads(shown.out), shown.err) if status else json.loads(shown.out)

    return run


def test_a_server_accepts_what_eval_accepts(
    server: Served, workspace: Workspace, measure: Callable[..., Any]
) -> None:
    (offline,) = measure("lookahead", "--tree", TREE)["lookahead"]["temperatures"]
    more = ("--concurrency", "1", "--concurrency", "3", "--name", "mine")
    found = measure("--engine", f"openai:{url(server)}/v1", *more)
    assert (found["drafter"], [one["concurrency"] for one in found["loads"]]) == (
        "lookahead",
        [1, 3],
    )
    for load in found["loads"]:
        served = load["server"]
        assert served["drafts"] == offline["calls"]
        assert served["tokens"] == offline["tokens"]
        for name in ("tau", "accepted", "alpha"):
            assert served[name] == offline[name]
        assert served["accepted"] > 0
        assert served["seconds"] > 0
        assert 0 < served["first_seconds"]["low"] <= served["first_seconds"]["median"]
    assert [len(load.server.requests) for load in record(workspace, "mine").loads] == [
        PROMPTS,
        PROMPTS,
    ]


def test_a_baseline_gives_speedup_and_identical_responses(
    server: Served, decoder: ServedDecoder, measure: Callable[..., Any]
) -> None:
    with serving(replace(decoder, drafter=None, drafter_name=None)) as plain:
        found = measure(
            "--engine",
            f"openai:{url(server)}",
            "--baseline",
            url(plain),
            "--concurrency",
            "2",
        )
        alone = measure("--engine", f"openai:{url(plain)}")
    (load,) = found["loads"]
    assert (load["identical"], load["compared"]) == (PROMPTS, PROMPTS)
    assert load["intervals"].keys() == {"speedup", "decode_speedup"}
    interval = load["intervals"]["speedup"]
    assert 0 < interval["low"] <= load["speedup"] <= interval["high"]
    assert load["baseline"]["tokens"] == load["server"]["tokens"]
    absent = {"drafts", "accepted_tokens", "tau", "accepted", "alpha", "cached_prompts"}
    assert absent & load["baseline"].keys() == set()  # not zero
    assert not {"speedup", "identical", "baseline"} & alone["loads"][0].keys()


def test_sampling_is_measured_at_each_temperature(
    server: Served, measure: Callable[..., Any]
) -> None:
    options = ("--temperature", "0", "--temperature", "1", "--limit", "2")
    loads = measure("--engine", f"openai:{url(server)}", *options)["loads"]
    assert [(one["temperature"], one["server"]["requests"]) for one in loads] == [
        (0, 2),
        (1, 2),
    ]


@dataclass(frozen=True)
class Hooked(ServedDecoder):
    """Calls a function with the number of each request before it is decoded; the first one warms it up."""

    before: Callable[[int], None] = field(default=lambda number: None)
    asked: Iterator[int] = field(default_factory=count)

    def decode(
        self, request: ChatRequest, media: Path | None
    ) -> tuple[int, Iterator[Cycle]]:
        self.before(next(self.asked))
        return super().decode(request, media)


def hooked(
    decoder: ServedDecoder, before: Callable[[int], None], *, drafts: bool = True
) -> Hooked:
    """The decoder with a hook, and without its drafter."""
    drafting = (decoder.drafter, decoder.drafter_name) if drafts else (None, None)
    return Hooked(decoder.model, decoder.target, *drafting, decoder.tree, before=before)


def fail(wrong: bool) -> None:
    if wrong:
        raise RuntimeError("a fault")


def test_requests_that_fail_are_counted_and_end_in_exit_1(
    decoder: ServedDecoder, measure: Callable[..., Any]
) -> None:
    with serving(hooked(decoder, lambda number: fail(number % 2 == 1))) as served:
        found, said = measure("--engine", f"openai:{url(served)}", status=1)
    (load,) = found["loads"]
    assert (load["server"]["requests"], load["server"]["failed"]) == (
        PROMPTS // 2,
        PROMPTS // 2,
    )
    assert "tau" not in load["server"]  # its drafts are those of all requests
    assert "4 of 8 requests failed" in said
    assert "HTTP 500" in said


def test_a_server_that_dies_loses_no_finished_load(
    decoder: ServedDecoder,
    workspace: Workspace,
    measure: Callable[..., Any],
    failing: Callable[..., str],
) -> None:
    more = ("--concurrency", "1", "--concurrency", "2", "--name", "dead")
    with serving(hooked(decoder, lambda number: fail(True))) as served:
        line = failing(
            *arguments(workspace, "--engine", f"openai:{url(served)}", *more)
        )
    assert "all 16 requests failed" in line
    assert not records(workspace, "dead")
    with serving(hooked(decoder, lambda number: fail(number > PROMPTS))) as served:
        found, said = measure("--engine", f"openai:{url(served)}", *more, status=1)
    assert [one["server"]["requests"] for one in found["loads"]] == [PROMPTS, 0]
    assert "8 of 16 requests failed" in said
    assert len(record(workspace, "dead").failed) == PROMPTS


def test_an_interrupt_promises_only_to_continue_what_it_does(
    decoder: ServedDecoder, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(number: int) -> None:
        """At the first request of the second load; the server runs in this process."""
        if number == 1 + PROMPTS:
            os.kill(os.getpid(), signal.SIGINT)

    with serving(hooked(decoder, interrupt)) as served:
        more = ("--concurrency", "1", "--concurrency", "2", "--name", "halted")
        assert (
            main(arguments(workspace, "--engine", f"openai:{url(served)}", *more))
            == 130
        )
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert len(record(workspace, "halted").loads) == 1


def test_a_load_is_in_the_record_before_the_next_ends(
    server: Served, workspace: Workspace
) -> None:
    kept: list[int] = []

    def look(done: int, total: int, remark: str = "") -> None:
        if done == PROMPTS + 1:
            kept.extend(one.concurrency for one in record(workspace, "early").loads)

    load = Settings(concurrencies=(1, 2), max_new_tokens=2)
    early = ServerOptions(url=url(server), name="early")
    evaluate_server(workspace, early, load, on_prompt=look)
    assert kept == [1]


def test_failed_reads_of_the_metrics_are_not_counted_as_zero(
    server: Served, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, looks = ServingMetrics.text, count()
    monkeypatch.setattr(
        ServingMetrics, "text", lambda self: text(self) if next(looks) % 2 else b""
    )
    load = Settings(concurrencies=(1, 2), max_new_tokens=8)
    deaf = ServerOptions(url=url(server), name="deaf")
    loads = evaluate_server(workspace, deaf, load).loads
    first, second = (one.server for one in loads)
    assert first.counts == ServerCounts()  # the first look failed
    assert second.counts.generated == sum(one.tokens or 0 for one in second.requests)


def test_servers_alternate_at_a_high_concurrency(
    decoder: ServedDecoder, measure: Callable[..., Any]
) -> None:
    order: list[str | None] = []
    drafting = hooked(decoder, lambda number: order.append("lookahead"))
    alone = hooked(decoder, lambda number: order.append(None), drafts=False)
    with serving(drafting) as served, serving(alone) as plain:
        measure(
            "--engine",
            f"openai:{url(served)}",
            "--baseline",
            url(plain),
            "--concurrency",
            "5",
        )
    turns = [
        (name, len(list(some))) for name, some in groupby(order[2:])
    ]  # after the warm-up
    assert turns == [("lookahead", 5), (None, 8), ("lookahead", 3)]


@pytest.mark.parametrize(("tokens", "first"), [(1, 0.5), (4, 2.0)])
def test_the_decode_speedup_of_one_token_or_one_chunk_is_unknown(
    tokens: int, first: float
) -> None:
    requests = tuple(
        TimedRequest(
            key=str(key),
            tokens=tokens,
            seconds=2.0,
            first_seconds=first,
            finish="stop",
            response="hash",
        )
        for key in range(PROMPTS)
    )
    run = ServerRun(seconds=16.0, requests=requests, failed=(), counts=ServerCounts())
    found = load_figures(
        ServedLoad(temperature=0, concurrency=1, server=run, baseline=run)
    )
    assert (found.speedup, found.decode_speedup) == (1, None)
    assert found.intervals is not None
    assert found.intervals.keys() == {"speedup"}


def served_run(counts: ServerCounts | None = None, **changes: Any) -> ServerRun:
    fields: dict[str, Any] = {"tokens": 20, "finish": "stop", "response": "hash"}
    fields |= {"seconds": 2.0, "first_seconds": 0.5, **changes}
    requests = tuple(TimedRequest(key=str(key), **fields) for key in range(PROMPTS))
    counts = counts or ServerCounts()
    return ServerRun(seconds=16.0, requests=requests, failed=(), counts=counts)


def drafts(accepted: int) -> ServerCounts:
    chain: Any = {"chain_tried": (40, 30), "chain_accepted": (30, 20)}
    return ServerCounts(drafts=40, accepted=accepted, **chain)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (served_run(drafts(50)), None),
        (served_run(tokens=40), "does not count them right"),  # the same text
        (served_run(tokens=40, response="other"), "differ from the baseline's"),
        (served_run(drafts(90)), "90 accepted tokens in 40 drafts of at most 2"),
        (served_run(drafts(70), tokens=4), "the responses have 24 after their first"),
    ],
)
def test_what_a_server_cannot_have_counted_is_a_warning(
    run: ServerRun, text: str | None
) -> None:
    load = ServedLoad(temperature=0, concurrency=1, server=run, baseline=served_run())
    warnings = load_figures(load).warnings
    assert bool(warnings) == (text is not None)
    assert text is None or any(text in warning for warning in warnings)


def test_a_speedup_over_a_baseline_that_drafts_is_in_doubt() -> None:
    load = ServedLoad(
        temperature=0,
        concurrency=1,
        server=served_run(drafts(50)),
        baseline=served_run(drafts(50)),
    )
    (doubt,) = load_figures(load).doubts
    assert "start it without a drafter" in doubt


def greedily(run: ServerRun, openings: Sequence[str], temperature: float) -> ServerRun:
    """The run, whose greedy responses begin so."""
    greedy = tuple(
        replace(request, opening=opening)
        for request, opening in zip(run.requests, openings, strict=True)
    )
    if temperature:
        return replace(run, greedy=greedy)
    return replace(run, requests=greedy)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("dtypes", "others", "doubt"),
    [
        (("", ""), 0, None),
        (("", ""), 4, None),  # all responses differ, and some begin otherwise
        (("", ""), 5, "5 of 8 greedy responses differ"),
        (("bfloat16", "bfloat16"), 4, None),
        (("bfloat16", "bfloat16"), 5, "5 of 8 greedy responses differ"),
        (("float32", "float32"), 0, "8 of 8 greedy responses differ"),
        (("float32", "bfloat16"), 0, "in float32, and the baseline in bfloat16"),
    ],
)
def test_a_baseline_of_another_target_is_in_doubt(
    dtypes: tuple[str, str], others: int, doubt: str | None, temperature: float
) -> None:
    """In half precision most long responses differ by rounding, and few of their beginnings."""
    begun = ["other"] * others + ["same"] * (PROMPTS - others)
    own = greedily(served_run(response="rounded"), begun, temperature)
    plain = greedily(served_run(), ["same"] * PROMPTS, temperature)
    load = ServedLoad(
        temperature=temperature,
        concurrency=1,
        server=replace(own, dtype=dtypes[0]),
        baseline=replace(plain, dtype=dtypes[1]),
    )
    figures = load_figures(load)
    assert len(figures.doubts) == (doubt is not None)
    (warning,) = figures.warnings
    assert (doubt or "by near-ties, or it is not lossless") in warning
    result = ServerResult(served_evaluation(load), load)
    assert bool(result.facts["not_ranked"]) == (doubt is not None)


def test_a_server_beside_another_target_has_no_speedup(
    decoder: ServedDecoder,
    server: Served,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    measure: Callable[..., Any],
    workspace: Workspace,
) -> None:
    """Which the baseline serves under the same name; at temperature 1 alone, too."""
    other_workspace = Workspace.of(str(checkpoint("qwen2_vl")), tmp_path)
    other = replace(open_decoder(other_workspace, None), model=decoder.model)
    same = replace(decoder, drafter=None, drafter_name=None)
    engine = ("--engine", f"openai:{url(server)}", "--temperature", "0,1")
    for plain, name, is_doubted in ((same, "sound", False), (other, "beside", True)):
        with serving(plain) as baseline:
            found = measure(*engine, "--baseline", url(baseline), "--name", name)
        doubts = [
            any("another target" in doubt for doubt in load["doubts"])
            for load in found["loads"]
        ]
        assert doubts == [is_doubted, is_doubted]
        for result in of_servers([record(workspace, name)]):
            assert all(text.startswith(f"{name} at") for text in result.warnings)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(("seconds", "warned"), [(2.0, 0), (1.5, 1), (9.0, 2)])
def test_times_of_requests_fill_those_of_the_run(
    concurrency: int, seconds: float, warned: int
) -> None:
    """Requests at a time overlap, so there they may have less."""
    run = served_run(seconds=seconds)
    load = ServedLoad(
        temperature=0, concurrency=concurrency, server=run, baseline=served_run()
    )
    is_warned = bool(load_figures(load).warnings)
    assert is_warned == (warned == 2 or (warned == 1 and concurrency == 1))


@pytest.mark.parametrize(
    ("first", "concurrency", "warned"),
    [(0.5, 1, False), (0.4, 1, True), (0.4, 4, False)],
)
def test_a_baseline_that_is_slower_before_the_first_text_is_warned_of(
    first: float, concurrency: int, warned: bool
) -> None:
    """It has other options than the server, or is another machine; requests at a time may wait."""
    run = served_run(first_seconds=first)
    load = ServedLoad(
        temperature=0, concurrency=concurrency, server=run, baseline=served_run()
    )
    warnings = load_figures(load).warnings
    assert any("first text" in text for text in warnings) == warned


def chosen(run: ServerRun, *places: int) -> ServerRun:
    """Of these requests alone, and the seconds of these."""
    requests = tuple(run.requests[at] for at in places)
    seconds = sum(request.seconds for request in requests)
    return replace(run, requests=requests, seconds=seconds)


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 0, 1, 2, 3, 4, 5, 6, 7)])
def test_a_speedup_of_chosen_requests_is_warned_of(places: tuple[int, ...]) -> None:
    def warnings(server: ServerRun) -> tuple[str, ...]:
        load = ServedLoad(
            temperature=0, concurrency=1, server=server, baseline=served_run()
        )
        return load_figures(load).warnings

    def table(server: ServerRun) -> str:
        load = ServedLoad(
            temperature=0, concurrency=1, server=server, baseline=served_run()
        )
        return str(served([ServerResult(served_evaluation(load), load)])[0])

    assert "1.00 (1.00-1.00)" in table(chosen(served_run(), *range(PROMPTS)))
    assert "1.00" not in table(chosen(served_run(), *places))
    assert not warnings(chosen(served_run(), *range(PROMPTS)))
    assert any(
        "chosen prompts" in text for text in warnings(chosen(served_run(), *places))
    )


def served_evaluation(*loads: ServedLoad, **changes: Any) -> ServedEvaluation:
    fields: dict[str, Any] = {
        "format": FORMAT,
        "name": "in-vllm",
        "url": "http://127.0.0.1:8000",
        "model": "demo",
        "drafter": None,
        "baseline": "http://127.0.0.1:8001",
        "prompt_set": "hash",
        "max_new_tokens": 64,
        "seed": 0,
        "measured": "2026-01-01 00:00:00",
        "software": SOFTWARE,
        "loads": loads,
    }
    return ServedEvaluation(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text", "has_speedup"),
    [
        ({}, None, True),  # a server that was running
        ({"weights": "hash"}, "it is not known what it was trained on", True),
        ({"leak": Leak(samples=9)}, None, True),
        ({"leak": Leak(samples=9, unknown=2)}, "were not compared", True),
        ({"leak": Leak(samples=9, alike=("1", "2"))}, "2 of these prompts", False),
    ],
)
def test_what_a_served_drafter_has_seen_is_said(
    changes: dict[str, Any], text: str | None, has_speedup: bool
) -> None:
    run = served_run()
    load = ServedLoad(temperature=0, concurrency=1, server=run, baseline=run)
    result = ServerResult(served_evaluation(load, **changes), load)
    assert bool(result.warnings) == (text is not None)
    assert text is None or text in result.warnings[0]
    row = served([result])[0]
    assert row[0] == ("in-vllm" if has_speedup else "in-vllm (in doubt)")
    assert (row[8] != "-") == has_speedup
    assert bool(result.facts["not_ranked"]) != has_speedup


def test_one_of_several_served_evaluations_is_called_that() -> None:
    """So that none can be chosen by its speedup without a word."""
    run = served_run()
    load = ServedLoad(temperature=0, concurrency=1, server=run, baseline=run)
    some = [
        served_evaluation(load, measured=f"2026-01-0{day} 00:00:00")
        for day in (1, 2, 3)
    ]
    (latest, *_) = of_servers(some)
    (warning,) = latest.warnings
    assert "one of 3 repeated evaluations" in warning
    assert warning.startswith(served([latest])[0][0])  # as its row
    assert of_servers(some[:1])[0].warnings == []


def test_served_evaluations_of_two_modes_are_not_repeated() -> None:
    run = served_run()
    load = ServedLoad(temperature=0, concurrency=1, server=run, baseline=run)
    results = of_servers(
        [served_evaluation(load, thinking=mode) for mode in ("", "off", "on")]
    )
    assert len({result.kind for result in results}) == 3
    assert not any(result.warnings for result in results)
    names = {result.facts["thinking"]: served([result])[0][0] for result in results}
    assert names == {
        "": "in-vllm",
        "off": "in-vllm, thinking off",
        "on": "in-vllm, thinking on",
    }


def test_served_evaluations_alone_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.of("demo-small", tmp_path)
    run = served_run()
    load = ServedLoad(temperature=0, concurrency=1, server=run, baseline=run)
    file = workspace.reports / "served" / "in-vllm.json"
    file.parent.mkdir(parents=True)
    write(served_evaluation(load), file)
    command = ["eval", "--list", "--model", "demo-small", "--runs", str(tmp_path)]
    assert main(command) == 0
    assert "in-vllm" in capsys.readouterr().out


def test_a_list_warns_of_the_training_of_a_served_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.of("demo-small", tmp_path)
    run = served_run()
    load = ServedLoad(temperature=0, concurrency=1, server=run, baseline=run)
    file = workspace.reports / "served" / "in-vllm.json"
    file.parent.mkdir(parents=True)
    write(served_evaluation(load, leak=Leak(samples=9, unknown=2)), file)
    command = ["eval", "--list", "--model", "demo-small", "--runs", str(tmp_path)]
    assert main(command) == 0
    assert "were not compared with these prompts" in capsys.readouterr().out


def test_responses_beyond_the_limit_are_a_warning(workspace: Workspace) -> None:
    with web.serving(toy()) as http:
        url_of_toy = f"http://127.0.0.1:{http.server_port}"
        options = ServerOptions(url=url_of_toy, served_model="toy", name="wordy")
        settings = Settings(max_new_tokens=4, limit=2)
        made = evaluate_server(workspace, options, settings)
    (result,) = of_servers([made])
    assert any("more than 4 tokens" in warning for warning in result.warnings)


class Page(BaseHTTPRequestHandler):
    """A web site that is no server of the OpenAI API."""

    def do_GET(self) -> None:
        body = b"<html></html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    with web.serving(ThreadingHTTPServer(("127.0.0.1", 0), Page)) as http:
        yield f"http://127.0.0.1:{http.server_port}"


class Toy(BaseHTTPRequestHandler):
    """A server of a target that quotes prompts in its errors, knows 40 positions, and may give NaN."""

    finite = True
    room = 8  # tokens after a prompt

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "toy"}]} if "models" in self.path else "")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "What is 3?" in json.dumps(asked["messages"]):
            self.answer(400, {"error": {"message": "cannot read What is 3?"}})
        elif asked.get("max_tokens", 0) > self.room:
            message = "'max_tokens' or 'max_completion_tokens' is too large"
            self.answer(400, {"error": {"message": message}})
        elif asked.get("logprobs"):
            token = {"token": "!", "logprob": -0.5 if self.finite else None}
            self.answer(200, {"choices": [{"logprobs": {"content": [token]}}]})
        else:
            text = {"delta": {"content": "!" * 8}, "finish_reason": "length"}
            events = [{"choices": [text]}, {"usage": {"completion_tokens": 8}}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self.send("".join([*lines, "data: [DONE]\n\n"]).encode())

    def answer(self, status: int, body: Any) -> None:
        self.send(json.dumps(body).encode(), status)

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def toy(**changes: Any) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", 0), type("Changed", (Toy,), changes))


def test_what_a_server_says_of_a_prompt_is_shown_and_not_recorded(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    with web.serving(toy()) as http:
        engine = ("--engine", f"openai:http://127.0.0.1:{http.server_port}")
        more = ("--served-model", "toy", "--name", "quoting", "--max-new-tokens", "8")
        assert main(arguments(workspace, *engine, *more)) == 1
    assert "cannot read What is 3?" in capsys.readouterr().err
    (failed,) = record(workspace, "quoting").failed
    assert failed.reason == "HTTP 400"
    (file,) = records(workspace, "quoting")
    assert "What is" not in file.read_text()


def test_a_response_ends_at_the_last_position_of_a_server(workspace: Workspace) -> None:
    """As in this process, where `--max-new-tokens` may be more than the target has room for."""
    with web.serving(toy()) as http:
        served = ServerOptions(
            url=f"http://127.0.0.1:{http.server_port}", served_model="toy", name="long"
        )
        settings = Settings(max_new_tokens=512, limit=3)
        made = evaluate_server(workspace, served, settings)
    assert [one.tokens for one in made.loads[0].server.requests] == [8, 8, 8]
    assert not made.failed


def test_a_server_whose_logits_are_not_finite_is_refused(
    workspace: Workspace, failing: Callable[..., str]
) -> None:
    more = ("--served-model", "toy", "--name", "nan", "--max-new-tokens", "8")
    with web.serving(toy(finite=False)) as http:
        engine = ("--engine", f"openai:http://127.0.0.1:{http.server_port}")
        assert "not finite" in failing(*arguments(workspace, *engine, *more))
    assert not records(workspace, "nan")


def test_a_server_that_cannot_be_used_is_one_line(
    workspace: Workspace,
    server: Served,
    decoder: ServedDecoder,
    site: str,
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[..., str],
) -> None:
    def line(engine: str, *more: str) -> str:
        return failing(*arguments(workspace, "--engine", f"openai:{engine}", *more))

    assert "cannot be reached" in line("http://127.0.0.1:1")
    assert "cannot be reached" in line(url(server), "--baseline", "http://127.0.0.1:1")
    assert "is not a URL" in line(url(server), "--baseline", "")
    assert "is not a server of the OpenAI API" in line(site)
    assert "is not a URL" in line("127.0.0.1:8000")
    assert "does not serve 'other'" in line(url(server), "--served-model", "other")
    assert "--concurrency 9" in line(url(server), "--concurrency", "9")
    assert "--temperature 3" in line(url(server), "--temperature", "3")
    with serving(decoder, key="a key") as locked:
        assert "needs a key: set OPENAI_API_KEY" in line(url(locked))
        monkeypatch.setenv("OPENAI_API_KEY", "another key")
        assert "refuses the key in OPENAI_API_KEY" in line(url(locked))
        monkeypatch.setenv("OPENAI_API_KEY", "a key")
        assert (
            main(
                arguments(
                    workspace, "--engine", f"openai:{url(locked)}", "--limit", "1"
                )
            )
            == 0
        )


def test_a_prompt_with_a_video_is_refused_by_name(
    workspace: Workspace, server: Served, failing: Callable[..., str], tmp_path: Path
) -> None:
    tiny.film(tmp_path / "film.mp4", tiny.clip(4, 56, 28, 0))
    row = {
        "conversations": [{"from": "human", "value": "What moves?"}],
        "video": "film.mp4",
    }
    (tmp_path / "row.json").write_text(json.dumps([row]))
    file = tmp_path / "prompts.parquet"
    assert (
        main(
            [
                "prompts",
                str(tmp_path / "row.json"),
                "--split",
                "eval",
                "--out",
                str(file),
            ]
        )
        == 0
    )
    engine = arguments(workspace, "--engine", f"openai:{url(server)}")
    assert "film.mp4" in failing(*engine, "--prompts", str(file))


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["lookahead", "--concurrency", "2"],
        ["lookahead", "--baseline", "http://127.0.0.1:1"],
        ["lookahead", "--engine", "openai:http://127.0.0.1:1"],
        ["--engine", "openai:http://127.0.0.1:1", "--tree", "chain-4"],
        ["--engine", "openai:http://127.0.0.1:1", "--compile"],
        ["--engine", "vllm"],
        ["lookahead", "--engine", "vllm", "--tree", "chain-4"],
        ["lookahead", "--engine", "vllm", "--anyway"],
        ["lookahead", "--engine", "vllm", "--baseline", "http://127.0.0.1:1"],
        ["lookahead", "--engine", "sglang"],
    ],
)
def test_what_belongs_to_the_other_engine_is_a_usage_error(
    more: list[str], workspace: Workspace
) -> None:
    assert main(arguments(workspace, *more)) == 2


VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 6.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 3.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.23e+02
vllm:mm_cache_queries_total{engine="0",model_name="m"} 4.0
vllm:mm_cache_hits_total{engine="0",model_name="m"} 1.0
"""


def test_counters_are_summed_over_engines_and_a_restart_is_not_counted() -> None:
    whole = server_client.parse(VLLM)
    assert server_client.between(dict.fromkeys(whole, 0), whole) == ServerCounts(
        generated=123,
        images=4,
        cached_images=1,
        drafts=16,
        accepted=15,
        chain_tried=(16, 12),
        chain_accepted=(12, 3),
    )
    assert server_client.between(whole, whole) == ServerCounts(
        generated=0, images=0, cached_images=0
    )  # there was no draft
    assert server_client.between(whole, {("generated", 0): 1}) == ServerCounts()
    assert (
        server_client.between({}, whole) == ServerCounts()
    )  # counted since the server started
