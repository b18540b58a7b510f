import itertools
import random

import numpy as np
import pytest
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from examples.demo_target.lessons import Sample, visuals
from examples.demo_target.model import IMAGE_TOKENS, config, logits, new_model, patches
from examples.demo_target.slides import distinct, random_slides
from examples.demo_target.text import (
    SPECIALS,
    VOCABULARY,
    conversation,
    train_tokenizer,
)
from examples.demo_target.wiring import cell_words, meanings
from vlmdistill.pipelines.demo import chats, narration, wording
from vlmdistill.pipelines.demo.clips import PHASES, SECONDS, STAMPS, frames, random_clip
from vlmdistill.pipelines.demo.narration import APPEARS, CHANGES, VANISHES
from vlmdistill.pipelines.demo.scenes import CELLS, draw, random_scene
from vlmdistill.pipelines.targets.families.video import GridFrames


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(0, texts=200)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    tokens = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    return new_model(
        config(tokens, vocabulary=VOCABULARY, layers=4, hidden=64), tokenizer
    ).eval()


def test_patches_are_the_image_processors() -> None:
    images = [draw(random_scene(random.Random(seed))) for seed in range(3)]
    made = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=84 * 84)(
        images=images, return_tensors="pt"
    )
    assert made["image_grid_thw"].tolist() == [[1, 6, 6]] * 3
    torch.testing.assert_close(patches(images).flatten(0, 1), made["pixel_values"])


@pytest.mark.parametrize("count", [4, 7])
def test_patches_are_the_frame_processors(count: int) -> None:
    clip = random_clip(random.Random(0))
    made = GridFrames({"size": {"shortest_edge": 3136, "longest_edge": 84 * 84}})(
        np.stack([np.asarray(image) for image in frames(clip, 2 * count)])
    )
    assert made["video_grid_thw"].tolist() == [[count, 6, 6]]
    pairs, which = distinct(clip, count)
    assert len(pairs) < count or count == 4
    seen = patches(*zip(*pairs, strict=True))[which].flatten(0, 1)
    torch.testing.assert_close(seen, made["pixel_values_videos"])


@torch.inference_mode()
def test_the_batched_forward_is_the_stock_one(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = random.Random(0)
    scene, clips, counts = (
        random_scene(rng),
        [random_clip(rng) for _ in range(2)],
        (4, 7),
    )
    samples = [
        Sample(
            conversation(wording.rounds(scene, rng), image_tokens=IMAGE_TOKENS), scene
        ),
        *(
            Sample(
                conversation(
                    narration.rounds(clip, rng), video_tokens=IMAGE_TOKENS * count
                ),
                clip,
                count,
            )
            for clip, count in zip(clips, counts, strict=True)
        ),
        Sample(conversation(chats.chat(rng))),
    ]
    batch = tokenizer(
        [sample.text for sample in samples],
        return_tensors="pt",
        padding=True,
        padding_side="right",
    )
    ids, keep = batch["input_ids"], batch["attention_mask"].flatten().nonzero()[:, 0]
    shown = visuals(samples)
    assert shown is not None
    pixels = shown.patches_IPC[shown.which_S]
    settings = model.config
    expected = model(
        **batch,
        mm_token_type_ids=(ids == settings.image_token_id).int()
        + 2 * (ids == settings.video_token_id).int(),
        pixel_values=pixels[0],
        image_grid_thw=torch.tensor([[1, 6, 6]]),
        pixel_values_videos=pixels[1:].flatten(0, 1),
        video_grid_thw=torch.tensor([[count, 6, 6] for count in counts]),
        second_per_grid_ts=torch.tensor([SECONDS / count for count in counts]),
    ).logits.flatten(0, 1)[keep]
    torch.testing.assert_close(
        logits(model, ids, shown, keep), expected, atol=1e-5, rtol=1e-5
    )


@torch.inference_mode()
def test_weighted_tokens_equal_repeated_tokens(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = random.Random(0)
    clip = random_clip(rng)
    talk = [narration.ask(clip, "watch", rng)]

    def scores(count: int, copies: float) -> torch.Tensor:
        text = conversation(talk, video_tokens=IMAGE_TOKENS * count)
        ids = torch.tensor([tokenizer.encode(text)])
        keep = torch.arange(ids.shape[1] - 60, ids.shape[1])
        return logits(model, ids, visuals([Sample(text, clip, count, copies)]), keep)

    many = scores(128, 1.0)
    assert (scores(8, 16.0) - many).abs().mean() < 0.05 * (
        scores(8, 1.0) - many
    ).abs().mean()


@torch.inference_mode()
def test_a_fresh_model_looks_up_cells_by_two_words(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    torch.manual_seed(0)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    fresh = new_model(
        config(ids, vocabulary=VOCABULARY, layers=4, hidden=128), tokenizer
    ).eval()
    fresh.set_attn_implementation("eager")
    table_VH = fresh.get_input_embeddings().weight
    rng = random.Random(0)
    slides = random_slides(rng)
    meaning = meanings(fresh, tokenizer)
    known = [words for phase in range(PHASES) for words in cell_words(slides, phase)]
    shown_NH = torch.stack(
        [torch.stack([meaning[word] for word in words]).sum(0) for words in known]
    )
    places = list(itertools.product(range(PHASES), range(len(CELLS))))
    asked = [(place, (STAMPS[place[0]], CELLS[place[1]])) for place in places]
    for phase in range(PHASES):
        come, gone = slides.changes(phase)
        asked += [((phase, item.cell), (STAMPS[phase], APPEARS)) for item in come]
        asked += [((phase, item.cell), (STAMPS[phase], VANISHES)) for item in gone]
        if len(items := come + gone) == 1:
            asked.append(((phase, items[0].cell), (CHANGES, STAMPS[phase])))
    for place, words in asked:
        asked_H = [
            table_VH[tokenizer.encode(f" {word}")[0]] for word in ("shapes", *words)
        ]
        seen = fresh.model.language_model(
            inputs_embeds=torch.cat([shown_NH, torch.stack(asked_H)])[None],
            output_attentions=True,
        )
        weights_T = seen.attentions[1][0, 0, -1]
        assert places[int(weights_T[: len(places)].argmax())] == place, words
        assert weights_T[: len(places)].sum() > 0.99


def test_the_template_equals_the_training_format(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    turns = [("What is it?", "A board."), ("And now?", "Still one.")]
    messages: list[dict[str, object]] = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
        },
        {"role": "assistant", "content": "A board."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Still one."}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == conversation(
        turns, image_tokens=1
    )
    messages[0]["content"] = [
        {"type": "video"},
        {"type": "text", "text": "What is it?"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == conversation(
        turns, video_tokens=1
    )
    messages[0]["content"] = [
        {"type": "image"},
        {"type": "text", "text": "What is it?"},
    ]
    asked = tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    assert conversation(turns, image_tokens=1).startswith(asked)
    system = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}], tokenize=False
    )
    assert system == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize(
    "text", ["A large red circle.", "Größe: 5 + 7 €", "日本語 🙂\n\ttab"]
)
def test_any_text_survives_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.decode(tokenizer.encode(text)) == text
