"""Parity: a drafter accepts in the engine what it accepts in our own decoder, on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vlmdistill.drafters.checkpoints.export import Exported
from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import speculate
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.media.frames import media_file
from vlmdistill.pipelines.vllm import process
from vlmdistill.pipelines.vllm.messages import EngineJob, EngineOutcome, Question, SampledVideo
from vlmdistill.pipelines.vllm.process import EngineError

if TYPE_CHECKING:
    from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

TOLERANCE = 0.01
"""Largest relative difference of the accepted tokens per draft that counts as parity."""


@dataclass(frozen=True)
class DraftCounts:
    """Drafts that the target verified, and the drafted tokens that it accepted."""

    drafts: int
    accepted: int

    @property
    def per_draft(self) -> float:
        """Drafted tokens accepted per draft, the bonus token not counted."""
        return self.accepted / self.drafts if self.drafts else 0.0


@dataclass(frozen=True)
class Parity:
    """An exported drafter in an engine and in our decoder."""

    prompts: int
    identical: int
    """Responses that are those of the engine without a drafter."""
    ours: DraftCounts
    engine: DraftCounts
    versions: dict[str, str]
    tree: str = ""
    """The draft tree of the drafter itself, if it was asked for."""
    own: DraftCounts | None = None
    """Our decoder on that tree."""

    @property
    def holds(self) -> bool:
        """All responses are identical, and as many tokens are accepted."""
        difference = abs(self.engine.per_draft - self.ours.per_draft)
        return self.identical == self.prompts and difference <= TOLERANCE * self.ours.per_draft


def questions(target: "VisionLanguageTarget", prompts: Sequence[Prompt]) -> tuple[Question, ...]:
    """The prompts as an engine takes them, with the frames and rotary positions of our own processor."""
    made = []
    for prompt in prompts:
        parts = [part for message in prompt.messages for part in message["content"]]
        paths = {
            kind: [str(media_file(part).absolute()) for part in parts if part["type"] == kind]
            for kind in ("image", "video")
        }
        text = target.processor.apply_chat_template(
            [
                {"role": message["role"], "content": [_bare(part) for part in message["content"]]}
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
                    SampledVideo(path=path, indices=frames.indices, total=frames.total, fps=frames.fps)
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
    target: "VisionLanguageTarget",
    drafter: Proposer,
    prompts: Sequence[Prompt],
    job: EngineJob,
    on_prompt: Callable[[int, int, str], None],
    tree: Tree,
) -> DraftCounts:
    """What our decoder accepts of a drafter's drafts of this shape, greedily."""
    drafts = accepted = 0
    for done, prompt in enumerate(prompts):
        encoded = target.encode(prompt.messages)
        cycles = list(speculate(target, drafter, encoded, tree=tree, max_new_tokens=job.max_new_tokens))[1:]
        drafts += len(cycles)
        accepted += sum(cycle.accepted for cycle in cycles)
        on_prompt(done + 1, len(prompts), f"our decoder, {tree}")
    return DraftCounts(drafts, accepted)


def check(
    target: "VisionLanguageTarget",
    folder: Path,
    exported: Exported,
    prompts: Sequence[Prompt],
    job: EngineJob,
    *,
    plain: EngineOutcome | None = None,
    own_tree: bool = False,
    on_prompt: Callable[[int, int, str], None] = lambda done, total, remark: None,
) -> Parity:
    """Decode `prompts` with the drafter of `folder` in our decoder and, as exported, in the engine.

    `job` says how; `plain` is the engine's outcome without a drafter, if it is known. Our decoder drafts the
    engine's chains and, if asked, the drafter's own tree. EngineError when the engine cannot run, or does not
    read the prompts as we do.
    """
    plain = plain or process.run(job)
    for prompt, read in zip(prompts, plain.prompts, strict=True):
        if target.encode(prompt.messages).ids_L.tolist() != read:
            raise EngineError(
                f"vLLM reads prompt {prompt.key} as other tokens than the target's processor does"
            )
    drafter = str(Path(exported.out).absolute())
    served = replace(
        job,
        drafter=drafter,
        method=exported.method,
        draft_tokens=exported.draft_tokens,
        whole_images=exported.whole_images,
    )
    found = process.run(served)
    loaded = target.drafter(folder)
    chain = Tree.parse(f"chain-{served.draft_tokens}")
    pairs = zip(plain.responses, found.responses, strict=True)
    return Parity(
        prompts=len(prompts),
        identical=sum(one == other for one, other in pairs),
        ours=ours(target, loaded, prompts, served, on_prompt, chain),
        engine=DraftCounts(found.drafts, found.accepted),
        versions=found.versions,
        tree=str(loaded.tree) if own_tree else "",
        own=ours(target, loaded, prompts, served, on_prompt, loaded.tree) if own_tree else None,
    )
