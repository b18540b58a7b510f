"""Prompt augmentations: named texts added to the last question, so that targets answer at length.

Drafters learn from, and are measured on, long answers; the papers get them by a suffix. Which one
was used changes every number, so it has a name and is recorded with each prompt.
"""

from dataclasses import dataclass
from typing import Any

from vlmdistill.stores.errors import DataError

# {"role": ..., "content": [{"type": "text"|"image"|"video", "text"|"path": ..., "fps"|"frames" of a video}]}
Message = dict[str, Any]


@dataclass(frozen=True)
class Augmentation:
    """A text and how it joins the question."""

    name: str
    text: str
    source: str
    joint: str = " "  # between the question and the text
    replaces: bool = False  # the text stands instead of the question

    def apply(self, messages: list[Message]) -> list[Message]:
        """The same conversation with the last user turn augmented; the input is left as it was."""
        if not self.text:
            return messages
        last = messages[-1]
        parts = list(last["content"])
        if self.replaces:
            parts = [part for part in parts if part["type"] != "text"]
        if parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"].rstrip() + self.joint + self.text}
        else:
            parts.append({"type": "text", "text": self.text})
        return [*messages[:-1], {"role": last["role"], "content": parts}]


AUGMENTATIONS = {
    item.name: item
    for item in (
        Augmentation("none", "", "the question as it is"),
        Augmentation(
            "long",
            "Please answer with at least 1000 words.",
            "ViSpec, training data of stage 2 (LLaVA-Pretrain answered by the target)",
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
        ),
        Augmentation(
            "describe",
            "Please provide a detailed description of the given image.",
            "ViSpec, evaluation on COCO captions: the whole question",
            replaces=True,
        ),
        Augmentation(
            "reason",
            "For the following question, provide a detailed explanation of your reasoning "
            "leading to the answer.",
            "MSD, evaluation through lmms-eval",
            joint="\n",
        ),
    )
}


def find(name: str) -> Augmentation:
    """The augmentation of that name; DataError lists the known ones."""
    if name not in AUGMENTATIONS:
        raise DataError(f"there is no augmentation '{name}': choose from {', '.join(AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
