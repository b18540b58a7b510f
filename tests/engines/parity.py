"""Parity: a drafter accepts in the engine what it accepts in our own decoder, on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tests.engines import job as engine
from tests.engines.job import EngineJob, EngineOutcome, Question, SampledVideo
from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.media.frames import media_file
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


@dataclass(frozen=True)
class DraftCounts:
    """Drafts that the target verified, and the drafted tokens that it accepted."""

    drafts: int
    accepted: int


@dataclass(frozen=True)
class Parity:
    """An exported drafter in an engine and in our decoder."""

    prompts: int
    identical: int
    """Responses that are those of the engine without a drafter."""
    ours: DraftCounts
    engine: DraftCounts


def questions(
    target: VisionLanguageTarget, prompts: Sequence[Prompt]
) -> tuple[Question, ...]:
    """The prompts as an engine takes them, with the frames and rotary positions of our own processor."""
    made = []
    for prompt in prompts:
        parts = [part for message in prompt.messages for part in message["content"]]
        paths = {
            kind: [
                str(media_file(part).absolute())
                for part in parts
                if part["type"] == kind
            ]
            for kind in ("image", "video")
        }
        text = target.processor.apply_chat_template(
            [
                {
                    "role": message["role"],
                    "content": [_bare(part) for part in message["content"]],
                }
                for message in prompt.messages
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        encoded = target.encode(prompt.messages)
        videos = zip(paths["video"], encoded.samplings, strict=True)
        made.append(
            Question(
                text=text,
                images=tuple(paths["image"]),
                videos=tuple(
                    SampledVideo(
                        path=path,
                        indices=frames.indices,
                        total=frames.total,
                        fps=frames.fps,
                    )
                    for path, frames in videos
                ),
                rope=encoded.rope_AL.tolist() if encoded.spans else [],
            )
        )
    return tuple(made)


def _bare(part: dict[str, str]) -> dict[str, str]:
    """A part of a message without its file: the template writes a placeholder."""
    return part if part["type"] == "text" else {"type": part["type"]}


def ours(
    target: VisionLanguageTarget,
    drafter: Proposer,
    prompts: Sequence[Prompt],
    job: EngineJob,
) -> DraftCounts:
    """What our decoder accepts of a drafter's chains, greedily."""
    drafts, accepted, chain = 0, 0, Tree.parse(f"chain-{job.draft_tokens}")
    for prompt in prompts:
        encoded = target.encode(prompt.messages)
        cycles = list(
            speculate(
                target, drafter, encoded, tree=chain, max_new_tokens=job.max_new_tokens
            )
        )[1:]
        drafts += len(cycles)
        accepted += sum(cycle.accepted for cycle in cycles)
    return DraftCounts(drafts, accepted)


def check(
    target: VisionLanguageTarget,
    folder: Path,
    exported: Exported,
    prompts: Sequence[Prompt],
    job: EngineJob,
    plain: EngineOutcome,
) -> Parity:
    """Decode `prompts` with the drafter of `folder` in our decoder and, as exported, in the engine.

    `job` says how; `plain` is the engine's outcome without a drafter.
    """
    for prompt, read in zip(prompts, plain.prompts, strict=True):
        assert target.encode(prompt.messages).ids_L.tolist() == read, prompt.key
    served = replace(
        job,
        drafter=str(Path(exported.out).absolute()),
        method=exported.method,
        draft_tokens=exported.draft_tokens,
        whole_images=exported.whole_images,
    )
    found = engine.run(served)
    pairs = zip(plain.responses, found.responses, strict=True)
    return Parity(
        prompts=len(prompts),
        identical=sum(one == other for one, other in pairs),
        ours=ours(target, target.drafter(folder), prompts, served),
        engine=DraftCounts(found.drafts, found.accepted),
    )
