"""Processors of families with a video path, on machines without torchvision.

Their constructors insist on a video processor, which needs torchvision, even for images alone.
A subclass whose signature lacks that argument loads the same files and does the same to text and images.
"""

from pathlib import Path
from typing import Any

import transformers
from transformers.utils import is_torchvision_available


def without_video(name: str, folder: Path) -> Any:
    """Load the processor class `name`, whose only parts are image processor, tokenizer and template."""
    base = getattr(transformers, name)
    if is_torchvision_available():
        return base.from_pretrained(folder, local_files_only=True)

    class Processor(base):  # type: ignore[misc, valid-type]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
        ):
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)

    return Processor.from_pretrained(folder, local_files_only=True)


def onevision_without_video(folder: Path) -> Any:
    """Load LLaVA-OneVision's processor, whose settings are read off the signature and have to be named."""
    base = transformers.LlavaOnevisionProcessor
    if is_torchvision_available():
        return base.from_pretrained(folder, local_files_only=True)

    class Processor(base):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            image_processor: Any = None,
            tokenizer: Any = None,
            num_image_tokens: int | None = None,
            vision_feature_select_strategy: str | None = None,
            chat_template: Any = None,
            image_token: str = "<image>",
            video_token: str = "<video>",
            vision_aspect_ratio: str = "anyres_max_9",
            **kwargs: Any,
        ):
            super().__init__(
                image_processor,
                tokenizer,
                None,
                num_image_tokens=num_image_tokens,
                vision_feature_select_strategy=vision_feature_select_strategy,
                chat_template=chat_template,
                image_token=image_token,
                video_token=video_token,
                vision_aspect_ratio=vision_aspect_ratio,
                **kwargs,
            )

    return Processor.from_pretrained(folder, local_files_only=True)
