"""One run of vLLM as a process of its own environment: an `EngineJob` is read, an `EngineOutcome` written."""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from PIL import Image

from tests.operators import Operators
from vlmdistill.pipelines.cluster.engine_environment import engine_python
from vlmdistill.pipelines.media.frames import read
from vlmdistill.pipelines.media.images import upright

ROOT = Path(__file__).parents[2]


class SampledVideo(Struct, frozen=True, kw_only=True):
    """The frames of a video that our own processor samples."""

    path: str
    indices: tuple[int, ...]
    total: int
    """Frames of the video."""
    fps: float


class Question(Struct, frozen=True, kw_only=True):
    """One prompt: the text after the chat template, placeholders not yet expanded, its images and videos."""

    text: str
    images: tuple[str, ...] = ()
    """Absolute paths, as those of videos: the engine runs in a folder of its own."""
    videos: tuple[SampledVideo, ...] = ()
    rope: list[list[int]] = []
    """The target's rotary positions on each axis; empty for a text."""


class EngineJob(Struct, frozen=True, kw_only=True):
    """What an engine is to generate."""

    target: str
    """Its checkpoint folder."""
    questions: tuple[Question, ...]
    drafter: str = ""
    """An exported folder; empty: plain decoding."""
    first: str = ""
    """Another version of it, with which the engine is started before it takes over `drafter`."""
    asked_of_first: int = 0
    """Questions that the other version drafts for before."""
    refused: str = ""
    """A further version, which the first process alone finds: the engine must refuse it."""
    method: str = "eagle"
    draft_tokens: int = 0
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int | None = None
    """Of each request."""
    dtype: str = "float32"
    batch: int = 8
    """Requests decoded together."""
    step_tokens: int = 0
    """Tokens of a prompt in one step; longer ones are read in several. 0: as many as fit."""
    whole_images: bool = False
    """All visual tokens of an image in one step."""
    prefix_caching: bool = False
    """With it, all questions are asked again, and once more after a reset of the cache."""
    tensor_parallel: int = 1
    """Processes that share each layer."""
    blocks: int = 0
    """Of the KV cache, which makes vLLM preempt requests if they are few; 0: as many as fit."""
    plugin: bool = True
    operators: bool = False
    """Count the operators of each draft."""


class Repeat(Struct, frozen=True):
    """The same questions, asked again."""

    responses: list[list[int]]
    drafts: int
    accepted: int
    cached: int
    """Tokens of prompts that were in the prefix cache."""


class EngineOutcome(Struct, frozen=True, kw_only=True):
    """What an engine generated, in the order of the questions."""

    prompts: list[list[int]]
    """Token ids, placeholders expanded."""
    responses: list[list[int]]
    drafts: int
    """Calls of the target that verified a draft."""
    accepted: int
    """Drafted tokens that it accepted."""
    accepted_at: list[int]
    """Of these, by position in the draft."""
    preempted: int
    """Times that a request lost its KV cache and was read again."""
    versions: dict[str, str]
    repeats: list[Repeat]
    """With a prefix cache: from it, and after it was emptied."""
    operators: list[int]
    """Of each draft, if they are counted."""


def run(job: EngineJob) -> EngineOutcome:
    """Let vLLM do a job in its own environment; EngineError when it cannot."""
    from vlmdistill.pipelines.vllm import launch

    with tempfile.TemporaryDirectory() as folder:
        job_file, outcome_file, log = (
            Path(folder) / name for name in ("job.json", "outcome.json", "log")
        )
        job_file.write_bytes(msgspec.json.encode(job))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as said:
            running = launch.start(
                engine_python(),
                ["-m", "tests.engines.job", job_file, outcome_file],
                said,
                settings={
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "PYTHONPATH": os.pathsep.join(paths),
                    **({} if job.plugin else {"VLLM_PLUGINS": ""}),
                },
                cwd=Path(folder),  # vLLM writes where it is started
            )
            try:
                status = running.wait()
            finally:
                launch.end(running)
        if status:
            raise launch.EngineError(
                launch.reason(log.read_text(errors="replace"), status)
            )
        return msgspec.json.decode(outcome_file.read_bytes(), type=EngineOutcome)


def generate(job: EngineJob) -> EngineOutcome:
    """Generate all responses, with the drafter if there is one, and count what was accepted."""
    import transformers
    import vllm

    from vlmdistill.pipelines.vllm.capture.positions import (
        set_positions,
        take_positions,
    )

    drafter = {
        "method": job.method,
        "model": job.first or job.drafter,
        "num_speculative_tokens": job.draft_tokens,
    }
    engine = vllm.LLM(
        model=job.target,
        dtype=job.dtype,
        speculative_config=drafter if job.drafter else None,
        max_num_seqs=job.batch,
        long_prefill_token_threshold=job.step_tokens,
        disable_chunked_mm_input=job.whole_images,
        enable_prefix_caching=job.prefix_caching,
        block_size=32 if job.prefix_caching else None,  # 128 on a CPU: too long
        tensor_parallel_size=job.tensor_parallel,
        num_gpu_blocks_override=job.blocks or None,
        max_model_len=512 if job.blocks else None,  # one such request fits
        enforce_eager=True,
        disable_log_stats=False,  # what is accepted is among the statistics
        limit_mm_per_prompt=_most(job),
        seed=0,
        worker_extension_cls="vlmdistill.pipelines.vllm.plugin.swap.Swap",
    )
    engine.apply_model(take_positions)
    rope = {
        str(number): torch.tensor(one.rope) for number, one in enumerate(job.questions)
    }
    engine.apply_model(partial(set_positions, positions=rope))
    sampling = vllm.SamplingParams(
        temperature=job.temperature,
        top_p=job.top_p,
        top_k=job.top_k,
        max_tokens=job.max_new_tokens,
        seed=job.seed,
    )
    prompts = [_prompt(*one) for one in enumerate(job.questions)]
    if job.refused:
        load = partial(_load_in_the_first, folder=job.refused)
        (refusal,) = set(engine.collective_rpc(load))
        assert "cannot be loaded" in refusal
    before = 0, 0
    if job.first:
        some = prompts[: job.asked_of_first]
        if some:
            engine.generate(some, sampling, use_tqdm=False)
            before = _drafts(engine)
        for refused in engine.collective_rpc("load_drafter", args=(job.drafter,)):
            assert not refused, refused
    operators = list[int]()
    if job.operators:
        engine.collective_rpc(partial(_count, counts=operators))
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    counted: dict[str, Any] = {one.name: one for one in engine.get_metrics()}
    drafts, accepted = _drafts(engine) if job.drafter else (0, 0)
    repeats = list[Repeat]()
    if job.prefix_caching:
        repeats.append(_again(engine, prompts, sampling))
        assert engine.reset_prefix_cache()
        repeats.append(_again(engine, prompts, sampling))
    return EngineOutcome(
        prompts=[list(one.prompt_token_ids) for one in outputs],
        responses=[list(one.outputs[0].token_ids) for one in outputs],
        drafts=drafts - before[0],
        accepted=accepted - before[1],
        accepted_at=counted["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        if job.drafter
        else [],
        preempted=_value(engine, "vllm:num_preemptions"),
        versions={
            "vllm": vllm.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        repeats=repeats,
        operators=operators,
    )


def _count(worker: Any, counts: list[int]) -> None:
    """Note the operators of each draft from now on."""
    drafter = worker.model_runner.drafter
    propose = drafter.propose

    def counted(*args: Any, **named: Any) -> Any:
        with Operators() as operators:  # type: ignore[no-untyped-call]
            drafted = propose(*args, **named)
        counts.append(operators.count)
        return drafted

    drafter.propose = counted


def _again(engine: Any, prompts: list[dict[str, Any]], sampling: Any) -> Repeat:
    """Ask all questions again, and count."""
    hits = "vllm:prefix_cache_hits"
    drafts, accepted = _drafts(engine)
    cached = _value(engine, hits)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    drafts_after, accepted_after = _drafts(engine)
    return Repeat(
        responses=[list(output.outputs[0].token_ids) for output in outputs],
        drafts=drafts_after - drafts,
        accepted=accepted_after - accepted,
        cached=_value(engine, hits) - cached,
    )


def _value(engine: Any, name: str) -> int:
    """A counter of the engine."""
    (value,) = (one.value for one in engine.get_metrics() if one.name == name)
    return int(value)


def _load_in_the_first(worker: Any, folder: str) -> str:
    """Load a version that only the first process finds; why the engine refuses it."""
    refusal: str = worker.load_drafter(folder if worker.rank == 0 else "elsewhere")
    return refusal


def _drafts(engine: Any) -> tuple[int, int]:
    """Drafts so far, and accepted tokens."""
    return (
        _value(engine, "vllm:spec_decode_num_drafts"),
        _value(engine, "vllm:spec_decode_num_accepted_tokens"),
    )


def _most(job: EngineJob) -> dict[str, int]:
    """The most images and videos of a prompt; a target that has no videos is not asked for them."""
    most = {
        "image": max([1, *(len(one.images) for one in job.questions)]),
        "video": max([0, *(len(one.videos) for one in job.questions)]),
    }
    return {kind: count for kind, count in most.items() if count}


def _prompt(number: int, question: Question) -> dict[str, Any]:
    """A prompt as vLLM takes it; the names of its images and videos lead to its rotary positions."""
    from vlmdistill.pipelines.vllm.capture.positions import identifier

    shown: dict[str, list[Any]] = {
        "image": [upright(Image.open(file)) for file in question.images],
        "video": [_frames(clip) for clip in question.videos],
    }
    shown = {kind: media for kind, media in shown.items() if media}
    if not shown:
        return {"prompt": question.text}
    names, at = dict[str, list[str]](), 0
    for kind, media in shown.items():
        names[kind] = [identifier(str(number), at + one) for one in range(len(media))]
        at += len(media)
    return {
        "prompt": question.text,
        "multi_modal_data": shown,
        "multi_modal_uuids": names,
    }


def _frames(clip: SampledVideo) -> tuple[Any, dict[str, Any]]:
    """The frames that we sample, and when they were, so that vLLM samples none itself."""
    frames_FHWC = read(clip.path, lambda _: clip.indices).frames_FHWC
    return frames_FHWC, {
        "total_num_frames": clip.total,
        "fps": clip.fps,
        "duration": clip.total / clip.fps,
        "frames_indices": list(clip.indices),
        "do_sample_frames": False,
    }


if __name__ == "__main__":
    job_file, outcome_file = map(Path, sys.argv[1:])
    outcome_file.write_bytes(
        msgspec.json.encode(
            generate(msgspec.json.decode(job_file.read_bytes(), type=EngineJob))
        )
    )
