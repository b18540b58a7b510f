"""What a drafter has seen of the evaluated prompts: also copies of images, and texts in another spelling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.drafters import synthetic
from tests.thorough import count
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.description import SAMPLES
from vlmdistill.pipelines.bench.evaluate import held_out
from vlmdistill.pipelines.bench.leaks import leaks
from vlmdistill.pipelines.bench.records import Leak
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.prompt_table import Split
from vlmdistill.pipelines.workspace.trained import open_drafters
from vlmdistill.pipelines.workspace.workspace import Workspace

QUESTION = "Describe the picture."
Copy = Callable[[Image.Image, Path], None]


def scene(seed: int) -> Image.Image:
    """Some shapes on noise."""
    random = np.random.default_rng(seed)
    noise_HWC = random.normal(random.integers(60, 200, 3), 12, (84, 84, 3)).clip(0, 255)
    image = Image.fromarray(noise_HWC.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        left, top, size = (int(value) for value in random.integers(5, 50, 3))
        colour = tuple(int(value) for value in random.integers(0, 255, 3))
        draw.ellipse((left, top, left + size, top + size), fill=colour)
    return image


def one_pixel(image: Image.Image, file: Path) -> None:
    red, green, blue = image.getpixel((0, 0))  # type: ignore[misc]
    image.putpixel((0, 0), (red ^ 1, green, blue))
    image.save(file)


COPIES: dict[str, Copy] = {
    "same pixels": lambda image, file: image.save(
        file, optimize=True, compress_level=9
    ),
    "one bit": one_pixel,
    "jpeg": lambda image, file: image.save(file, "JPEG", quality=95),
    "trimmed": lambda image, file: image.crop((1, 0, *image.size)).save(file),
    "half": lambda image, file: image.resize((42, 42)).save(file),
    "quarter": lambda image, file: image.resize((21, 21)).save(file),
    "turned": lambda image, file: turned(image, file),
}


def turned(image: Image.Image, file: Path) -> None:
    """Stored on its side, with the EXIF that says so."""
    exif = Image.Exif()
    exif[0x0112] = 8
    image.rotate(-90, expand=True).save(file, exif=exif)


def imported(
    workspace: Workspace, split: Split, contents: list[Any], name: str
) -> list[str]:
    """Import user turns of these contents; the keys of the split."""
    file = workspace.root.parent / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"messages": [{"role": "user", "content": content}]} for content in contents
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    where = ("--split", split, "--runs", str(workspace.root.parent))
    assert main(["prompts", str(file), "--model", workspace.model, *where]) == 0
    prompts = prompt_table.load(workspace.prompts, workspace.model, split)
    return [prompt.key for prompt in prompts]


def asked_of(file: Path) -> list[dict[str, str]]:
    return [{"type": "image", "image": str(file)}, {"type": "text", "text": QUESTION}]


def leak_of(workspace: Workspace) -> Leak:
    found = leaks(
        workspace,
        open_drafters(workspace, ["sparrow"]),
        held_out(workspace.prompts, 100),
    )["sparrow"]
    assert found is not None
    return found


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_an_image_is_found(
    copy: str, workspace: Workspace, tmp_path: Path
) -> None:
    kinds = range(count(4, 40))
    originals, copies = [], []
    for seed in kinds:
        original, other = tmp_path / f"{seed}.png", tmp_path / f"copy-{seed}.png"
        scene(seed).save(original)
        COPIES[copy](scene(seed), other)
        originals.append(original)
        copies.append(other)
    asked_keys = imported(
        workspace, "eval", [asked_of(file) for file in originals], "eval"
    )
    trained_keys = imported(
        workspace, "train", [asked_of(file) for file in copies], "train"
    )
    assert len(trained_keys) == len(asked_keys)
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=trained_keys)
    assert leak_of(workspace).keys == sorted(asked_keys)


def photograph(seed: int) -> Image.Image:
    """Noise with the spectrum of photographs."""
    phase_CNN = np.random.default_rng(seed).uniform(0, 2 * np.pi, (3, 200, 200))
    wave_N = np.fft.fftfreq(200)
    size_NN = np.hypot(wave_N[:, None], wave_N)
    size_NN[0, 0] = 1
    pixel_CNN = np.fft.ifft2(np.exp(1j * phase_CNN) / size_NN).real
    pixel_NNC = np.moveaxis(pixel_CNN / pixel_CNN.std(), 0, -1)
    return Image.fromarray((128 + 50 * pixel_NNC).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("box", [(4, 4, 196, 196), (6, 0, 200, 200), (0, 0, 200, 194)])
def test_a_trimmed_photograph_is_found(
    box: tuple[int, int, int, int], workspace: Workspace, tmp_path: Path
) -> None:
    """Without 2% of each side, or 3% of one, its thumbnail is as far as that of another."""
    seeds = range(count(6, 60))
    originals = [tmp_path / f"{seed}.png" for seed in seeds]
    copies = [tmp_path / f"copy-{seed}.png" for seed in seeds]
    for seed in seeds:
        photograph(seed).save(originals[seed])
        # Of every second one: the others are of other photographs.
        shown = photograph(seed if seed % 2 else 1000 + seed)
        shown.crop(box).save(copies[seed])
    imported(workspace, "eval", [*map(asked_of, originals)], "eval")
    keys = imported(workspace, "train", [*map(asked_of, copies)], "train")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    prompts = prompt_table.load(workspace.prompts, workspace.model, "eval")
    copied = [str(originals[seed]) for seed in seeds if seed % 2]
    asked_keys = [prompt.key for prompt in prompts if {*prompt.files} & {*copied}]
    assert len(asked_keys) == len(copied)
    assert leak_of(workspace).keys == sorted(asked_keys)


@pytest.mark.parametrize("made", [scene, lambda seed: form(seed)])
def test_several_copies_of_one_image_are_found(
    made: Callable[[int], Image.Image], workspace: Workspace, tmp_path: Path
) -> None:
    """They look alike as forms do, and no other image of the evaluation does."""
    original = made(0)
    half = original.resize((original.width // 2, original.height // 2))
    copies = []
    for quality in (95, 85, 75):
        copies.append(tmp_path / f"{quality}.jpg")
        original.save(copies[-1], "JPEG", quality=quality)
    copies.append(tmp_path / "half.png")
    half.save(copies[-1])
    original.save(tmp_path / "original.png")
    asked_keys = imported(workspace, "eval", [asked_of(tmp_path / "original.png")], "e")
    keys = imported(workspace, "train", [*map(asked_of, copies)], "t")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert leak_of(workspace).keys == asked_keys


def test_one_form_among_many_others_is_no_copy(
    workspace: Workspace, tmp_path: Path
) -> None:
    files = []
    for seed in range(6):
        files.append(tmp_path / f"{seed}.png")
        form(seed).save(files[-1])
    imported(workspace, "eval", [asked_of(files[0])], "eval")
    keys = imported(workspace, "train", [*map(asked_of, files[1:])], "train")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert not leak_of(workspace).keys


def form(seed: int) -> Image.Image:
    """A form: all look alike, and their rows have different words."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", (425, 550), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((20, 20, 405, 60), fill=(30, 60, 120))
    for row in range(12):
        top = 80 + 35 * row
        draw.line((20, top, 405, top), fill="black")
        draw.text((25, top + 8), f"Item {row} of the invoice", fill="black")
        digits = "".join(map(str, random.integers(0, 10, random.integers(3, 30))))
        draw.text((200, top + 8), digits, fill="black")
    return image


@pytest.mark.parametrize("copied", [False, True])
def test_forms_look_alike_and_only_copies_are_found(
    copied: bool, workspace: Workspace, tmp_path: Path
) -> None:
    """An evaluation on documents or screens is not accused of what all of them share."""
    asked_files, trained_files = [], []
    for seed in range(8):
        asked, trained = tmp_path / f"{seed}.png", tmp_path / f"{seed}-trained.jpg"
        form(seed).save(asked)
        form(seed if copied else 100 + seed).save(trained, "JPEG", quality=90)
        asked_files.append(asked)
        trained_files.append(trained)
    asked_keys = imported(workspace, "eval", [*map(asked_of, asked_files)], "eval")
    keys = imported(workspace, "train", [*map(asked_of, trained_files)], "train")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert leak_of(workspace).keys == (sorted(asked_keys) if copied else [])


def test_images_of_the_training_that_are_gone_are_unknown(
    workspace: Workspace, tmp_path: Path
) -> None:
    """A copy among them cannot be found."""
    for seed in range(2):
        scene(seed).save(tmp_path / f"{seed}.png")
    imported(workspace, "eval", [asked_of(tmp_path / "0.png")], "eval")
    keys = imported(workspace, "train", [asked_of(tmp_path / "1.png")], "train")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert leak_of(workspace).unknown == 0
    (tmp_path / "1.png").unlink()
    assert leak_of(workspace).unknown == 1


def test_other_images_are_none(workspace: Workspace, tmp_path: Path) -> None:
    files = []
    for seed in range(count(24, 240)):
        file = tmp_path / f"{seed}.png"
        scene(seed).save(file)
        files.append(file)
    imported(workspace, "eval", [asked_of(file) for file in files[::2]], "eval")
    keys = imported(
        workspace, "train", [asked_of(file) for file in files[1::2]], "train"
    )
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert leak_of(workspace) == Leak(samples=len(keys))


def test_a_text_without_its_punctuation_is_found(workspace: Workspace) -> None:
    asked = imported(workspace, "eval", ["Tell me about the colour white."], "eval")
    trained = ["tell me  about the colour white", "Tell me about the colour red."]
    keys = imported(workspace, "train", trained, "train")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert leak_of(workspace).alike == tuple(asked)


@pytest.mark.parametrize(
    ("asked", "seen", "same"),
    [
        ("Is a café open?", "is a cafe\u0301 open", True),
        ("What is red?", "\uff37\uff48\uff41\uff54 is\u200b red", True),
        ("What's 3 + 4?", "whats 3+4", True),
        ("\u4f60\u597d\uff0c\u4e16\u754c\uff01", "\u4f60\u597d\u4e16\u754c", True),
        ("Add 1, 2.", "Add 12.", False),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is -5?", "What is 5?", False),
        ("What is 12 / 3?", "What is 12 * 3?", False),
        ("Explain C++.", "Explain C#.", False),
        ("\u0915\u093f?", "\u0915\u0940?", False),  # vowels that are marks
        ("\N{GRINNING FACE}?", "\N{PARTY POPPER}?", False),
    ],
)
def test_texts_are_the_same_but_for_their_spelling(
    asked: str, seen: str, same: bool, workspace: Workspace
) -> None:
    imported(workspace, "eval", [asked], "eval")
    keys = imported(workspace, "train", [seen], "train")
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert len(leak_of(workspace).alike) == same


def test_a_later_turn_of_a_conversation_is_found(
    workspace: Workspace, tmp_path: Path
) -> None:
    """As an import does, which would put it on the side of the first."""
    asked = imported(
        workspace,
        "eval",
        ["Tell me about the colour white.", "And what is red?"],
        "eval",
    )
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "tell me about the colour white"),)
    ]
    turns += [
        {"role": "assistant", "content": "It is bright."},
        {"role": "user", "content": "Why?"},
    ]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}))
    where = ("--split", "train", "--turns", "all", "--runs", str(workspace.root.parent))
    assert (
        main(
            [
                "prompts",
                str(tmp_path / "talk.jsonl"),
                "--model",
                workspace.model,
                *where,
            ]
        )
        == 0
    )
    later = [
        prompt.key
        for prompt in prompt_table.load(workspace.prompts, "demo-small", "train")
        if prompt.turn == 2
    ]
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=later)
    assert (len(asked), len(later)) == (2, 1)
    assert len(leak_of(workspace).alike) == 1


def test_samples_of_another_workspace_are_counted(workspace: Workspace) -> None:
    imported(workspace, "eval", ["Tell me about the colour white."], "eval")
    keys = [
        *imported(workspace, "train", ["What is red?"], "train"),
        "elsewhere",
        "there",
    ]
    synthetic.save("sparrow", workspace.drafter("sparrow"), keys=keys)
    assert leak_of(workspace) == Leak(samples=3, unknown=2)


def test_a_lost_list_of_samples_is_unknown(workspace: Workspace) -> None:
    imported(workspace, "eval", ["Tell me about the colour white."], "eval")
    folder = synthetic.save("sparrow", workspace.drafter("sparrow"), keys=["a"])
    for content in (b"", None):
        if content is None:
            (folder / SAMPLES).unlink()
        else:
            (folder / SAMPLES).write_bytes(content)
        assert (
            leaks(
                workspace,
                open_drafters(workspace, ["sparrow"]),
                held_out(workspace.prompts, 9),
            )["sparrow"]
            is None
        )
