"""Evaluates a server: sends it the held-out prompts, times the responses, and reads its own counts.

The server runs already, or vLLM is started for each drafter.

With a baseline, the same server without a drafter, blocks of prompts go to both in alternation, so that a
machine whose speed drifts affects both alike, and neither runs while the other is measured.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from vlmdistill.drafters.checkpoints.export import Exported, export
from vlmdistill.pipelines.bench import records
from vlmdistill.pipelines.bench.leaks import leaks
from vlmdistill.pipelines.bench.plan import (
    Description,
    held_out,
    require_same_weights,
    trained_thinking,
)
from vlmdistill.pipelines.bench.records import Leak, short_name
from vlmdistill.pipelines.bench.sampled import prompt_seed
from vlmdistill.pipelines.bench.served_records import (
    FailedRequest,
    ServedEvaluation,
    ServedLoad,
    ServerRun,
    TimedRequest,
)
from vlmdistill.pipelines.bench.server_client import (
    Answer,
    Counters,
    RequestError,
    ServedModel,
    ServerClient,
    ServerError,
    between,
)
from vlmdistill.pipelines.bench.settings import Settings, check_title
from vlmdistill.pipelines.cluster.engine_environment import check_environment
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.media.frames import check_unchanged, media_file
from vlmdistill.pipelines.media.images import data_url
from vlmdistill.pipelines.targets.checkpoints.folder import resolve
from vlmdistill.pipelines.targets.checkpoints.registry import HUB
from vlmdistill.pipelines.targets.checkpoints.template import variables_of
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.loading import load_encoder
from vlmdistill.pipelines.targets.software import of_this_process
from vlmdistill.pipelines.vllm.launch import EngineError, vllm_server
from vlmdistill.pipelines.workspace.trained import Trained
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError, VlmdistillError
from vlmdistill.stores.progress import Progress, silent
from vlmdistill.stores.schema import content_hash

CHECKED = 8  # prompts at most whose logits are checked after a load, or that are compared before
BLOCK = 2  # prompts for each concurrent request, before the other server has its turn
HIGHEST_TEMPERATURE = 2  # that servers take
OnFailure = Callable[[str], None]
"""Gets a server's text about a request that failed."""


@dataclass(frozen=True)
class Question:
    """A prompt as it is sent to each server."""

    key: str
    messages: list[dict[str, Any]]
    seed: int  # of sampling


def _ignore(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which server is measured, and how it is named."""

    url: str
    baseline: str | None = None  # the URL of the same server without a drafter
    name: str | None = None  # of the evaluation; None: the server's address
    served_model: str | None = None  # the target as the server names it, if otherwise
    weights: str | None = None  # of its drafter, as in the record
    leak: Leak | None = None  # likewise


def evaluate_server(
    workspace: Workspace,
    server: ServerOptions,
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    prepared: Sequence[Question] = (),
    on_prompt: Progress = silent,
    on_failure: OnFailure = _ignore,
) -> ServedEvaluation:
    """Measure a server and add a record to `reports/served/`.

    `prepared` takes the place of the held-out prompts. The target reasons as `settings` say, else as by
    default at the server, and likewise at the baseline. The file is written after each load: an interruption
    loses only the load that it interrupts. Requests that fail are counted; `on_failure` gets the server's
    text about each, which is written nowhere. ServerError when a server cannot be used, gives logits that
    are not finite, or when all its requests failed; DataError when a prompt cannot be sent, TargetError when
    the chat template cannot reason as `settings` say.
    """
    check_title(server.name or "")
    if not prepared:
        chosen = _chosen(workspace, settings, prompts_file)
        prepared = questions(chosen, settings, workspace.model)
    measuring = _measure(workspace, server, settings, prepared, on_prompt, on_failure)
    return asyncio.run(measuring)


async def _measure(
    workspace: Workspace,
    options: ServerOptions,
    settings: Settings,
    prepared: Sequence[Question],
    on_prompt: Progress,
    on_failure: OnFailure,
) -> ServedEvaluation:
    """Measure all loads, one after the other."""
    urls = [options.url]
    if options.baseline is not None:
        urls.append(options.baseline)
    clients = [ServerClient(url) for url in urls]
    try:
        models = [
            await _model(client, workspace, options.served_model) for client in clients
        ]
        if "thinking" not in settings.how:
            mode = models[0].thinking
            settings = settings.trained_as({options.name or models[0].id: mode})
        servers = [
            _Server(client, model, prepared, settings, on_failure)
            for client, model in zip(clients, models, strict=True)
        ]
        # Sampled responses do not tell whether both servers have the same target.
        is_compared = len(servers) > 1 and any(settings.temperatures)
        for server in servers:
            await server.warm_up(CHECKED if is_compared else 1)
        evaluation = ServedEvaluation(
            format=records.FORMAT,
            name=options.name or clients[0].address,
            url=clients[0].url,
            model=models[0].id,
            drafter=models[0].drafter,
            baseline=clients[1].url if len(clients) > 1 else None,
            prompt_set=content_hash([question.key for question in prepared]),
            max_new_tokens=settings.max_new_tokens,
            thinking=settings.thinking,
            seed=settings.seed,
            measured=records.now(),
            software=of_this_process(),
            weights=options.weights,
            leak=options.leak,
            loads=(),
        )
        file = records.new_file(workspace.reports / "served", evaluation.name)
        loads = [*product(settings.temperatures, settings.concurrencies)]
        total = len(loads) * len(servers) * len(prepared)
        numbers = count(1)
        for temperature, concurrency in loads:
            load = await _load(
                servers,
                temperature,
                concurrency,
                lambda remark: on_prompt(next(numbers), total, remark),
            )
            evaluation = replace(evaluation, loads=(*evaluation.loads, load))
            if evaluation.answered:
                records.write(evaluation, file)
    finally:
        for client in clients:
            await client.close()
    if not evaluation.answered:
        failed = sum(len(load.server.failed) for load in evaluation.loads)
        raise ServerError(
            f"{evaluation.url}: all {failed} requests failed: {servers[0].first_error}"
        )
    return evaluation


def _chosen(
    workspace: Workspace, settings: Settings, prompts_file: Path | None
) -> list[Prompt]:
    """The held-out prompts; DataError on wrong settings."""
    settings.check()
    file = prompts_file or workspace.prompts
    return held_out(file, settings.limit, workspace.model)


def questions(
    chosen: Sequence[Prompt], settings: Settings, model: str
) -> list[Question]:
    """The prompts as they are sent to servers of the target `model`.

    DataError when one cannot be sent, or a server cannot take the settings; TargetError when the chat
    template cannot reason as they say.
    """
    for temperature in settings.temperatures:
        if temperature > HIGHEST_TEMPERATURE:
            raise DataError(
                f"--temperature {temperature}: servers take 0, greedy decoding, to {HIGHEST_TEMPERATURE}"
            )
    for concurrency in settings.concurrencies:
        if not 1 <= concurrency <= len(chosen):
            raise DataError(
                f"--concurrency {concurrency}: give 1 to {len(chosen)}, the number of held-out prompts that "
                "are sent"
            )
    if settings.thinking:  # a template without a switch is refused
        load_encoder(model, settings.thinking)
    return [
        Question(prompt.key, chat_messages(prompt), prompt_seed(settings.seed, number))
        for number, prompt in enumerate(chosen)
    ]


@dataclass
class ServedDrafters:
    """The drafters that were measured, and why the others were not."""

    evaluations: list[ServedEvaluation] = field(default_factory=list)
    failed: dict[str, VlmdistillError] = field(default_factory=dict)


def evaluate_drafters(
    workspace: Workspace,
    drafters: Sequence[Trained],
    settings: Settings,
    *,
    prompts_file: Path | None = None,
    on_prompt: Progress = silent,
    on_failure: OnFailure = _ignore,
) -> ServedDrafters:
    """Measure each drafter as `evaluate_server` does, with servers of our own: vLLM with it and without.

    The target reasons as in the drafters' training, unless `settings` say how. Exports and the servers' logs
    are kept in `served/` of the workspace. A drafter that cannot be served does not stop the next one.
    TrainingError when a drafter cannot be exported, or is trained again meanwhile; DataError when they were
    trained with different reasoning.
    """
    check_environment("vllm")
    # Once for all, before a server starts.
    described = {drafter.name: Description.of(drafter) for drafter in drafters}
    settings = settings.trained_as(trained_thinking(described))
    chosen = _chosen(workspace, settings, prompts_file)
    prepared = questions(chosen, settings, workspace.model)
    leak_of = leaks(workspace, drafters, chosen)
    weights_of = {drafter.name: drafter.weights for drafter in drafters}
    dtype = settings.how.get("dtype", "auto")
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    exported_of = _export_all(workspace, drafters, dtype)
    require_same_weights(drafters)
    servers = _VllmServers(workspace, dtype, on_prompt)
    outcome = ServedDrafters()
    with servers:
        # Drafters of equal needs follow each other: they share the baseline.
        by_images = sorted(exported_of.items(), key=lambda item: item[1].whole_images)
        for name, exported in by_images:
            report = _Named(name, on_prompt)
            try:
                baseline = servers.baseline(exported.whole_images)
                with servers.serve(name, exported) as url:
                    options = ServerOptions(
                        url=url,
                        baseline=baseline,
                        name=name,
                        served_model=workspace.model,
                        weights=weights_of[name],
                        leak=leak_of[name],
                    )
                    evaluation = evaluate_server(
                        workspace,
                        options,
                        settings,
                        prepared=prepared,
                        on_prompt=report,
                        on_failure=on_failure,
                    )
                outcome.evaluations.append(evaluation)
            except (EngineError, ServerError) as error:
                outcome.failed[name] = error
                servers.distrust_baseline()
    return outcome


def _export_all(
    workspace: Workspace, drafters: Sequence[Trained], dtype: str
) -> dict[str, Exported]:
    """Export each drafter into `served/` of the workspace, by name."""
    exported_of: dict[str, Exported] = {}
    for drafter in drafters:
        out = workspace.root / "served" / drafter.name
        shutil.rmtree(out, ignore_errors=True)
        exported_of[drafter.name] = export(drafter.folder, out, dtype)
    return exported_of


@dataclass(frozen=True)
class _Named:
    """Progress whose remarks begin with a drafter's name."""

    name: str
    on_prompt: Progress

    def __call__(self, done: int, total: int, remark: str = "") -> None:
        self.on_prompt(done, total, f"{self.name} {remark}")


class _VllmServers:
    """Servers of a target that vLLM runs: one for each drafter in turn, and the baseline beside it."""

    def __init__(self, workspace: Workspace, dtype: str, on_prompt: Progress) -> None:
        self._model = workspace.model
        self._target = resolve(workspace.model)
        self._logs = workspace.root / "served"
        self._dtype = dtype
        self._on_prompt = on_prompt
        self._stack = ExitStack()
        self._baseline_url = ""
        self._baseline_images: bool | None = None  # None: there is no baseline

    def __enter__(self) -> "_VllmServers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, name: str, exported: Exported) -> AbstractContextManager[str]:
        """A server with a drafter, as its URL."""
        return self._server(name, exported.whole_images, exported)

    def baseline(self, whole_images: bool) -> str:
        """The URL of the server without a drafter, which is as the drafter's in all else."""
        if whole_images != self._baseline_images:
            self._stack.close()
            self._baseline_images = None
            server = self._server("", whole_images, None)
            self._baseline_url = self._stack.enter_context(server)
            self._baseline_images = whole_images
        return self._baseline_url

    def distrust_baseline(self) -> None:
        """Start another baseline for the next drafter: the baseline may be what failed."""
        self._baseline_images = None

    def _server(
        self, name: str, whole_images: bool, exported: Exported | None
    ) -> AbstractContextManager[str]:
        self._on_prompt(0, 0, f"starting vLLM with {name or 'no drafter'}")
        return vllm_server(
            self._target,
            self._model,
            self._dtype,
            self._logs / f"{name or 'baseline'}.log",
            exported,
            whole_images=whole_images,
        )


def chat_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as the OpenAI API takes it, images as data URLs; DataError where it shows a video."""
    messages = []
    for message in prompt.messages:
        content = [_content_part(prompt.key, part) for part in message["content"]]
        messages.append({"role": message["role"], "content": content})
    return messages


def _content_part(key: str, part: dict[str, Any]) -> dict[str, Any]:
    """A part of the content of the prompt with this key."""
    if part["type"] == "video":
        raise DataError(
            f"prompt {key} shows the video {part['path']}, and the OpenAI API takes only text and "
            "images: give other prompts with --prompts"
        )
    if part["type"] == "image":
        path = media_file(part)
        check_unchanged(part)
        return {"type": "image_url", "image_url": {"url": data_url(path)}}
    return {"type": "text", "text": part["text"]}


async def _model(
    client: ServerClient, workspace: Workspace, wanted: str | None
) -> ServedModel:
    """The model `wanted`, or the one that has a name of the workspace's; ServerError if it is not served."""
    served = await client.models()
    target = workspace.model
    names = [target, HUB.get(target, target), str(EMBEDDED.get(target, target))]
    short_names = {short_name(name).lower() for name in names}
    if wanted:
        names, short_names = [wanted], set()
    for model in served:
        if model.id in names:
            return model
    for model in served:
        if short_name(model.id).lower() in short_names:
            return model
    listed = ", ".join(f"'{model.id}'" for model in served) or "nothing"
    raise ServerError(
        f"{client.url} does not serve '{wanted or target}': name one with --served-model: {listed}"
    )


async def _load(
    servers: Sequence["_Server"],
    temperature: float,
    concurrency: int,
    on_request: Callable[[str], None],
) -> ServedLoad:
    """Send all prompts to all servers, in alternation if there are several."""
    prompts = range(len(servers[0].questions))
    size = _block_size(len(prompts), len(servers), concurrency)
    runs = [
        _MeasuredServer(server, await server.client.settled()) for server in servers
    ]
    for number, start in enumerate(range(0, len(prompts), size)):
        block = prompts[start : start + size]
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            await run.send(block, temperature, concurrency, on_request)
    is_sampled = temperature > 0
    records_of_runs = [await run.record(is_sampled) for run in runs]
    return ServedLoad(
        temperature=temperature,
        concurrency=concurrency,
        server=records_of_runs[0],
        baseline=records_of_runs[1] if len(records_of_runs) > 1 else None,
    )


def _block_size(prompts: int, servers: int, concurrency: int) -> int:
    """Prompts that a server gets before the other one has its turn."""
    if servers == 1:
        return prompts
    # Both should be first, which takes two blocks, full if possible.
    half = (prompts + 1) // 2
    return max(concurrency, min(BLOCK * concurrency, half))


@dataclass
class _MeasuredServer:
    """What was measured of one server under one load."""

    server: "_Server"
    counters: Counters  # before the first request
    seconds: float = 0.0
    outcomes: list[TimedRequest | FailedRequest] = field(default_factory=list)

    async def send(
        self,
        block: Sequence[int],
        temperature: float,
        concurrency: int,
        on_request: Callable[[str], None],
    ) -> None:
        """Send the prompts of a block, `concurrency` at a time."""
        waiting = iter(block)
        start = time.perf_counter()
        senders = [
            self.server.drain(waiting, temperature, on_request)
            for _ in range(concurrency)
        ]
        for outcomes in await asyncio.gather(*senders):
            self.outcomes += outcomes
        self.seconds += time.perf_counter() - start

    async def record(self, is_sampled: bool) -> ServerRun:
        """The record of the run; ServerError if the logits of the server are not finite."""
        counts = between(self.counters, await self.server.client.settled())
        await self.server.check_finite()
        requests = [one for one in self.outcomes if isinstance(one, TimedRequest)]
        failed = [one for one in self.outcomes if isinstance(one, FailedRequest)]
        return ServerRun(
            seconds=self.seconds,
            requests=tuple(requests),
            failed=tuple(failed),
            counts=counts,
            dtype=self.server.model.dtype,
            greedy=tuple(self.server.warm_responses) if is_sampled else (),
        )


@dataclass
class _Server:
    """A server, and the prompts to send to it."""

    client: ServerClient
    model: ServedModel
    questions: Sequence[Question]
    settings: Settings
    on_failure: OnFailure
    first_error: str = ""  # the server's text about the first request that failed
    repeating: set[int] = field(default_factory=set)
    """Prompts whose response repeats a token: their logits are checked."""
    warm_responses: list[TimedRequest] = field(default_factory=list)
    """Greedy ones to the first prompts."""

    async def warm_up(self, prompts: int) -> None:
        """Send the first prompts. What fails here fails again when it is counted."""
        for number in range(min(prompts, len(self.questions))):
            with suppress(RequestError):
                answer = await self._chat(number, 0.0)
                self.warm_responses.append(answer.request)
        await self.check_finite()

    async def send(
        self, number: int, temperature: float
    ) -> TimedRequest | FailedRequest:
        """Send one prompt."""
        try:
            answer = await self._chat(number, temperature)
        except RequestError as error:
            self.first_error = self.first_error or str(error)
            self.on_failure(str(error))
            return FailedRequest(key=self.questions[number].key, reason=error.kind)
        return answer.request

    async def _chat(self, number: int, temperature: float) -> Answer:
        question = self.questions[number]
        options = self._options(question, temperature)
        options["max_tokens"] = self.settings.max_new_tokens
        if temperature:
            options["seed"] = question.seed
        try:
            answer = await self.client.chat(question.key, question.messages, options)
        except RequestError as error:
            if not error.too_long:
                raise
            # As in this process, a response ends at the last position of the target.
            del options["max_tokens"]
            answer = await self.client.chat(question.key, question.messages, options)
        if answer.repeats:
            self.repeating.add(number)
        return answer

    def _options(self, question: Question, temperature: float) -> dict[str, Any]:
        """What any request says of a prompt besides its messages."""
        options: dict[str, Any] = {
            "model": self.model.id,
            "temperature": temperature,
        }
        variables = variables_of(self.settings.thinking, question.messages)
        if variables:
            options["chat_template_kwargs"] = variables
        return options

    async def check_finite(self) -> None:
        """ServerError if a prompt whose response repeats one token has logits that are not finite."""
        for number in sorted(self.repeating)[:CHECKED]:
            question = self.questions[number]
            options = self._options(question, 0.0)
            await self.client.check_finite(question.messages, options)
        self.repeating.clear()

    async def drain(
        self,
        waiting: Iterator[int],
        temperature: float,
        on_request: Callable[[str], None],
    ) -> list[TimedRequest | FailedRequest]:
        """Send prompts one after the other until none waits."""
        outcomes = []
        for number in waiting:
            outcomes.append(await self.send(number, temperature))
            on_request(f"T={temperature:g}")
        return outcomes
