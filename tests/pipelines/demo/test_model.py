import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from vlmdistill.pipelines.demo import chats, wording
from vlmdistill.pipelines.demo.model import IMAGE_TOKENS, config, first_layers, logits, new_model, patches
from vlmdistill.pipelines.demo.scenes import draw, random_scene
from vlmdistill.pipelines.demo.text import SPECIALS, VOCABULARY, conversation, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(0, texts=200)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    tokens = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    return new_model(config(tokens, vocabulary=VOCABULARY, layers=4, hidden=64), first=2).eval()


def test_patches_are_the_image_processors() -> None:
    images = [draw(random_scene(random.Random(seed))) for seed in range(3)]
    made = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=84 * 84)(images=images, return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 6, 6]] * 3
    torch.testing.assert_close(patches(images).flatten(0, 1), made["pixel_values"])


@torch.inference_mode()
def test_the_batched_forward_is_the_stock_one(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = random.Random(0)
    scenes = [random_scene(rng) for _ in range(3)]
    texts = [conversation(wording.rounds(scene, rng), image_tokens=IMAGE_TOKENS) for scene in scenes]
    texts.append(conversation(chats.chat(rng)))
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    seen = patches([draw(scene) for scene in scenes])
    keep = batch["attention_mask"].flatten().nonzero()[:, 0]
    expected = model(
        **batch,
        mm_token_type_ids=(batch["input_ids"] == model.config.image_token_id).int(),
        pixel_values=seen.flatten(0, 1),
        image_grid_thw=torch.tensor([[1, 6, 6]] * 3),
    ).logits.flatten(0, 1)[keep]
    torch.testing.assert_close(logits(model, batch["input_ids"], seen, keep), expected, atol=1e-5, rtol=1e-5)
    some = logits(model, batch["input_ids"], seen, keep, only=first_layers(model, 2))
    torch.testing.assert_close(some, expected, atol=1e-5, rtol=1e-5)


def test_the_first_layers_are_spread_over_the_depth(model: Qwen2_5_VLForConditionalGeneration) -> None:
    assert first_layers(model, 1) == (0,)
    assert first_layers(model, 2) == (0, 3)
    assert first_layers(model, 9) == (0, 1, 2, 3)


def test_the_template_renders_what_training_saw(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [("What is it?", "A board."), ("And now?", "Still one.")]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A board."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Still one."}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == conversation(turns, image_tokens=1)
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert conversation(turns, image_tokens=1).startswith(asked)
    system = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}], tokenize=False)
    assert system == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize("text", ["A large red circle.", "Größe: 5 + 7 €", "日本語 🙂\n\ttab"])
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.decode(tokenizer.encode(text)) == text
