"""One run of vLLM as a process of its own environment: an `EngineJob` is read, an `EngineOutcome` written."""

import sys
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from vlmdistill.pipelines.engines.messages import EngineJob, EngineOutcome, Question
from vlmdistill.pipelines.engines.vllm.limits import check_version
from vlmdistill.pipelines.media.images import upright


def run(job: EngineJob) -> EngineOutcome:
    """Generate all responses, with the drafter if there is one, and count what was accepted."""
    import torch
    import transformers
    import vllm

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
        max_num_batched_tokens=job.step_tokens,
        disable_chunked_mm_input=job.whole_images,
        enable_prefix_caching=job.prefix_caching,
        enforce_eager=True,
        disable_log_stats=False,  # what is accepted is among the statistics
        limit_mm_per_prompt={"image": max([1, *(len(one.images) for one in job.questions)])},
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=job.temperature, top_p=job.top_p, max_tokens=job.max_new_tokens
    )
    outputs = engine.generate([_prompt(one) for one in job.questions], sampling, use_tqdm=False)
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


def _prompt(question: Question) -> dict[str, Any]:
    """A prompt as vLLM takes it."""
    images = [upright(Image.open(file)) for file in question.images]
    return {"prompt": question.text, **({"multi_modal_data": {"image": images}} if images else {})}


def main(job_file: str, outcome_file: str) -> None:
    """Read one file, write the other."""
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=EngineJob)
    Path(outcome_file).write_bytes(msgspec.json.encode(run(job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
