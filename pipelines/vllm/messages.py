"""Messages between our process and an engine's process: JSON in files."""

from msgspec import Struct


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
    method: str = "eagle"
    draft_tokens: int = 0
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    dtype: str = "float32"
    batch: int = 8
    """Requests decoded together."""
    step_tokens: int = 0
    """Tokens of a prompt in one step; longer ones are read in several. 0: as many as fit."""
    whole_images: bool = False
    """All visual tokens of an image in one step."""
    prefix_caching: bool = False


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
    versions: dict[str, str]
