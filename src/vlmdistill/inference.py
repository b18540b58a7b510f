"""Load a target and a drafter, and generate with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmdistill.drafters.core.drafter import Proposer
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.decoding.decoders import decode
from vlmdistill.pipelines.data.responses.dataset import SamplingSettings
from vlmdistill.pipelines.streaming.pieces import pieces
from vlmdistill.pipelines.targets.checkpoints.template import Thinking
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.pipelines.workspace.workspace import Workspace
from vlmdistill.stores.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


def load_target(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "sdpa",
    thinking: Thinking = "",
) -> VisionLanguageTarget:
    """Load a target VLM.

    Args:
        name: `demo` (embedded), a registry name such as `qwen2.5-vl-7b`, a hub id, or a checkpoint folder of
            a family that `vlmdistill target list` names.
        device: `cpu`, `cuda`, `cuda:1`, or `auto`: a GPU if there is one, several if one is too small.
        dtype: `bfloat16`, `float16`, `float32`, or `auto`: bfloat16 on a GPU, else float32.
        attention: Kernels of the prefill: `sdpa`, `eager` or `flash_attention_2`.
        thinking: Whether the target reasons: `on`, `off` or `mixed`, as in the training; default: as
            the chat template has it.

    Returns:
        The target, in evaluation mode. `target.encode(messages)` makes a prompt of messages,
        `target.generate(prompts, ...)` generates responses in a batch, and `target.capture(prompts,
        responses, features)` returns their hidden states as samples for a store.

    Raises:
        TargetError: The name is unknown, files are missing or do not fit together, or an option is not
            supported.

    Example:
        >>> target = vlmdistill.load_target("demo")
    """
    return load(
        str(name), device=device, dtype=dtype, attention=attention, thinking=thinking
    )


def load_drafter(path: str | Path, target: VisionLanguageTarget) -> Proposer:
    """Load a drafter for a target, on the target's device and in its dtype.

    Args:
        path: The folder of a trained drafter, its name in the workspace of the target, or the name of a
            method that needs no training, such as `lookahead`.
        target: The target that the drafter was trained for. Its embedding table and LM head are shared.

    Returns:
        The drafter, in evaluation mode; `drafter.config` holds its settings.

    Raises:
        TrainingError: There is no drafter at `path`, its files are damaged, or it was trained for another
            target.

    Example:
        >>> drafter = vlmdistill.load_drafter("runs/demo/drafters/sparrow", target)
    """
    folder = Path(path).expanduser()
    is_name = len(folder.parts) <= 1
    if is_name:
        folder = Workspace.of(target.name).trained(str(folder))
    return target.drafter(folder)


@dataclass(frozen=True)
class Chunk:
    """A piece of a response: the text of one token, or of several that make one character."""

    text: str
    accepted: bool
    """The drafter proposed it and the target accepted it. False: the target chose it."""


def generate(
    target: VisionLanguageTarget,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    images: "str | Path | Image | Sequence[str | Path | Image]" = (),
    videos: str | Path | Sequence[str | Path] = (),
    drafter: Proposer | str | Path | None = None,
    tree: str | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    seed: int = 0,
) -> Iterator[Chunk]:
    """Generate a response and stream it, with the accepted tokens marked.

    The drafter changes the speed, never the response: at temperature 0 the tokens are those of greedy
    decoding, above 0 they follow the target's own distribution (speculative sampling, Leviathan et al. 2023,
    section 2.3).

    Args:
        target: See `load_target`. It decodes one response at a time: beginning another ends this one.
        prompt: The text of a question, or a list of messages in the format of OpenAI.
        images: Image files or PIL images, or one; they precede the text.
        videos: Video files or folders of frames, or one; they follow the images.
        drafter: A drafter, or what `load_drafter` takes to load one for this response; None decodes one token
            at a time.
        tree: Shape of the draft tree: `total-depth-k` such as `30-3-8`, or `chain-5`; the drafter's own by
            default.
        temperature: Of sampling; 0 is greedy.
        max_new_tokens: Maximum length of the response, in tokens; it also ends at the target's last position.
        seed: Seed of the sampling at temperatures above 0.

    Yields:
        The response piece by piece, as it is decoded.

    Raises:
        DataError: The prompt is empty or too long, an image or video cannot be read, a setting is out of
            range, or another response was begun on the target.
        TrainingError: The drafter cannot be loaded.

    Example:
        >>> for chunk in vlmdistill.generate(target, "Describe it.", images=["a.png"], drafter=drafter):
        ...     print(chunk.text, end="")
    """
    SamplingSettings(temperature=temperature, max_new_tokens=max_new_tokens).check()
    if tree is not None and drafter is None:
        raise DataError(
            f"tree '{tree}' has no drafter to grow it: pass drafter=..., or leave tree out"
        )
    draft_tree = None if tree is None else Tree.parse(tree)
    if isinstance(drafter, str | Path):
        drafter = load_drafter(drafter, target)
    encoded = target.encode(_messages(prompt, images, videos))
    generator = torch.Generator(target.device).manual_seed(seed)
    cycles = decode(
        target,
        drafter,
        encoded,
        tree=draft_tree,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
    )
    decoded = pieces(cycles, target.tokenizer)
    return (Chunk(piece.text, piece.drafted) for piece in decoded)


def _messages(
    prompt: str | Sequence[Mapping[str, Any]],
    images: "str | Path | Image | Sequence[str | Path | Image]",
    videos: str | Path | Sequence[str | Path],
) -> Sequence[Mapping[str, Any]]:
    """One user turn, or the conversation that was given."""
    if not isinstance(prompt, str):
        if images or videos:
            raise DataError(
                "images and videos of a conversation belong in its messages: put them there"
            )
        return prompt
    if not prompt.strip():
        raise DataError(
            "the prompt is empty: write what to ask, such as 'Describe the image.'"
        )
    content: list[dict[str, Any]] = []
    for image in _as_list(images):
        content.append({"type": "image", "image": image})
    for video in _as_list(videos):
        content.append({"type": "video", "video": str(video)})
    content.append({"type": "text", "text": prompt})
    return [{"role": "user", "content": content}]


def _as_list(value: Any) -> Sequence[Any]:
    """One value or several as a list: a text or an image is one, though it can be iterated."""
    return value if isinstance(value, list | tuple) else [value]
