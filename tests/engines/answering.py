"""`make test-engine`: a server with a drafter answers every kind of request as one without would.

Not collected by name: it needs the environment that `make engine` creates, and minutes.
"""

import base64
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace as changed

from tests.engines import parity
from tests.engines.blocks import SMALL
from tests.engines.serving import FEW, MODEL, MORE, SITE, Served
from vlmdistill.pipelines.bench.served import chat_messages
from vlmdistill.pipelines.bench.server_client import Counters, between, parse
from vlmdistill.pipelines.cluster.engine_environment import engine_python
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.media.frames import media_file
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.vllm.launch import vllm_server

SETTINGS = {
    "wren:cell": MORE["wren:cell"],
    "dflash:text": SMALL,
    "dspark:text": [*SMALL, "--set", "from_anchor=false"],
}
SERVERS = {
    "sparrow": [],
    "hass": ["--enable-prefix-caching", "--block-size", "32"],
    "wren:cell": ["--max-num-batched-tokens", "96"],  # prompts in several steps
    "dflash:text": [],
    "dspark:text": [],
}
"""Further arguments of `vllm serve`; `dspark` runs on the V2 runner alone, whose kernels are interpreted."""
V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

pytestmark = pytest.mark.timeout(1800)


@dataclass
class Answering:
    """A vLLM with a drafter."""

    name: str
    url: str
    served: Served

    @property
    def asked(self) -> tuple[int, int]:
        """Prompts and tokens of a response: few where kernels are interpreted."""
        return (4, 24) if self.name.startswith("dspark") else (FEW, 256)

    def ask(self, body: dict[str, Any]) -> Any:
        """The only choice of a completion, or the status if it is not 200."""
        sent = {"model": MODEL, "temperature": 0, "return_token_ids": True, **body}
        response = httpx2.post(
            f"{self.url}/v1/chat/completions", json=sent, timeout=600
        )
        if response.status_code != 200:
            return response.status_code
        (choice,) = response.json()["choices"]
        return choice

    def ask_all(self, bodies: Sequence[dict[str, Any]], at_once: int = 8) -> list[Any]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.ask, bodies))

    def counters(self) -> Counters:
        return parse(httpx2.get(f"{self.url}/metrics").text)

    def without_videos(self) -> list[int]:
        """The prompts whose media an API takes as they are: text, an image, three images."""
        numbers = [
            number
            for number, question in enumerate(self.served.job.questions)
            if not question.videos
        ]
        return numbers[: self.asked[0]]


def messages(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt with at most one video, which is the file as it is."""
    part = prompt.messages[0]["content"][0]
    if part["type"] != "video":
        return chat_messages(prompt)
    video = base64.b64encode(media_file(part).read_bytes()).decode()
    shown = {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{video}"},
    }
    words = prompt.messages[0]["content"][1:]
    return [{"role": "user", "content": [shown, *words]}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    engine_python()  # fails at once without one
    names = ["sparrow", "hass", "wren", "dflash"]
    return Served(tmp_path_factory.mktemp("answering"), names, SETTINGS)


def films(served: Served) -> list[dict[str, Any]]:
    """Two requests with a video."""
    questions = zip(served.job.questions, served.prompts, strict=True)
    shown = [prompt for question, prompt in questions if question.videos]
    return [{"messages": messages(prompt), "max_tokens": 24} for prompt in shown[:2]]


@pytest.fixture(scope="module")
def filmed(served: Served, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a server without a drafter says about two videos."""
    log = tmp_path_factory.mktemp("plain") / "log"
    target = EMBEDDED[MODEL]
    with vllm_server(target, MODEL, "float32", log, whole_images=False) as url:
        return Answering("", url, served).ask_all(films(served))


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest,
    served: Served,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Answering]:
    name = str(request.param)
    folder = tmp_path_factory.mktemp("server")
    drafter = served.exported(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        if name.startswith("dspark"):
            (folder / "sitecustomize.py").write_text(SITE)
            patch.setenv("PYTHONPATH", str(folder), prepend=":")
            for variable, value in V2.items():
                patch.setenv(variable, value)
        with vllm_server(
            EMBEDDED[MODEL],
            MODEL,
            "float32",
            folder / "log",
            drafter,
            whole_images=False,
            arguments=SERVERS[name],
        ) as url:
            yield Answering(name, url, served)


def check_counts(server: Answering, numbers: Sequence[int]) -> None:
    """Ask some questions: the tokens are the target's, and the counts are those of `eval`."""
    served = server.served
    _, tokens = server.asked
    prompts = [served.prompts[number] for number in numbers]
    bodies = [
        {"messages": messages(prompt), "max_tokens": tokens} for prompt in prompts
    ]
    before = server.counters()
    choices = server.ask_all(bodies)
    counts = between(before, server.counters())
    plain = [served.plain.responses[number][:tokens] for number in numbers]
    assert [choice["token_ids"] for choice in choices] == plain
    written = served.exported(server.name)
    job = changed(served.job, draft_tokens=written.draft_tokens, max_new_tokens=tokens)
    folder = served.workspace.drafter(server.name.replace(":", "-"))
    ours = parity.ours(served.target, served.target.drafter(folder), prompts, job)
    assert counts.drafts == ours.drafts
    assert counts.accepted
    if tokens == served.job.max_new_tokens:
        assert counts.accepted == ours.accepted


def test_eight_clients_get_the_tokens_of_the_target_at_the_counts_of_eval(
    server: Answering,
) -> None:
    check_counts(server, server.without_videos())


def test_a_reset_of_the_prefix_cache_changes_nothing_although_requests_run(
    server: Answering,
) -> None:
    """Requests that run are read again, then others at eval's counts."""
    numbers = server.without_videos()[:4]
    served = server.served
    bodies = [
        {"messages": messages(served.prompts[number]), "max_tokens": 24}
        for number in numbers
    ]
    call = f"{server.url}/reset_prefix_cache?reset_running_requests=true"
    with ThreadPoolExecutor(1) as asking:
        answering = asking.submit(server.ask_all, bodies)
        for _ in range(3):
            time.sleep(0.3)
            assert httpx2.post(call, timeout=600).status_code == 200
    plain = [served.plain.responses[number][:24] for number in numbers]
    assert [choice["token_ids"] for choice in answering.result()] == plain
    check_counts(server, numbers)


def test_videos_are_answered_as_without_a_drafter(
    server: Answering, filmed: list[Any]
) -> None:
    choices = server.ask_all(films(server.served))
    assert [choice["token_ids"] for choice in choices] == [
        choice["token_ids"] for choice in filmed
    ]


def test_clients_that_leave_in_the_middle_of_a_response_disturb_no_other(
    server: Answering,
) -> None:
    served, numbers = server.served, server.without_videos()[:4]
    bodies = [
        {"messages": messages(served.prompts[number]), "max_tokens": 24}
        for number in numbers
    ]

    def leave(body: dict[str, Any]) -> None:
        sent = {"model": MODEL, "temperature": 0, "stream": True, **body}
        with httpx2.stream(
            "POST", f"{server.url}/v1/chat/completions", json=sent, timeout=600
        ) as stream:
            assert next(stream.iter_lines()).startswith("data:")

    with ThreadPoolExecutor(4) as leaving:
        left = [leaving.submit(leave, body) for body in bodies]
        choices = server.ask_all(bodies, at_once=4)
        for future in left:
            future.result()
    plain = [served.plain.responses[number][:24] for number in numbers]
    assert [choice["token_ids"] for choice in choices] == plain


def check_forms_and_samples(server: Answering, shown: dict[str, Any]) -> None:
    """Triton's interpreter fails at both without a drafter as well."""
    if server.name.startswith("dspark"):
        return
    words = ["red", "blue"]
    chosen = server.ask({**shown, "structured_outputs": {"choice": words}})
    assert chosen["message"]["content"] in words
    digits = server.ask({**shown, "structured_outputs": {"regex": "[0-9]{4}"}})
    assert digits["message"]["content"].isdigit()
    pair = {"regex": r'\{"a": "(red|blue)"\}'}
    written = server.ask({**shown, "structured_outputs": pair, "max_tokens": 64})
    assert json.loads(written["message"]["content"])["a"] in words
    before = server.counters()
    for sampled in (
        {"temperature": 1, "top_k": 20},
        {"temperature": 1, "top_p": 0.9, "seed": 7},
        {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ):
        assert server.ask({**shown, **sampled})["token_ids"]
    assert between(before, server.counters()).drafts
    # vLLM refuses it beside any drafter.
    assert server.ask({**shown, "min_p": 0.1, "temperature": 1}) == 400


def test_settings_of_a_request_hold(server: Answering) -> None:
    """Log-probabilities, the end of a response, its form, and samples."""
    number = server.without_videos()[0]
    plain = server.served.plain.responses[number]
    shown = {"messages": messages(server.served.prompts[number]), "max_tokens": 16}
    greedy = server.ask({**shown, "logprobs": True, "top_logprobs": 3})
    assert greedy["token_ids"] == plain[:16]
    for token in greedy["logprobs"]["content"]:
        likely = max(token["top_logprobs"], key=lambda other: other["logprob"])
        assert token["token"] == likely["token"]
    text = greedy["message"]["content"]
    word = text.split()[-2]
    ended = server.ask({**shown, "stop": word})
    assert ended["message"]["content"] == text[: text.index(word)]
    long = server.ask({**shown, "min_tokens": 16, "ignore_eos": True})
    assert len(long["token_ids"]) == 16
    assert server.ask({**shown, "max_tokens": 1})["token_ids"] == plain[:1]
    check_forms_and_samples(server, shown)
    assert server.ask(shown)["token_ids"] == plain[:16]
