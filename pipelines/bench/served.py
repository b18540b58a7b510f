"""Evaluates a server: sends it the held-out prompts, times the responses, and reads its own counts.

The server runs already, or vLLM is started for each drafter.

With a baseline, the same server without a drafter, blocks of prompts go to both in alternation, so that a
machine whose speed drifts affects both alike, and neither runs while the other is measured.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints.export import Exported, export
from vlmdistill.pipelines.bench import records, served_records
from vlmdistill.pipelines.bench.evaluate import Settings, check_title, held_out
from vlmdistill.pipelines.bench.records import short_name
from vlmdistill.pipelines.bench.sampled import prompt_seed
from vlmdistill.pipelines.bench.served_records import (
    FailedRequest,
    ServedEvaluation,
    ServedLoad,
    ServerRun,
    TimedRequest,
)
from vlmdistill.pipelines.bench.server_client import (
    RequestError,
    ServedModel,
    ServerClient,
    ServerError,
    between,
)
from vlmdistill.pipelines.cluster.engine_environment import check_environment
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.media.frames import check_unchanged, media_file
from vlmdistill.pipelines.media.images import data_url
from vlmdistill.pipelines.targets.checkpoints.folder import resolve
from vlmdistill.pipelines.targets.checkpoints.registry import HUB
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.software import of_this_process
from vlmdistill.pipelines.vllm.launch import EngineError, vllm_server
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, VlmdistillError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash

CHECKED = 8  # prompts whose logits are looked at, at most, after a load
BLOCK = 2  # prompts for each concurrent request, before the other server has its turn

Question = tuple[str, list[dict[str, Any]]]
"""The key of a prompt, and its messages."""


def evaluate_server(
    workspace: Workspace,
    url: str,
    settings: Settings,
    *,
    baseline: str | None = None,
    name: str | None = None,
    served_model: str | None = None,
    prompts_file: Path | None = None,
    asked: Sequence[Question] = (),
    on_prompt: Progress = silent,
    on_failure: Callable[[str], None] = lambda text: None,
) -> ServedEvaluation:
    """Measure the server at `url` and add a record to `reports/served/`; the name defaults to its address.

    `asked` takes the place of the held-out prompts. The file is written after each load: an interruption
    loses only the load that it interrupts. Requests that fail are counted, and `on_failure` gets what the
    server says of each, which is written nowhere. ServerError when a server cannot be used, gives logits that
    are not finite, or when all requests to the one at `url` failed; DataError when a prompt cannot be sent.
    """
    check_title(name or "")
    asked = asked or questions(workspace, settings, prompts_file)
    errors: list[str] = []

    def failed_with(text: str) -> None:
        errors.append(text)
        on_failure(text)

    async def measured() -> ServedEvaluation:
        clients = [ServerClient(one) for one in (url, baseline) if one is not None]
        try:
            models = [
                await _model(client, workspace, served_model) for client in clients
            ]
            servers = [
                _Server(client, model.id, asked, settings, told)
                for client, model, told in zip(
                    clients, models, (failed_with, on_failure), strict=False
                )
            ]
            for server in servers:
                await server.send(
                    0, 0.0
                )  # to warm up; what fails here fails again when it is counted
                await server.check_finite()
            errors.clear()
            total = (
                len(settings.temperatures)
                * len(settings.concurrencies)
                * len(servers)
                * len(asked)
            )
            done = count(1)
            made = ServedEvaluation(
                format=served_records.FORMAT,
                name=name or clients[0].address,
                url=clients[0].url,
                model=models[0].id,
                drafter=models[0].drafter,
                baseline=clients[1].url if baseline else None,
                prompt_set=content_hash([key for key, _ in asked]),
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                measured=time.strftime("%Y-%m-%d %H:%M:%S"),
                loads=(),
                software=of_this_process(),
            )
            file = records.new_file(workspace.reports / "served", made.name)
            for temperature, concurrency in product(
                settings.temperatures, settings.concurrencies
            ):
                one = await _load(
                    servers,
                    temperature,
                    concurrency,
                    lambda remark: on_prompt(next(done), total, remark),
                )
                made = replace(made, loads=(*made.loads, one))
                if made.answered:
                    records.write(made, file)
        finally:
            for client in clients:
                await client.close()
        if not made.answered:
            failed = [lost for one in made.loads for lost in one.server.failed]
            raise ServerError(
                f"{made.url}: all {len(failed)} requests failed: {errors[0]}"
            )
        return made

    return asyncio.run(measured())


def questions(
    workspace: Workspace, settings: Settings, prompts_file: Path | None
) -> list[Question]:
    """The held-out prompts; DataError when one cannot be sent, or the settings are none for a server."""
    settings.check()
    chosen = held_out(
        prompts_file or workspace.prompts, settings.limit, workspace.model
    )
    if odd := [one for one in settings.temperatures if one > 2]:
        raise DataError(
            f"--temperature {odd[0]}: servers take 0, greedy decoding, to 2"
        )
    if odd := [one for one in settings.concurrencies if not 1 <= one <= len(chosen)]:
        raise DataError(
            f"--concurrency {odd[0]}: give 1 to {len(chosen)}, the number of held-out prompts that are sent"
        )
    return [(prompt.key, chat_messages(prompt)) for prompt in chosen]


@dataclass
class ServedDrafters:
    """The drafters that were measured, and why the others were not."""

    made: list[ServedEvaluation] = field(default_factory=list)
    failed: dict[str, VlmdistillError] = field(default_factory=dict)


def evaluate_drafters(
    workspace: Workspace,
    names: Sequence[str],
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    on_prompt: Progress = silent,
    on_failure: Callable[[str], None] = lambda text: None,
) -> ServedDrafters:
    """Measure each drafter as `evaluate_server` does, with servers of our own: vLLM with it and without.

    What is exported and what the servers say is kept in `served/` of the workspace. A drafter that cannot be
    served does not stop the next one. TrainingError when a drafter cannot be exported.
    """
    check_environment("vllm")
    asked = questions(
        workspace, settings, prompts_file
    )  # once for all, before a server starts
    target, folder = resolve(workspace.model), workspace.root / "served"
    dtype = settings.how.get("dtype", "auto")
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    written = dict[str, Exported]()
    for name in names:
        drafter = workspace.drafter(name)
        shutil.rmtree(folder / name, ignore_errors=True)
        written[name] = export(drafter, folder / name, dtype)

    def server(drafter: str, images: bool) -> AbstractContextManager[str]:
        on_prompt(0, 0, f"starting vLLM with {drafter or 'no drafter'}")
        log, one = folder / f"{drafter or 'baseline'}.log", written.get(drafter)
        return vllm_server(
            target, workspace.model, dtype, log, one, whole_images=images
        )

    def counted(done: int, total: int, remark: str = "") -> None:
        on_prompt(done, total, f"{name} {remark}")

    found, plain, served_images = ServedDrafters(), "", None
    with ExitStack() as baseline:
        for name in sorted(written, key=lambda name: written[name].whole_images):
            images = written[name].whole_images
            try:
                if (
                    images != served_images
                ):  # the baseline is as the drafter in all else
                    baseline.close()
                    plain, served_images = (
                        baseline.enter_context(server("", images)),
                        images,
                    )
                with server(name, images) as url:
                    found.made.append(
                        evaluate_server(
                            workspace,
                            url,
                            settings,
                            baseline=plain,
                            name=name,
                            served_model=workspace.model,
                            asked=asked,
                            on_prompt=counted,
                            on_failure=on_failure,
                        )
                    )
            except (EngineError, ServerError) as error:
                found.failed[name] = error
                served_images = None  # the baseline may be what failed
    return found


def chat_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as the OpenAI API takes it, images as data URLs; DataError where it shows a video."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        if one["type"] == "video":
            raise DataError(
                f"prompt {prompt.key} shows the video {one['path']}, and the OpenAI API takes only text and "
                "images: give other prompts with --prompts"
            )
        if one["type"] == "image":
            path = media_file(one)
            check_unchanged(one)
            return {"type": "image_url", "image_url": {"url": data_url(path)}}
        return {"type": "text", "text": one["text"]}

    return [
        {"role": message["role"], "content": [part(one) for one in message["content"]]}
        for message in prompt.messages
    ]


async def _model(
    client: ServerClient, workspace: Workspace, wanted: str | None
) -> ServedModel:
    """The model `wanted`, or the one that has a name of the workspace's; ServerError if it is not served."""
    served = await client.models()
    target = workspace.model
    names = (
        [wanted]
        if wanted
        else [target, HUB.get(target, target), str(EMBEDDED.get(target, target))]
    )
    short = {short_name(one).lower() for one in names} if wanted is None else ()
    found = [model for model in served if model.id in names]
    found += [model for model in served if short_name(model.id).lower() in short]
    if found:
        return found[0]
    listed = ", ".join(f"'{model.id}'" for model in served) or "nothing"
    raise ServerError(
        f"{client.url} does not serve '{wanted or target}': name one with --served-model: {listed}"
    )


async def _load(
    servers: Sequence["_Server"],
    temperature: float,
    concurrency: int,
    count: Callable[[str], None],
) -> ServedLoad:
    """Send all prompts to all servers, in alternation if there are several."""
    prompts = range(len(servers[0].asked))
    size = len(prompts)
    if (
        len(servers) > 1
    ):  # both should be first, which takes two blocks, full if possible
        size = max(concurrency, min(BLOCK * concurrency, (size + 1) // 2))
    before = [await server.client.settled() for server in servers]
    outcomes: list[list[TimedRequest | FailedRequest]] = [[] for _ in servers]
    seconds = [0.0] * len(servers)
    for number, start in enumerate(range(0, len(prompts), size)):
        turn = number % len(servers)
        for side in [*range(len(servers))[turn:], *range(len(servers))[:turn]]:
            waiting = iter(prompts[start : start + size])
            begun = time.perf_counter()
            work = [
                servers[side].drain(waiting, temperature, count)
                for _ in range(concurrency)
            ]
            for some in await asyncio.gather(*work):
                outcomes[side] += some
            seconds[side] += time.perf_counter() - begun
    runs = []
    for server, then, took, found in zip(
        servers, before, seconds, outcomes, strict=True
    ):
        requests = tuple(one for one in found if isinstance(one, TimedRequest))
        failed = tuple(one for one in found if isinstance(one, FailedRequest))
        counts = between(then, await server.client.settled())
        await server.check_finite()
        runs.append(
            ServerRun(seconds=took, requests=requests, failed=failed, counts=counts)
        )
    return ServedLoad(
        temperature=temperature,
        concurrency=concurrency,
        server=runs[0],
        baseline=runs[1] if len(runs) > 1 else None,
    )


@dataclass(frozen=True)
class _Server:
    """A server, and what it is asked."""

    client: ServerClient
    model: str
    asked: Sequence[Question]
    settings: Settings
    on_failure: Callable[[str], None]
    repeating: set[int] = field(default_factory=set)  # prompts to be checked

    async def send(
        self, number: int, temperature: float
    ) -> TimedRequest | FailedRequest:
        """Send one prompt."""
        key, messages = self.asked[number]
        options: dict[str, Any] = {
            "model": self.model,
            "temperature": temperature,
            "max_tokens": self.settings.max_new_tokens,
        }
        if temperature:
            options["seed"] = prompt_seed(self.settings.seed, number)
        try:
            try:
                answer = await self.client.chat(key, messages, options)
            except RequestError as error:
                if not error.too_long:
                    raise
                # As in this process, a response ends at the last position of the target.
                del options["max_tokens"]
                answer = await self.client.chat(key, messages, options)
        except RequestError as error:
            self.on_failure(str(error))
            return FailedRequest(key=key, reason=error.kind)
        if answer.repeats:
            self.repeating.add(number)
        return answer.request

    async def check_finite(self) -> None:
        """ServerError if the logits of a prompt are not finite whose response repeats a token."""
        for number in sorted(self.repeating)[:CHECKED]:
            options = {"model": self.model, "temperature": 0}
            await self.client.check_finite(self.asked[number][1], options)
        self.repeating.clear()

    async def drain(
        self, waiting: Iterator[int], temperature: float, count: Callable[[str], None]
    ) -> list[TimedRequest | FailedRequest]:
        """Send prompts one after the other until none waits."""
        outcomes = []
        for number in waiting:
            outcomes.append(await self.send(number, temperature))
            count(f"T={temperature:g}")
        return outcomes
