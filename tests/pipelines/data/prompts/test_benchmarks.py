"""Evaluation sets: each is read from small files in its published layout, and asked as its papers ask it."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts import augment
from vlmdistill.pipelines.data.prompts.evaluation_sets import BENCHMARKS, find
from vlmdistill.pipelines.data.prompts.local_copies import import_benchmark
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, read
from vlmdistill.stores.errors import DataError

EXPLAIN, OCR, DESCRIBE, REASON = (
    augment.find(name).text for name in ("explain", "ocr", "describe", "reason")
)
PROMPT_OF_SCIENCE = (
    "Question: Which is red?\nContext: N/A\nOptions: (A) this (B) that\n"
    f'Your answer should begin with "The answer is". {EXPLAIN} Answer:'
)


def picture(colour: int = 0) -> dict[str, Any]:
    """An image as the hub stores it in Parquet."""
    file = io.BytesIO()
    Image.new("RGB", (30, 20), (colour, 90, 160)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def parquet(path: Path, *rows: dict[str, Any], group: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)


def film(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tiny.film(path, tiny.clip(4, 32, 32))


def textvqa(to: Path) -> None:
    row: dict[str, Any] = {
        "image_id": "1",
        "question_id": 34602,
        "question": "what is the brand?",
        "question_tokens": ["what"],
    }
    row |= {"image": picture(), "image_width": 30, "image_height": 20, "flickr_original_url": "https://"}
    row |= {"answers": ["nous"] * 10, "image_classes": ["Box"], "set_name": "val", "ocr_tokens": ["LES"]}
    parquet(to / "data/validation-00000-of-00001.parquet", row)
    parquet(to / "data/train-00000-of-00001.parquet", {**row, "question": "of another split"})


def scienceqa(to: Path) -> None:
    row: dict[str, Any] = {
        "image": picture(),
        "question": "Which is red?",
        "choices": ["this", "that"],
        "answer": 0,
        "hint": "",
    }
    row |= {"task": "closed choice", "grade": "grade2", "subject": "art", "lecture": "", "solution": ""}
    parquet(to / "ScienceQA-IMG/test-00000-of-00001.parquet", row)
    parquet(to / "ScienceQA-FULL/test-00000-of-00001.parquet", {**row, "question": "of another config"})


def mme(to: Path) -> None:
    question = "Is it red? Please answer yes or no."
    row: dict[str, Any] = {
        "question_id": "color/1.jpg",
        "image": picture(),
        "question": question,
        "answer": "No",
    }
    parquet(to / "data/test-00000-of-00001-a25dbe3b44c4fda6.parquet", {**row, "category": "color"})


def mm_vet(to: Path) -> None:
    row: dict[str, Any] = {
        "question_id": "v1_0",
        "image": picture(),
        "question": "What is x?",
        "answer": "-1<AND>-5",
    }
    parquet(to / "data/test-00000-of-00001.parquet", {**row, "image_source": "v1", "capability": "ocr,math"})


def coco_captions(to: Path) -> None:
    row: dict[str, Any] = {
        "question_id": "000000179765.jpg",
        "image": picture(),
        "question": "Please carefully observe",
    }
    parquet(
        to / "data/val-00000-of-00001.parquet", {**row, "answer": ["A motorcycle."], "id": 38, "license": 3}
    )


def vizwiz(to: Path) -> None:
    row: dict[str, Any] = {
        "question_id": "VizWiz_test_1",
        "image": picture(),
        "question": "Ok. What is this?",
    }
    parquet(
        to / "data/test-00000-of-00001-8bb04d0d8c47d4ab.parquet",
        {**row, "answers": None, "category": "x"},
    )


def gqa(to: Path) -> None:
    row: dict[str, Any] = {
        "id": "201307251",
        "imageId": "n161313",
        "question": "Is it overcast?",
        "answer": "no",
    }
    parquet(to / "testdev_balanced_instructions/testdev-00000-of-00001.parquet", row)
    images = ({"id": name, "image": picture(n)} for n, name in enumerate(("n1", "n161313")))
    parquet(to / "testdev_balanced_images/testdev-00000-of-00001.parquet", *images)


def seed_bench(to: Path) -> None:
    row: dict[str, Any] = {
        "answer": "A",
        "choice_a": "One",
        "choice_b": "Two",
        "choice_c": "Three",
        "choice_d": "Four",
    }
    row |= {"data_id": "1", "question": "How many?", "question_id": "1", "question_type_id": 5}
    video = {**row, "data_type": "video", "image": [picture(), picture(1)], "segment": [1, 2]}
    parquet(
        to / "data/test-00000-of-00001.parquet", video, {**row, "data_type": "image", "image": [picture()]}
    )


def chartqa(to: Path) -> None:
    row: dict[str, Any] = {
        "type": "human_test",
        "question": "Which bar is highest?",
        "answer": "14",
        "image": picture(),
    }
    parquet(to / "data/test-00000-of-00001.parquet", row)


def vqav2(to: Path) -> None:
    answers = [{"answer": "net", "answer_confidence": "maybe", "answer_id": 1}]
    row: dict[str, Any] = {
        "question_type": "what is",
        "multiple_choice_answer": "net",
        "answers": answers,
        "image_id": 262148,
    }
    row |= {"answer_type": "other", "question_id": 262148000, "question": "Where is he?", "image": picture()}
    parquet(to / "data/validation-00000-of-00001.parquet", row)


def ai2d(to: Path) -> None:
    row: dict[str, Any] = {
        "question": "What is C?",
        "options": ["leaf", "root"],
        "answer": "1",
        "image": picture(),
    }
    parquet(to / "data/test-00000-of-00001.parquet", row)


def hallusion_bench(to: Path) -> None:
    row: dict[str, Any] = {
        "category": "VD",
        "subcategory": "math",
        "visual_input": "1",
        "question": "Is it so?",
        "image": picture(),
    }
    parquet(
        to / "data/image-00000-of-00001.parquet", {**row, "gt_answer": "1", "gt_answer_details": "It is."}
    )
    parquet(to / "data/non_image-00000-of-00001.parquet", {**row, "image": None})


def mmbench(to: Path) -> None:
    row: dict[str, Any] = {
        "index": "241",
        "question": "Which?",
        "hint": "Look.",
        "answer": "A",
        "A": "one",
        "B": "two",
    }
    row |= {"C": "nan", "D": None, "category": "c", "image": picture(), "source": "s", "L2-category": "l"}
    parquet(to / "en/dev-00000-of-00001.parquet", row)


def mmspec(to: Path) -> None:
    folder = to / "dataset/MMSpec/test"
    (folder / "images").mkdir(parents=True)
    (folder / "images/mmspec_001.jpg").write_bytes(picture()["bytes"])
    row: dict[str, Any] = {"id": "mmspec_001", "image": "mmspec_001.jpg", "turns": ["Who is it?", "And now?"]}
    (folder / "mmspec.jsonl").write_text(
        json.dumps({**row, "category": "default", "topic": "general vqa"}) + "\n"
    )


def video_detail_caption(to: Path) -> None:
    parquet(
        to / "data/test-00000-of-00001.parquet",
        {"video_name": "v_1", "question": "Describe it.", "answer": "A."},
    )
    film(to / "Test_Videos/v_1.mp4")


def mvbench(to: Path) -> None:
    row: dict[str, Any] = {
        "video": "1.mp4",
        "question": "What moved?",
        "candidates": ["it", "that"],
        "answer": "it",
    }
    (to / "json").mkdir(parents=True)
    for task in BENCHMARKS["mvbench"].folders:
        (to / "json" / f"{task}.json").write_text(json.dumps([row] if task == "moving_count" else []))
    film(to / "clevrer/video_validation/1.mp4")


def msvd_qa(to: Path) -> None:
    to.mkdir(parents=True)
    row = {"video_name": "-4wsuPCjDBc_5_15", "question": "what runs?", "answer": "squirrel"}
    (to / "annotation_test.json").write_text(json.dumps([row]))
    film(to / "videos/data/-4wsuPCjDBc_5_15.avi")


def longvideobench(to: Path) -> None:
    row: dict[str, Any] = {
        "video_id": "a",
        "question": "What is it?",
        "option0": "one",
        "option1": "two",
        "option2": "N/A",
    }
    row |= {"option3": "N/A", "option4": "N/A", "correct_choice": 0, "video_path": "a.mp4", "duration": 8.0}
    parquet(to / "validation-00000-of-00001.parquet", row)
    film(to / "videos/a.mp4")


def video_mme(to: Path) -> None:
    row: dict[str, Any] = {
        "video_id": "001",
        "duration": "short",
        "videoID": "fFj[1]",
        "question": "When?",
        "answer": "B",
    }
    parquet(to / "videomme/test-00000-of-00001.parquet", {**row, "options": ["A. Then.", "B. Now."]})
    film(to / "data/fFj[1].mkv")


ASKED: dict[
    Callable[[Path], None], dict[str, list[str]]
] = {  # the copy, and the text of the user turn by paper
    textvqa: {"vispec": ["what is the brand?", OCR], "hivis": ["what is the brand? " + OCR]},
    scienceqa: {"vispec": [PROMPT_OF_SCIENCE], "hivis": ["Which is red? (A) this (B) that"]},
    mme: {"vispec": ["Is it red?", EXPLAIN], "msd": ["Is it red?\n" + REASON]},
    mm_vet: {"vispec": ["What is x?", EXPLAIN]},
    coco_captions: {"vispec": [DESCRIBE]},
    vizwiz: {"vispec": ["Ok. What is this?", EXPLAIN]},
    gqa: {"vispec": ["Is it overcast?", EXPLAIN]},
    seed_bench: {"vispec": ["How many?", EXPLAIN]},
    chartqa: {"msd": ["Which bar is highest?\n" + REASON], "hivis": ["Which bar is highest?"]},
    vqav2: {"msd": ["Where is he?\n" + REASON]},
    ai2d: {"msd": ["What is C?\nA. leaf\nB. root\n" + REASON]},
    hallusion_bench: {"msd": [REASON + "Is it so?"]},
    mmbench: {"msd": ["Look. Which? There are several options:\nA. one\nB. two\n\n" + REASON]},
    mmspec: {"mmspec": ["Who is it?"]},
    video_detail_caption: {"sparrow": ["Describe it."]},
    mvbench: {
        "sparrow": ["Question:What moved?\nOption:\n(A) it\n(B) that\nOnly give the best option."],
        "vispec": ["What moved?", EXPLAIN],
    },
    msvd_qa: {"vispec": ["what runs?", EXPLAIN]},
    longvideobench: {"sparrow": ["What is it?\nA. one\nB. two"]},
    video_mme: {"sparrow": ["When?\nA. Then.\nB. Now."]},
}


def imported(name: str, data: Path, out: Path, **more: Any) -> list[Prompt]:
    import_benchmark(*find(name), out, label=name, data=data, **more)
    return read(out)


@pytest.mark.parametrize("copy", ASKED, ids=lambda copy: copy.__name__)
def test_a_set_is_read_from_its_published_layout(copy: Callable[[Path], None], tmp_path: Path) -> None:
    name = copy.__name__.replace("_", "-")
    copy(tmp_path / name)
    for paper, texts in ASKED[copy].items():
        (prompt,) = imported(f"{name}@{paper}", tmp_path, tmp_path / paper / "prompts.parquet")
        user = prompt.messages[-1]["content"]
        assert [part["text"] for part in user if part["type"] == "text"] == texts
        (shown,) = (part for part in user if part["type"] != "text")
        assert shown["type"] == BENCHMARKS[name].kind
        assert (shown is user[-1]) == (paper == "vispec" and shown["type"] == "image")
        assert [message["role"] for message in prompt.messages[:-1]] == ["system"] * (
            paper in ("vispec", "mmspec")
        )
        assert (prompt.split, prompt.dataset.partition("/")[0]) == ("eval", f"{name}@{paper}")


def test_every_set_has_its_layout_here() -> None:
    assert {copy.__name__.replace("_", "-") for copy in ASKED} == BENCHMARKS.keys()


def test_mmspec_keeps_its_topics_apart(tmp_path: Path) -> None:
    mmspec(tmp_path)
    assert imported("mmspec", tmp_path, tmp_path / "prompts.parquet")[0].dataset == "mmspec/general vqa"


def test_sets_that_ask_alike_are_both_measured(tmp_path: Path) -> None:
    mm_vet(tmp_path / "mm-vet")
    (one,) = imported("mm-vet@hivis", tmp_path, tmp_path / "prompts.parquet")
    both = imported("mm-vet@sparrow", tmp_path, tmp_path / "prompts.parquet")
    assert [prompt.dataset for prompt in both] == ["mm-vet@hivis", "mm-vet@sparrow"]
    assert both[0] == one
    assert both[0].messages == both[1].messages


def many(to: Path, count: int = 130) -> None:
    """ChartQA in two files of several row groups."""
    rows = [
        {"question": f"Question {n}?", "image": picture(n), "type": "human_test", "answer": "1"}
        for n in range(count)
    ]
    parquet(to / "data/test-00000-of-00002.parquet", *rows[:70], group=9)
    parquet(to / "data/test-00001-of-00002.parquet", *rows[70:], group=9)


def test_samples_are_chosen_by_number_and_seed_from_all_files(tmp_path: Path) -> None:
    many(tmp_path)
    chosen = {
        name: [
            prompt.messages[-1]["content"][1]["text"] for prompt in imported(name, tmp_path, tmp_path / name)
        ]
        for name in ("chartqa@msd", "chartqa@hivis")
    }
    assert [len(set(texts)) for texts in chosen.values()] == [100, 80]
    again = imported("chartqa@hivis", tmp_path, tmp_path / "again")
    assert [prompt.messages[-1]["content"][1]["text"] for prompt in again] == chosen["chartqa@hivis"]
    numbers = [int(text.split()[1].rstrip("?")) for text in chosen["chartqa@hivis"]]
    assert numbers == sorted(numbers)
    assert min(numbers) < 70 < max(numbers)
    few = imported("chartqa@hivis", tmp_path, tmp_path / "few", limit=3)
    assert {prompt.messages[-1]["content"][1]["text"] for prompt in few} < set(chosen["chartqa@hivis"])


def failing(name: str, data: Path, *named: str) -> None:
    """The import ends with one line that has these words."""
    with pytest.raises(DataError) as caught:
        imported(name, data, data / "out" / "prompts.parquet")
    assert "\n" not in str(caught.value)
    assert [word for word in named if word not in str(caught.value)] == []


def test_what_is_missing_says_what_to_download(tmp_path: Path) -> None:
    failing("textvqa", tmp_path, "lmms-lab-encoder/textvqa", "hf download", "--bench-data")
    failing("mmspec", tmp_path, "git clone https://github.com/killthefullmoon/MMSpec")
    failing("video-mme", tmp_path, "videos_chunked_*.zip")
    gqa(tmp_path / "gqa")
    shutil.rmtree(tmp_path / "gqa" / "testdev_balanced_images")
    failing("gqa", tmp_path, "testdev_balanced_images")
    video_detail_caption(tmp_path / "VideoDetailCaption")
    shutil.rmtree(tmp_path / "VideoDetailCaption" / "Test_Videos")
    failing("video-detail-caption", tmp_path, "v_1", "unpack videos.zip")


def test_samples_are_not_chosen_from_some_of_the_files(tmp_path: Path) -> None:
    many(tmp_path)
    (tmp_path / "data/test-00001-of-00002.parquet").unlink()
    failing("chartqa", tmp_path, "1 files", "test-00001")
    mvbench(tmp_path / "mvbench")
    (tmp_path / "mvbench/json/state_change.json").unlink()
    failing("mvbench", tmp_path, "state_change")


def test_without_the_hub_a_missing_set_says_what_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="--repo-type dataset lmms-lab-encoder/textvqa"):
        import_benchmark(*find("textvqa"), tmp_path / "prompts.parquet", label="textvqa")


@pytest.mark.parametrize("name", ["textvqa", "seed-bench", "gqa", "mmspec", "longvideobench"])
def test_a_wrong_column_is_named(name: str, tmp_path: Path) -> None:
    copy = next(copy for copy in ASKED if copy.__name__.replace("_", "-") == name)
    copy(tmp_path)
    column = {"seed-bench": "data_type", "gqa": "imageId", "mmspec": "turns"}.get(name, "question")
    for file in tmp_path.glob(BENCHMARKS[name].files):
        if file.suffix == ".parquet":
            table = pq.read_table(file)
            pq.write_table(
                table.rename_columns([f"{column}s" if one == column else one for one in table.column_names]),
                file,
            )
        else:
            file.write_text(file.read_text().replace(f'"{column}"', f'"{column}s"'))
    failing(name, tmp_path, f"'{column}'" if name != "seed-bench" else column, f"{column}s")


def test_an_empty_split_a_broken_file_and_unknown_names_end_in_one_line(tmp_path: Path) -> None:
    textvqa(tmp_path)
    file = tmp_path / "data/validation-00000-of-00001.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    failing("textvqa", tmp_path, "no rows")
    file.write_bytes(b"PAR1")
    failing("textvqa", tmp_path, str(file), "Parquet")
    for name, word in (("text-vqa", "textvqa"), ("textvqa@eagle", "vispec, msd, hivis")):
        with pytest.raises(DataError, match=word):
            find(name)


def test_no_file_outside_of_a_copy_is_read(tmp_path: Path) -> None:
    mmspec(tmp_path)
    file = tmp_path / "dataset/MMSpec/test/mmspec.jsonl"
    file.write_text(file.read_text().replace("mmspec_001.jpg", "../../../../../secret.jpg"))
    failing("mmspec", tmp_path, "secret.jpg")


def test_eval_measures_several_sets_in_one_process(
    tmp_path: Path, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    chartqa(tmp_path / "data" / "chartqa")
    mme(tmp_path / "data" / "mme")
    where = [
        "--model",
        str(checkpoint("qwen2_5_vl")),
        "--runs",
        str(tmp_path / "runs"),
        "--max-new-tokens",
        "4",
    ]
    sets = [
        "--bench",
        "chartqa",
        "--bench",
        "mme@msd",
        "--bench",
        "demo",
        "--bench-data",
        str(tmp_path / "data"),
    ]
    assert main(["eval", "lookahead", *sets, "--limit", "4", "--json", *where]) == 0
    (at,) = json.loads(capsys.readouterr().out.splitlines()[-1])["lookahead"]["temperatures"]
    kinds = {"demo/description", "demo/questions", "demo/several images", "demo/text only"}
    assert at["by_dataset"].keys() == {"chartqa", "mme@msd"} | kinds
    assert main(["eval", "lookahead", "--bench", "chartqa", "--prompts", "p.parquet", *where]) == 2
