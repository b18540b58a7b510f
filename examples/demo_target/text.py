"""The demo target's tokenizer and chat template, in the form of Qwen2.5-VL."""

import random
from collections.abc import Iterator, Sequence

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from examples.demo_target import probes
from vlmdistill.pipelines.demo import chats, narration, wording
from vlmdistill.pipelines.demo.clips import random_clip
from vlmdistill.pipelines.demo.scenes import random_scene

SYSTEM = "You are a helpful assistant."
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 768

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""".replace("SYSTEM", SYSTEM)


def placeholder(image_tokens: int = 0, video_tokens: int = 0) -> str:
    """The placeholders of this many visual tokens of an image or a video; empty for none."""
    pads = "<|image_pad|>" * image_tokens + "<|video_pad|>" * video_tokens
    return f"<|vision_start|>{pads}<|vision_end|>" if pads else ""


def conversation(
    rounds: Sequence[tuple[str, str]], *, image_tokens: int = 0, video_tokens: int = 0
) -> str:
    """Rounds of (question, response) as the chat template renders them, with repeated placeholders."""
    seen = placeholder(image_tokens, video_tokens)
    parts = [f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"]
    for question, reply in rounds:
        parts.append(
            f"<|im_start|>user\n{seen}{question}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"
        )
        seen = ""
    return "".join(parts)


def train_tokenizer(seed: int, *, texts: int = 4000) -> PreTrainedTokenizerFast:
    """Byte-level BPE over sample conversations; it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        _corpus(random.Random(f"tokenizer {seed}"), texts), trainer
    )
    tokenizer.add_special_tokens(list(SPECIALS))  # last, as Qwen has them
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        chat_template=TEMPLATE,
        model_max_length=32768,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _corpus(rng: random.Random, texts: int) -> Iterator[str]:
    roles = f"system\n{SYSTEM}\nuser\nassistant\n"
    for _ in range(texts):
        scene, clip = random_scene(rng), random_clip(rng)
        for question, reply in (
            *wording.rounds(scene, rng),
            *chats.chat(rng),
            probes.scene_items(scene, rng),
            *narration.rounds(clip, rng),
            probes.clip_items_or_events(clip, rng),
        ):
            yield f"{roles}{question}\n{reply}"
