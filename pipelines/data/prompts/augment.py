"""Prompt augmentations: named texts that are added to the last question to get long responses.

The papers train and evaluate on long responses, which they get with such a text. It changes every result, so
its name is recorded with each prompt.
"""

from dataclasses import dataclass
from typing import Any

from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean

Message = dict[str, Any]
"""{"role", "content": [{"type": "text", "text"} or {"type": "image"|"video", "path", "fps"|"frames"}]}"""


@dataclass(frozen=True)
class Augmentation:
    """A text, and how it is joined to the question."""

    name: str
    text: str
    source: str
    joint: str = " "  # between the question and the text
    replaces: bool = False  # the text replaces the question
    needs_media: bool = False  # the text speaks of an image

    def apply(self, messages: list[Message]) -> list[Message]:
        """A copy of the conversation with the text added to its last turn."""
        if not self.text:
            return messages
        *earlier, last = messages
        parts = list(last["content"])
        if self.replaces:
            parts = [part for part in parts if part["type"] != "text"]
        if parts and parts[-1]["type"] == "text":
            question = parts.pop()["text"].rstrip()
            parts.append({"type": "text", "text": question + self.joint + self.text})
        else:
            parts.append({"type": "text", "text": self.text})
        return [*earlier, {"role": last["role"], "content": parts}]


_ALL = (
    Augmentation("none", "", "the question unchanged"),
    Augmentation(
        "long",
        "Please answer with at least 1000 words.",
        "ViSpec, training data of stage 2 (responses of the target to LLaVA-Pretrain)",
    ),
    Augmentation(
        "explain",
        "Please answer with an explanation.",
        "ViSpec, evaluation on visual question answering",
    ),
    Augmentation(
        "ocr",
        "Perform an OCR task on the provided image. Please extract the text accurately and provide a "
        "detailed explanation of the process. Ensure the response is comprehensive and well-structured.",
        "ViSpec, evaluation on TextVQA",
        needs_media=True,
    ),
    Augmentation(
        "describe",
        "Please provide a detailed description of the given image.",
        "ViSpec, evaluation on COCO captions: the whole question",
        replaces=True,
        needs_media=True,
    ),
    Augmentation(
        "reason",
        "For the following question, provide a detailed explanation of your reasoning "
        "leading to the answer.",
        "MSD, evaluation through lmms-eval",
        joint="\n",
    ),
)
AUGMENTATIONS = {augmentation.name: augmentation for augmentation in _ALL}


def find(name: str) -> Augmentation:
    """The augmentation of that name; DataError lists the names."""
    if name not in AUGMENTATIONS:
        near = did_you_mean(name, AUGMENTATIONS)
        raise DataError(
            f"there is no augmentation '{name}'{near}: choose from {', '.join(AUGMENTATIONS)}"
        )
    return AUGMENTATIONS[name]


def find_for_text(name: str) -> Augmentation:
    """The same for prompts without images and videos; DataError if its text speaks of an image."""
    augmentation = find(name)
    if augmentation.needs_media:
        others = [each.name for each in _ALL if not each.needs_media]
        raise DataError(
            f"--augment-text {name}: its text is about an image: choose from {', '.join(others)}"
        )
    return augmentation
