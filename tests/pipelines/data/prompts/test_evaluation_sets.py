"""Evaluation sets: what is declared, and small copies in the published layouts."""

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
from vlmdistill.pipelines.data.prompts.evaluation_sets import PAPERS, SETS, find
from vlmdistill.pipelines.data.prompts.local_copies import import_set
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt, read
from vlmdistill.stores.errors import DataError

EXPLAIN, REASON = (augment.find(name).text for name in ("explain", "reason"))


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


def gqa(to: Path) -> None:
    row = {
        "id": "201307251",
        "imageId": "n161313",
        "question": "Is it overcast?",
        "answer": "no",
    }
    parquet(to / "testdev_balanced_instructions/testdev-00000-of-00001.parquet", row)
    images = (
        {"id": name, "image": picture(n)} for n, name in enumerate(("n1", "n161313"))
    )
    parquet(to / "testdev_balanced_images/testdev-00000-of-00001.parquet", *images)


def seed_bench(to: Path) -> None:
    row = {
        "choice_a": "One",
        "choice_b": "Two",
        "question": "How many?",
        "question_type_id": 5,
    }
    video = {
        **row,
        "data_type": "video",
        "image": [picture(), picture(1)],
        "segment": [1, 2],
    }
    still = {**row, "data_type": "image", "image": [picture()]}
    parquet(to / "data/test-00000-of-00001.parquet", video, still)


def mmspec(to: Path) -> None:
    folder = to / "dataset/MMSpec/test"
    (folder / "images").mkdir(parents=True)
    (folder / "images/mmspec_001.jpg").write_bytes(picture()["bytes"])
    row = {
        "id": "mmspec_001",
        "image": "mmspec_001.jpg",
        "turns": ["Who is it?", "And now?"],
    }
    (folder / "mmspec.jsonl").write_text(
        json.dumps({**row, "topic": "general vqa"}) + "\n"
    )


def mvbench(to: Path) -> None:
    row = {
        "video": "1.mp4",
        "question": "What moved?",
        "candidates": ["it", "that"],
        "answer": "it",
    }
    (to / "json").mkdir(parents=True)
    for task in SETS["mvbench"].folders:
        (to / "json" / f"{task}.json").write_text(
            json.dumps([row] if task == "moving_count" else [])
        )
    film(to / "clevrer/video_validation/1.mp4")


def video_mme(to: Path) -> None:
    row = {
        "video_id": "001",
        "videoID": "fFj[1]",
        "question": "When?",
        "options": ["A. Then.", "B. Now."],
    }
    parquet(to / "videomme/test-00000-of-00001.parquet", row)
    film(to / "data/fFj[1].mkv")


def llava_instruct(to: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A bus."},
    ]
    (to / "train2017").mkdir(parents=True)
    (to / "train2017/0001.jpg").write_bytes(picture()["bytes"])
    rows = [{"id": "1", "image": "0001.jpg", "conversations": turns}]
    (to / "llava_instruct_150k.json").write_text(json.dumps(rows))


def kinetics(to: Path) -> None:
    to.mkdir(parents=True)
    (to / "annotation_val.json").write_text(
        json.dumps([{"video_name": "abc_000001_000011"}])
    )
    film(to / "val/juggling/abc_000001_000011.mp4")


def mathvista(to: Path) -> None:
    row = {"question": "How many?", "decoded_image": picture(), "image": "images/1.jpg"}
    parquet(to / "data/testmini-00000-of-00001.parquet", row)


def seed_bench_2(to: Path) -> None:
    still = {"question": "How many?", "data_type": "Single Image", "image": [picture()]}
    video = {
        "question": "When?",
        "data_type": "Video",
        "image": [picture(), picture(1)],
    }
    parquet(to / f"data/{SHARD}", video, still)


def asking(file: str, **row: Any) -> Callable[[Path], None]:
    """A copy with one row about one image."""
    return lambda to: parquet(to / file, {"image": picture(), **row})


SHARD = "test-00000-of-00001.parquet"
chartqa = asking(f"data/{SHARD}", question="Which bar is highest?", answer="14")
textvqa = asking(
    "data/validation-00000-of-00001.parquet", question="what is the brand?"
)
mm_vet = asking(f"data/{SHARD}", question="What is x?", answer="-1<AND>-5")
COPIES: dict[
    str, tuple[Callable[[Path], None], list[str]]
] = {  # and the texts of the user turn
    "gqa@vispec": (gqa, ["Is it overcast?", EXPLAIN]),
    "seed-bench@hivis": (seed_bench, ["How many?"]),
    "mmspec@mmspec": (mmspec, ["Who is it?"]),
    "mvbench@vispec": (mvbench, ["What moved?", EXPLAIN]),
    "video-mme@sparrow": (video_mme, ["When?\nA. Then.\nB. Now."]),
    "textvqa@msd": (textvqa, [f"what is the brand?\n{REASON}"]),
    "llava-instruct@specflash": (llava_instruct, ["What is it?"]),
    "kinetics-400@specflash": (kinetics, ["Describe what happen in the video?"]),
    "mathvista@dream": (mathvista, ["How many?"]),
    "seed-bench-2@dream": (seed_bench_2, ["How many?"]),
}
TEXTS: list[tuple[str, dict[str, Any], str]] = [  # of templates that depend on the row
    (
        "scienceqa@vispec",
        {"question": "Which is red?", "choices": ["this", "that"], "hint": ""},
        "Question: Which is red?\nContext: N/A\nOptions: (A) this (B) that\n"
        f'Your answer should begin with "The answer is". {EXPLAIN} Answer:',
    ),
    (
        "scienceqa@sparrow",
        {"question": "Which?", "choices": ["<a>", "b"], "hint": "Look."},
        "Context: Look.\nWhich?\nA. <a>\nB. b",
    ),
    ("mme@hivis", {"question": "Is it red? Please answer yes or no. "}, "Is it red?"),
    (
        "mmbench@msd",
        {"question": "Which?", "hint": "nan", "A": "one", "B": "two", "C": "nan", "D": None},
        f"Which? There are several options:\nA. one\nB. two\n\n{REASON}",
    ),
    (
        "longvideobench@sparrow",
        {"question": "What?", "option0": "one", "option1": "two"}
        | {"option2": "N/A", "option3": "N/A", "option4": None},
        "What?\nA. one\nB. two",
    ),
    ("hallusion-bench@msd", {"question": "Is it so?"}, f"{REASON}Is it so?"),
]  # fmt: skip


def imported(name: str, data: Path, out: Path, **more: Any) -> list[Prompt]:
    import_set(*find(name), out, label=name, data=data, **more)
    return read(out)


def test_what_is_declared_fits_together() -> None:
    for one in SETS.values():
        assert {*one.asked, *one.whole} <= PAPERS.keys(), one.name
        images_by_path = one.name in ("mmspec", "llava-instruct")
        assert (one.kind == "video") == ("{" in one.media and not images_by_path), (
            one.name
        )
        assert bool(one.folders) == ("{folder}" in one.media), one.name
        for paper in one.asked:
            assert find(f"{one.name}@{paper}") == (one, PAPERS[paper])
            assert one.texts(paper, EVERY_COLUMN), one.name


EVERY_COLUMN: dict[str, Any] = {"question": "Q", "hint": "", "turns": ["Q"]}
EVERY_COLUMN |= {"conversations": [{"from": "human", "value": "Q"}]}
EVERY_COLUMN |= {name: ["a", "b"] for name in ("choices", "options", "candidates")}
EVERY_COLUMN |= dict.fromkeys(
    ("A", "B", "C", "D", *(f"option{n}" for n in range(5))), "a"
)


@pytest.mark.parametrize(
    ("name", "row", "text"), TEXTS, ids=[name for name, *_ in TEXTS]
)
def test_a_question_is_asked_as_the_paper_asks_it(
    name: str, row: dict[str, Any], text: str
) -> None:
    published, paper = find(name)
    assert published.texts(paper.name, row) == [text]


@pytest.mark.parametrize("name", COPIES)
def test_a_set_is_read_from_its_published_layout(name: str, tmp_path: Path) -> None:
    copy, texts = COPIES[name]
    published, paper = find(name)
    copy(tmp_path / published.name)
    (prompt,) = imported(name, tmp_path, tmp_path / "prompts.parquet")
    user = prompt.messages[-1]["content"]
    assert [part["text"] for part in user if part["type"] == "text"] == texts
    (shown,) = (part for part in user if part["type"] != "text")
    assert shown["type"] == published.kind
    assert (shown is user[-1]) == (paper.name == "vispec" and published.kind == "image")
    system = [
        part["text"] for message in prompt.messages[:-1] for part in message["content"]
    ]
    assert system == [paper.system] * bool(paper.system)
    assert (prompt.split, prompt.dataset.partition("/")[0]) == ("eval", name)


@pytest.mark.parametrize("sampled", [{"frames": 4}, {"fps": 2.0}])
def test_videos_are_sampled_as_asked_for(
    sampled: dict[str, Any], tmp_path: Path
) -> None:
    kinetics(tmp_path / "kinetics-400")
    (prompt,) = imported(
        "kinetics-400@specflash", tmp_path, tmp_path / "prompts.parquet", **sampled
    )
    (shown,) = prompt.media
    assert {name: shown.get(name) for name in sampled} == sampled


@pytest.mark.parametrize(
    "option", [("--frames", "4"), ("--fps", "2"), ("--bench-data", "sets")]
)
def test_options_of_sets_need_a_set(option: tuple[str, str], tmp_path: Path) -> None:
    assert main(["eval", "lookahead", "--runs", str(tmp_path), *option]) == 2


def test_a_question_that_is_null_is_not_the_word_none(tmp_path: Path) -> None:
    asking(f"data/{SHARD}", question=None, answer="14")(tmp_path / "chartqa")
    with pytest.raises(DataError, match=r"not the published one \(.* null"):
        imported("chartqa@msd", tmp_path, tmp_path / "prompts.parquet")


def test_a_column_of_several_types_holds_what_its_json_says(tmp_path: Path) -> None:
    chartqa(tmp_path / "chartqa")
    file = tmp_path / f"chartqa/data/{SHARD}"
    table = pq.read_table(file)
    question = pa.array(['"Which bar is highest?"'], pa.json_())
    pq.write_table(
        table.set_column(table.column_names.index("question"), "question", question),
        file,
    )
    (prompt,) = imported("chartqa@msd", tmp_path, tmp_path / "prompts.parquet")
    assert "\n".join(
        part.get("text", "") for part in prompt.messages[-1]["content"]
    ).startswith("\nWhich bar is highest?")


def test_mmspec_keeps_its_topics_apart(tmp_path: Path) -> None:
    mmspec(tmp_path / "mmspec")
    assert (
        imported("mmspec", tmp_path, tmp_path / "prompts.parquet")[0].dataset
        == "mmspec/general vqa"
    )


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
        {
            "question": f"Question {n}?",
            "image": picture(n),
            "type": "human_test",
            "answer": "1",
        }
        for n in range(count)
    ]
    parquet(to / "data/test-00000-of-00002.parquet", *rows[:70], group=9)
    parquet(to / "data/test-00001-of-00002.parquet", *rows[70:], group=9)


def test_samples_are_chosen_by_number_and_seed_from_all_files(tmp_path: Path) -> None:
    many(tmp_path / "chartqa")
    chosen = {
        name: [
            prompt.messages[-1]["content"][1]["text"]
            for prompt in imported(name, tmp_path, tmp_path / f"{name}.parquet")
        ]
        for name in ("chartqa@msd", "chartqa@hivis")
    }
    assert [len(set(texts)) for texts in chosen.values()] == [100, 80]
    again = imported("chartqa@hivis", tmp_path, tmp_path / "again")
    assert [prompt.messages[-1]["content"][1]["text"] for prompt in again] == chosen[
        "chartqa@hivis"
    ]
    numbers = [int(text.split()[1].rstrip("?")) for text in chosen["chartqa@hivis"]]
    assert numbers == sorted(numbers)
    assert min(numbers) < 70 < max(numbers)
    few = imported("chartqa@hivis", tmp_path, tmp_path / "few", limit=3)
    assert {prompt.messages[-1]["content"][1]["text"] for prompt in few} < set(
        chosen["chartqa@hivis"]
    )


def failing(name: str, data: Path, *named: str) -> None:
    """The import ends with one line that has these words."""
    with pytest.raises(DataError) as caught:
        imported(name, data, data / "out" / "prompts.parquet")
    assert "\n" not in str(caught.value)
    assert [word for word in named if word not in str(caught.value)] == []


def test_what_is_missing_says_what_to_download(tmp_path: Path) -> None:
    failing(
        "textvqa", tmp_path, "lmms-lab-encoder/textvqa", "hf download", "--bench-data"
    )
    failing("mmspec", tmp_path, "git clone https://github.com/killthefullmoon/MMSpec")
    failing("video-mme", tmp_path, "videos_chunked_*.zip")
    gqa(tmp_path / "gqa")
    shutil.rmtree(tmp_path / "gqa" / "testdev_balanced_images")
    failing("gqa", tmp_path, "testdev_balanced_images")
    video_mme(tmp_path / "Video-MME")
    shutil.rmtree(tmp_path / "Video-MME" / "data")
    failing("video-mme", tmp_path, "fFj[1]", "unpack videos_chunked_*.zip")


def test_samples_are_not_chosen_from_some_of_the_files(tmp_path: Path) -> None:
    many(tmp_path / "chartqa")
    (tmp_path / "chartqa/data/test-00001-of-00002.parquet").unlink()
    failing("chartqa", tmp_path, "1 files", "test-00001")
    mvbench(tmp_path / "mvbench")
    (tmp_path / "mvbench/json/state_change.json").unlink()
    failing("mvbench", tmp_path, "state_change")


def test_a_copy_of_another_set_with_the_same_files_is_not_measured(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "chartqa"
    chartqa(copy)
    assert imported("chartqa@msd", copy, tmp_path / "chartqa.parquet")
    failing("mme", copy, "lmms-lab-encoder/MME", "not named")
    failing("chartqa", copy.rename(tmp_path / "sets"), "not named")
    cached = tmp_path / "datasets--lmms-lab-encoder--ChartQA" / "snapshots" / "1f0e"
    chartqa(cached)
    assert imported("chartqa@msd", cached, tmp_path / "cached.parquet")


def test_what_lies_beside_a_film_is_not_shown_for_it(tmp_path: Path) -> None:
    copy = tmp_path / "video-mme"
    video_mme(copy)
    film_file = copy / "data" / "fFj[1].mkv"
    for ending in (".en.srt", ".gif"):
        film_file.with_suffix(ending).write_bytes(b"GIF89a")
    (prompt,) = imported("video-mme", tmp_path, tmp_path / "prompts.parquet")
    assert prompt.files == [str(film_file)]


def test_files_of_two_downloads_are_not_measured_together(tmp_path: Path) -> None:
    folder = tmp_path / "chartqa"
    for name in (
        "test-00000-of-00002.parquet",
        "test-00000-of-00001-725687bf7a18d64b.parquet",
        "test-backup.parquet",
    ):
        shutil.rmtree(folder, ignore_errors=True)
        chartqa(folder)
        assert imported("chartqa", tmp_path, tmp_path / f"{name}.prompts")
        shutil.copy(folder / "data" / SHARD, folder / "data" / name)
        failing("chartqa", tmp_path, "several downloads", name)


def test_without_the_hub_a_missing_set_says_what_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="--repo-type dataset lmms-lab-encoder/textvqa"):
        import_set(*find("textvqa"), tmp_path / "prompts.parquet", label="textvqa")


@pytest.mark.parametrize("name", ["textvqa", "seed-bench", "gqa", "mmspec"])
def test_a_wrong_column_is_named(name: str, tmp_path: Path) -> None:
    next(copy for known, (copy, _) in COPIES.items() if known.startswith(name))(
        tmp_path / name
    )
    column = {"seed-bench": "data_type", "gqa": "imageId", "mmspec": "turns"}.get(
        name, "question"
    )
    for file in (tmp_path / name).glob(SETS[name].files):
        if file.suffix == ".parquet":
            table = pq.read_table(file)
            pq.write_table(
                table.rename_columns(
                    [
                        f"{column}s" if one == column else one
                        for one in table.column_names
                    ]
                ),
                file,
            )
        else:
            file.write_text(file.read_text().replace(f'"{column}"', f'"{column}s"'))
    failing(
        name, tmp_path, f"'{column}'" if name != "seed-bench" else column, f"{column}s"
    )


def test_an_empty_split_a_broken_file_and_unknown_names_end_in_one_line(
    tmp_path: Path,
) -> None:
    textvqa(tmp_path / "textvqa")
    file = tmp_path / "textvqa/data/validation-00000-of-00001.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    failing("textvqa", tmp_path, "no rows")
    file.write_bytes(b"PAR1")
    failing("textvqa", tmp_path, str(file), "Parquet")
    for name, word in (
        ("text-vqa", "textvqa"),
        ("textvqa@eagle", "vispec, msd, hivis"),
    ):
        with pytest.raises(DataError, match=word):
            find(name)


def test_no_file_outside_of_a_copy_is_read(tmp_path: Path) -> None:
    mmspec(tmp_path / "mmspec")
    file = tmp_path / "mmspec/dataset/MMSpec/test/mmspec.jsonl"
    file.write_text(
        file.read_text().replace("mmspec_001.jpg", "../../../../../secret.jpg")
    )
    failing("mmspec", tmp_path, "secret.jpg")


def test_eval_measures_several_sets_in_one_process(
    tmp_path: Path, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    chartqa(tmp_path / "data" / "chartqa")
    asking(f"data/{SHARD}", question="Is it red?")(tmp_path / "data" / "mme")
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
    (at,) = json.loads(capsys.readouterr().out.splitlines()[-1])["lookahead"][
        "temperatures"
    ]
    kinds = {
        "demo/description",
        "demo/questions",
        "demo/several images",
        "demo/text only",
    }
    assert at["by_dataset"].keys() == {"chartqa", "mme@msd"} | kinds
    assert (
        main(
            [
                "eval",
                "lookahead",
                "--bench",
                "chartqa",
                "--prompts",
                "p.parquet",
                *where,
            ]
        )
        == 2
    )
