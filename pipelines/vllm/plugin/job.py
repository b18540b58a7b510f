"""One run of vLLM as a process of its own environment: an `EngineJob` is read, an `EngineOutcome` written."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image

from vlmdistill.pipelines.media.frames import read
from vlmdistill.pipelines.media.images import upright
from vlmdistill.pipelines.vllm.messages import EngineJob, EngineOutcome, Question, SampledVideo
from vlmdistill.pipelines.vllm.plugin.limits import check_version


def run(job: EngineJob) -> EngineOutcome:
    """Generate all responses, with the drafter if there is one, and count what was accepted."""
    import transformers
    import vllm

    from vlmdistill.pipelines.vllm.capture.positions import set_positions, take_positions

    check_version(vllm.__version__)
    drafter = {
        "method": job.method,
        "model": job.drafter,
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
        enforce_eager=True,
        disable_log_stats=False,  # what is accepted is among the statistics
        limit_mm_per_prompt=_most(job),
        seed=0,
    )
    engine.apply_model(take_positions)
    rope = {str(number): torch.tensor(one.rope) for number, one in enumerate(job.questions)}
    engine.apply_model(partial(set_positions, positions=rope))
    sampling = vllm.SamplingParams(
        temperature=job.temperature, top_p=job.top_p, max_tokens=job.max_new_tokens
    )
    outputs = engine.generate([_prompt(*one) for one in enumerate(job.questions)], sampling, use_tqdm=False)
    counted: dict[str, Any] = {one.name: one for one in engine.get_metrics()}
    return EngineOutcome(
        prompts=[list(one.prompt_token_ids) for one in outputs],
        responses=[list(one.outputs[0].token_ids) for one in outputs],
        drafts=counted["vllm:spec_decode_num_drafts"].value if job.drafter else 0,
        accepted=counted["vllm:spec_decode_num_accepted_tokens"].value if job.drafter else 0,
        accepted_at=counted["vllm:spec_decode_num_accepted_tokens_per_pos"].values if job.drafter else [],
        versions={
            "vllm": vllm.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
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
    return {"prompt": question.text, "multi_modal_data": shown, "multi_modal_uuids": names}


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


def main(job_file: str, outcome_file: str) -> None:
    """Read one file, write the other."""
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=EngineJob)
    Path(outcome_file).write_bytes(msgspec.json.encode(run(job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
