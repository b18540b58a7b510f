"""Conversations: every form of content, and one line for each that cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import tiny
from vlmdistill.pipelines.media import frames
from vlmdistill.pipelines.media.images import MediaError
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import DataError

Checkpoint = Callable[..., Path]


def test_strings_paths_and_images_in_all_their_forms(
    target: VisionLanguageTarget, tmp_path: Path
) -> None:
    image = tiny.picture(60, 90)
    image.save(tmp_path / "a.png")
    text = target.encode([{"role": "user", "content": "hello"}])
    assert torch.equal(text.ids_L, target.encode(tiny.message("hello")).ids_L)
    seen = target.encode(tiny.message("hello", image))
    for part in (
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "image", "image": tmp_path / "a.png"},
    ):
        other = target.encode(
            [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]
        )
        assert torch.equal(seen.ids_L, other.ids_L)
        assert torch.equal(seen.inputs["pixel_values"], other.inputs["pixel_values"])


@pytest.mark.parametrize(
    ("raised", "passes"),
    [
        (MemoryError("no memory"), True),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            True,
        ),
        (OSError("too many open files"), True),
        (ValueError("the size must be at least 28"), False),
    ],
)
def test_what_may_pass_is_no_refusal(
    target: VisionLanguageTarget,
    raised: Exception,
    passes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise raised

    monkeypatch.setattr(target.processor, "apply_chat_template", fail)
    with pytest.raises(DataError, match=str(raised).partition("(")[0]) as caught:
        target.encode(tiny.message("hello"))
    assert isinstance(caught.value, MediaError) == passes
    if isinstance(raised, MemoryError):
        message = tiny.message("hello", tiny.picture(60, 90))
        monkeypatch.setattr(Image.Image, "convert", fail)
        with pytest.raises(MediaError, match="this machine"):
            target.encode(message)


def test_other_modes_and_orientations_are_read(
    target: VisionLanguageTarget, tmp_path: Path
) -> None:
    image = tiny.picture(30, 90)
    for mode in ("L", "P", "RGBA", "CMYK"):
        assert target.encode(tiny.message("x", image.convert(mode))).spans
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held sideways
    image.save(tmp_path / "side.jpg", exif=exif)
    # An orientation, and a unit of resolution in words: Pillow reads it and cannot write it anew.
    odd = b"Exif\0\0MM\0*\0\0\0\x08\0\2\1\x12\0\3\0\0\0\1\0\6\0\0\1\x28\0\2\0\0\0\4cm \0\0\0\0\0"
    image.save(tmp_path / "odd.jpg", exif=odd)
    for name in ("side.jpg", "odd.jpg"):
        grid = (
            target.encode(tiny.message("x", tmp_path / name))
            .inputs["image_grid_thw"][0]
            .tolist()
        )
        assert grid[1] < grid[2], name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            [{"type": "image", "path": "/nowhere/cat.png"}],
            "image /nowhere/cat.png does not exist",
        ),
        ([{"type": "image", "path": __file__}], "test_encode.py cannot be read"),
        ([{"type": "image", "path": None}], "image None cannot be read"),
        ([{"type": "audio", "path": "a.wav"}], "audio"),
        ([{"type": "image"}], "{'type': 'image'}"),
        ([{"type": "text", "text": 5}], "'text': 5"),
        (None, "role"),
        ([{"type": "text", "text": "x", "image": "a.png"}], "'image'"),
        ([{"type": "text", "text": "x", "index": 0}], "'index'"),
        ([{"type": "image", "image": "a.png", "path": "b.png"}], "'image' and 'path'"),
        ("look: <|image_pad|>", "placeholder"),
        ("half \ud83d of an emoji", "position 6"),
        ("x" * 1100, "1024"),
    ],
    ids=str,
)
def test_unusable_content_is_refused(
    target: VisionLanguageTarget, content: Any, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        target.encode([{"role": "user", "content": content}])
    assert said in str(caught.value)


def test_a_key_of_a_message_that_is_not_read_is_refused(
    target: VisionLanguageTarget,
) -> None:
    message = {"role": "user", "content": "hello"}
    assert target.encode([{**message, "name": None}]).length
    with pytest.raises(DataError, match="'images', which targets do not read"):
        target.encode([{**message, "images": ["a.png"]}])


@pytest.mark.parametrize("role", ["human", "developer", None])
def test_a_role_that_templates_do_not_know_is_refused(
    target: VisionLanguageTarget, role: str | None
) -> None:
    with pytest.raises(DataError, match="use system, user, assistant"):
        target.encode([{"role": role, "content": "hello"}])


def test_a_message_that_is_not_a_mapping(target: VisionLanguageTarget) -> None:
    odd: Any = "what is there?"
    with pytest.raises(DataError, match=r"role.*what is there"):
        target.encode([odd])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"path": "/nowhere/cat.mp4"}, "video /nowhere/cat.mp4 does not exist"),
        ({"path": __file__}, "test_encode.py cannot be read"),
        ({"video": []}, "has no frames"),
        ({"video": tiny.clip(4, 40, 40), "fps": 2, "frames": 2}, "fps 2 or frames 2"),
        ({"video": tiny.clip(4, 40, 40), "frames": 0}, "frames 0"),
        ({"video": tiny.clip(300, 80, 80)}, "1024"),
    ],
    ids=str,
)
def test_unusable_videos_are_refused(
    target: VisionLanguageTarget, part: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        target.encode([{"role": "user", "content": [{"type": "video", **part}]}])


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_a_family_without_video_refuses_one(
    checkpoint: Checkpoint, family: str
) -> None:
    with pytest.raises(DataError, match=r"llava-(1\.5|next).*not videos"):
        load(str(checkpoint(family))).encode(
            tiny.message("what moves?", tiny.clip(4, 40, 40))
        )


@pytest.mark.parametrize("family", tiny.VIDEO)
def test_a_video_in_all_its_forms(
    checkpoint: Checkpoint, family: str, tmp_path: Path
) -> None:
    """A file, the folder of its frames and an array of them are one prompt, and remember what is shown."""
    target = load(str(checkpoint(family)))
    path = tiny.film(tmp_path / "a.mp4", tiny.clip(12, 60, 44), fps=4)
    frames_FHWC = frames.read(path, lambda footage: range(footage.total)).frames_FHWC
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames_FHWC):
        Image.fromarray(frame).save(tmp_path / "frames" / f"{number}.png")
    for wanted, count in (({"fps": 4.0}, 12), ({"frames": 4}, 4)):
        read: list[EncodedPrompt] = []
        for part in (
            {"path": str(path)},
            {"video": path},
            {"path": tmp_path / "frames"},
            {"video": frames_FHWC},
            {"video": [Image.fromarray(frame) for frame in frames_FHWC]},
        ):
            if "frames" in wanted and "path" not in part:
                continue  # without a clock, they are two a second
            content = [
                {"type": "video", **part, **wanted},
                {"type": "text", "text": "hello"},
            ]
            read.append(target.encode([{"role": "user", "content": content}]))
        for prompt in read:
            assert [len(sampling.indices) for sampling in prompt.samplings] == [count]
            assert torch.equal(
                prompt.inputs["pixel_values_videos"],
                read[0].inputs["pixel_values_videos"],
            )
        if "fps" in wanted:
            for prompt in read:
                assert prompt.samplings == read[0].samplings
                assert torch.equal(prompt.ids_L, read[0].ids_L)
                assert torch.equal(prompt.rope_AL, read[0].rope_AL)
            assert read[0].samplings[0].seconds[-1] == 2.75


def test_the_time_between_frames_reaches_the_positions(checkpoint: Checkpoint) -> None:
    """Qwen2.5-VL places frames by their seconds, Qwen3-VL writes them into the prompt."""
    target = load(str(checkpoint("qwen2_5_vl")))
    rate = target.model.config.vision_config.tokens_per_second
    for fps in (1.0, 0.5):
        part = {"type": "video", "video": tiny.clip(6, 40, 40), "fps": fps}
        prompt = target.encode([{"role": "user", "content": [part]}])
        time_U = prompt.rope_AL[0, prompt.visual_L]
        assert sorted(set((time_U - time_U[0]).tolist())) == [
            0,
            int(2 / fps * rate),
            int(4 / fps * rate),
        ]
    target = load(str(checkpoint("qwen3_vl")))
    part = {"type": "video", "video": tiny.clip(6, 40, 40), "fps": 0.5}
    text = target.tokenizer.decode(
        target.encode([{"role": "user", "content": [part]}]).ids_L
    )
    assert [text.count(f"<{seconds} seconds>") for seconds in (1.0, 5.0, 9.0)] == [
        1,
        1,
        1,
    ]


def test_an_empty_conversation(target: VisionLanguageTarget) -> None:
    with pytest.raises(DataError, match="at least one message"):
        target.encode([])


def test_a_truncated_image_names_its_file(
    target: VisionLanguageTarget, tmp_path: Path
) -> None:
    tiny.picture(60, 90).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.png cannot be read"):
        target.encode(tiny.message("x", tmp_path / "cut.png"))


def test_an_image_that_the_processor_refuses(target: VisionLanguageTarget) -> None:
    with pytest.raises(DataError, match="refuses this prompt: absolute aspect ratio"):
        target.encode(tiny.message("x", tiny.picture(3000, 2)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_placeholder_typed_by_the_user(checkpoint: Checkpoint, family: str) -> None:
    target = load(str(checkpoint(family)))
    for images in ([], [tiny.picture(40, 40)]):
        with pytest.raises(DataError, match="placeholder"):
            target.encode(
                tiny.message(f"an {target.processor.image_token} here", *images)
            )


def test_a_text_on_which_the_tokenizer_panics_is_refused_and_the_next_is_not(
    copy: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    target = load(str(tiny.panicking(copy("qwen2_5_vl"))))
    with pytest.raises(DataError, match="processor refuses this prompt"):
        target.encode(tiny.message(tiny.PANIC))
    assert target.encode(tiny.message("hello")).length
    capfd.readouterr()  # what the library wrote


IMAGES_FIRST = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }} {% endfor %}"
    "{% endfor %}"
)
FIRST_TEXT_ALONE = (
    "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"
)


def test_images_that_the_template_moves_out_of_a_text_are_told(
    target: VisionLanguageTarget,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image = {"type": "image", "image": tiny.picture(60, 90)}
    texts = [{"type": "text", "text": text} for text in ("which of", "and", "is red")]
    within = [{"role": "user", "content": [texts[0], image, texts[2]]}]
    target.encode(within)
    assert not caplog.records
    monkeypatch.setattr(target.processor, "chat_template", IMAGES_FIRST)
    target.encode([{"role": "user", "content": [texts[0], image]}])
    assert not caplog.records
    target.encode(within)
    assert "moves the images" in caplog.text


def test_images_that_the_template_moves_are_told_though_a_later_turn_has_one(
    target: VisionLanguageTarget,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image = {"type": "image", "image": tiny.picture(60, 90)}
    photo, seen, other = (
        {"type": "text", "text": text} for text in ("A photo", "I see.", "And this?")
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [image, photo, image]},
        {"role": "assistant", "content": [seen]},
        {"role": "user", "content": [image, other]},
    ]
    monkeypatch.setattr(target.processor.tokenizer, "name_or_path", "another target")
    target.encode(messages)
    assert not caplog.records
    monkeypatch.setattr(target.processor, "chat_template", IMAGES_FIRST)
    target.encode(messages)
    assert "moves the images" in caplog.text


def test_a_text_that_the_template_leaves_out_is_named(
    target: VisionLanguageTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [{"type": "text", "text": text} for text in ("Be brief.", "Be kind.")]
    messages = [{"role": "system", "content": parts}, *tiny.message("hello")]
    target.encode(messages)
    monkeypatch.setattr(target.processor, "chat_template", FIRST_TEXT_ALONE)
    with pytest.raises(DataError, match=r"leaves out a text of the system: 'Be kind"):
        target.encode(messages)


AS_IT_IS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% for part in message['content'] %}{{ part['text'] }} {% endfor %}"
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)
AS_JSON = AS_IT_IS.replace(
    "{{ message['content'] }}",
    "{{ message['content'] if message['content'] is string else message['content'] | tojson }}",
)


@pytest.mark.parametrize("template", [AS_IT_IS, AS_JSON])
def test_a_template_that_writes_a_content_as_it_is_gets_a_text(
    target: VisionLanguageTarget, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    turns = (
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "hi"),
        ("user", "who"),
    )
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in turns
    ]
    expected = target.tokenizer("Be brief. hello hi who ")["input_ids"]
    monkeypatch.setattr(target.processor, "chat_template", template)
    assert target.encode(messages).ids_L.tolist() == expected
    # A text that looks like a part of a turn is one.
    code = {"role": "user", "content": "{'type': 'text', 'text': 'x'}"}
    assert (
        target.encode([code]).ids_L.tolist()
        == (target.tokenizer(code["content"] + " ")["input_ids"])
    )


FIRST_PART_OF_A_RESPONSE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ raise_exception('no parts') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ message['content'][0]['text'] }} {% else %}"
    "{% for part in message['content'] %}{{ part['text'] }} {% endfor %}"
    "{% endif %}{% endfor %}"
)


def test_a_text_of_a_response_that_the_template_leaves_out_is_named(
    target: VisionLanguageTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [{"type": "text", "text": text} for text in ("One.", "Two.")]
    ends = tiny.message("hello"), tiny.message("why")
    monkeypatch.setattr(target.processor, "chat_template", FIRST_PART_OF_A_RESPONSE)
    for content in (texts[:1], [{"type": "text", "text": "Hm. </think>"}]):
        target.encode([*ends[0], {"role": "assistant", "content": content}, *ends[1]])
    with pytest.raises(DataError, match=r"leaves out a text of the assistant: 'Two"):
        target.encode([*ends[0], {"role": "assistant", "content": texts}, *ends[1]])


WITHOUT_REASONING = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ part['text'].split('</think>')[-1] }} {% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("answer", ["", "\n\nB", " Yes, the board is quite red."])
@pytest.mark.parametrize(
    "mark",
    [
        "</think>",
        "</mm:think>",
        "</thinking>",
        "◁/think▷",
        "[BEGIN FINAL RESPONSE]",
        "<|END_THINKING|>",
    ],
)
def test_a_template_may_leave_out_the_reasoning_of_a_response(
    target: VisionLanguageTarget,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    mark: str,
) -> None:
    text = {"type": "text", "text": f"Hm.{mark}{answer}"}
    response = {"role": "assistant", "content": [text]}
    template = WITHOUT_REASONING.replace("</think>", mark)
    monkeypatch.setattr(target.processor, "chat_template", template)
    ids = target.encode([*tiny.message("hi"), response, *tiny.message("why")]).ids_L
    assert "Hm" not in target.tokenizer.decode(ids)


SYSTEM_IS_TEXT = (
    "{% if messages[0]['role'] == 'system' %}{{ 'S: ' + messages[0]['content'] }} {% endif %}"
    "{% for message in messages if message['role'] != 'system' %}"
    "{% for part in message['content'] %}{{ part['text'] }} {% endfor %}{% endfor %}"
)


def test_a_template_that_joins_a_system_turn_to_a_text_gets_a_text(
    target: VisionLanguageTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    monkeypatch.setattr(target.processor, "chat_template", SYSTEM_IS_TEXT)
    ids = target.encode([system, *tiny.message("hello")]).ids_L
    assert ids.tolist() == target.tokenizer("S: Be brief. hello ")["input_ids"]
