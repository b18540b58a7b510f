"""Messages between our process and an engine's process: JSON in files."""

from msgspec import Struct


class Question(Struct, frozen=True, kw_only=True):
    """One prompt: the text after the chat template, placeholders not yet expanded, and its images."""

    text: str
    images: tuple[str, ...] = ()
    """Absolute paths: the engine runs in a folder of its own."""


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
    step_tokens: int | None = None
    """Tokens in one step; longer prompts are read in several."""
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
