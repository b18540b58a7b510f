"""Named evaluation sets: the files that are published, and how each paper asks about them.

A declaration says where a copy has its rows, which columns make the prompt, and which papers use the set.
`local_copies.py` reads the copies. `docs/inputs.md` has the source of every row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmdistill.pipelines.data.prompts.augment import AUGMENTATIONS
from vlmdistill.pipelines.data.prompts.columns import lettered
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.suggestions import did_you_mean

Columns = Mapping[str, Any]
Text = Callable[[Columns], str]  # KeyError: the row lacks a column
Asked = Callable[[Columns], list[str]]  # the text parts of the message

ASSISTANT = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the human's questions."
)
EXPLAIN, OCR, DESCRIBE, REASON = (
    AUGMENTATIONS[name].text for name in ("explain", "ocr", "describe", "reason")
)


@dataclass(frozen=True, kw_only=True)
class Paper:
    """How a paper samples its sets; a seed of None is not published, and 0 is taken."""

    name: str
    samples: int | None = 100  # of each set; None: all
    seed: int | None = None
    system: str = ""
    image_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A published set. Paths and globs are relative to a copy of it."""

    name: str
    repository: str  # of datasets on the hub; a URL: a git repository
    files: str  # glob of its Parquet or JSON files
    asked: Mapping[str, Asked]  # by paper, the default first
    kind: Literal["image", "video"] = "image"
    media: str = "image"  # a column with files, or a path as a glob with {columns}
    only: tuple[str, str] | None = None  # a column and its value in the rows that are used
    by: str = ""  # a column by which results are kept apart
    whole: tuple[str, ...] = ()  # papers that take all samples
    images: tuple[str, str, str] | None = None  # files with the images, the row's key, and theirs
    folders: Mapping[str, str] = field(default_factory=dict)  # by name of the file: {folder} in `media`
    revision: str | None = None
    unpack: str = ""  # archives of the copy that must be unpacked in it


PAPERS = {
    one.name: one
    for one in (
        Paper(name="vispec", seed=42, system=ASSISTANT, image_last=True),
        Paper(name="msd"),
        Paper(name="hivis", samples=80, seed=42),
        Paper(name="sparrow"),
        Paper(name="mmspec", samples=None, system=ASSISTANT),
    )
}


def _question(row: Columns) -> str:
    return str(row["question"])


def _lettered(choices: Any, form: str = "{}. {}", joint: str = "\n") -> str:
    return joint.join(form.format(*pair) for pair in lettered(choices).items())


def _with(choices: Text) -> Text:
    return lambda row: f"{row['question']}\n{choices(row)}"


def _columns(*names: str) -> Text:
    """Choices with a column each; those of fewer choices are empty or N/A."""
    return lambda row: _lettered([row[name] for name in names if row[name] not in (None, "", "N/A")])


def _science(row: Columns) -> str:
    hint = f"Context: {row['hint']}\n" if row["hint"] else ""
    return f"{hint}{row['question']}\n{_lettered(row['choices'])}"


def _science_explained(row: Columns) -> list[str]:
    """The format QCM-ALE of ScienceQA, with the request that ViSpec's evaluation adds."""
    choices = _lettered(row["choices"], "({}) {}", " ")
    text = f"Question: {row['question']}\nContext: {row['hint'] or 'N/A'}\nOptions: {choices}\n"
    return [f'{text}Your answer should begin with "The answer is". {EXPLAIN} Answer:']


def _yes_or_no(row: Columns) -> str:
    return str(row["question"]).strip().replace(" Please answer yes or no.", "")


def _bench(row: Columns) -> str:
    """MMBench, whose empty columns hold None or the text nan."""
    choices = [f"{letter}. {row[letter]}" for letter in "ABCD" if row[letter] not in (None, "", "nan")]
    asked = [row["hint"], row["question"], "\n".join(["There are several options:", *choices])]
    return " ".join(text for text in asked if text not in (None, "", "nan"))


def _explained(text: Text = _question, request: str = EXPLAIN) -> Asked:
    return lambda row: [text(row), request]


def _reasoned(text: Text = _question, joint: str = "\n") -> Asked:
    return lambda row: [f"{text(row)}{joint}{REASON}"]


def _plainly(text: Text = _question) -> Asked:
    return lambda row: [text(row)]


_MVBENCH = {  # folder of the videos of each file, in the revision `video`
    "action_antonym": "ssv2_video_mp4",
    "action_count": "perception/videos",
    "action_localization": "sta/sta_video_segment",
    "action_prediction": "star/Charades_segment",
    "action_sequence": "star/Charades_segment",
    "character_order": "perception/videos",
    "counterfactual_inference": "clevrer/video_validation",
    "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/video_fps3_hq_segment",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "fine_grained_pose": "nturgbd_convert",
    "moving_attribute": "clevrer/video_validation",
    "moving_count": "clevrer/video_validation",
    "moving_direction": "clevrer/video_validation",
    "object_existence": "clevrer/video_validation",
    "object_interaction": "star/Charades_segment",
    "object_shuffle": "perception/videos",
    "scene_transition": "scene_qa/video",
    "state_change": "perception/videos",
    "unexpected_action": "FunQA_test/test",
}


def _mvbench(row: Columns) -> str:
    choices = _lettered(row["candidates"], "({}) {}")
    return f"Question:{row['question']}\nOption:\n{choices}\nOnly give the best option."


BENCHMARKS = {
    one.name: one
    for one in (
        Benchmark(
            name="mmspec",
            repository="https://github.com/killthefullmoon/MMSpec",
            files="dataset/MMSpec/test/mmspec.jsonl",
            media="dataset/MMSpec/test/images/{image}",
            by="topic",
            asked={"mmspec": lambda row: [row["turns"][0]]},
        ),
        Benchmark(
            name="textvqa",
            repository="lmms-lab-encoder/textvqa",
            files="data/validation-*.parquet",
            asked={
                "vispec": _explained(request=OCR),
                "msd": _reasoned(),
                "hivis": lambda row: [f"{row['question']} {OCR}"],
            },
        ),
        Benchmark(
            name="scienceqa",
            repository="lmms-lab-encoder/ScienceQA",
            files="ScienceQA-IMG/test-*.parquet",
            asked={
                "vispec": _science_explained,
                "msd": _reasoned(_science),
                "hivis": lambda row: [f"{row['question']} {_lettered(row['choices'], '({}) {}', ' ')}"],
                "sparrow": _plainly(_science),
            },
        ),
        Benchmark(
            name="mme",
            repository="lmms-lab-encoder/MME",
            files="data/test-*.parquet",
            asked={
                "vispec": _explained(_yes_or_no),
                "msd": _reasoned(_yes_or_no),
                "hivis": _plainly(_yes_or_no),
                "sparrow": _plainly(_yes_or_no),
            },
        ),
        Benchmark(
            name="mm-vet",
            repository="lmms-lab-encoder/MMVet",
            files="data/test-*.parquet",
            whole=("vispec",),
            asked={"vispec": _explained(), "hivis": _plainly(), "sparrow": _plainly()},
        ),
        Benchmark(
            name="coco-captions",
            repository="lmms-lab-encoder/COCO-Caption2017",
            files="data/val-*.parquet",
            asked={"vispec": lambda row: [DESCRIBE], "sparrow": lambda row: [DESCRIBE]},
        ),
        Benchmark(
            name="vizwiz",
            repository="lmms-lab-encoder/VizWiz-VQA",
            files="data/test-*.parquet",
            asked={"vispec": _explained()},
        ),
        Benchmark(
            name="gqa",
            repository="lmms-lab-encoder/GQA",
            files="testdev_balanced_instructions/testdev-*.parquet",
            images=("testdev_balanced_images/testdev-*.parquet", "imageId", "id"),
            asked={"vispec": _explained(), "hivis": _plainly()},
        ),
        Benchmark(
            name="seed-bench",
            repository="lmms-lab-encoder/SEED-Bench",
            files="data/test-*.parquet",
            only=("data_type", "image"),
            asked={"vispec": _explained(), "hivis": _plainly()},
        ),
        Benchmark(
            name="chartqa",
            repository="lmms-lab-encoder/ChartQA",
            files="data/test-*.parquet",
            asked={"msd": _reasoned(), "hivis": _plainly()},
        ),
        Benchmark(
            name="vqav2",
            repository="lmms-lab-encoder/VQAv2",
            files="data/validation-*.parquet",
            asked={"msd": _reasoned(), "hivis": _plainly()},
        ),
        Benchmark(
            name="ai2d",
            repository="lmms-lab-encoder/ai2d",
            files="data/test-*.parquet",
            asked={"msd": _reasoned(_with(lambda row: _lettered(row["options"])))},
        ),
        Benchmark(
            name="hallusion-bench",
            repository="lmms-lab-encoder/HallusionBench",
            files="data/image-*.parquet",
            asked={"msd": lambda row: [REASON + row["question"]]},  # without a blank, as MSD has it
        ),
        Benchmark(
            name="mmbench",
            repository="lmms-lab-encoder/MMBench",
            files="en/dev-*.parquet",
            asked={"msd": _reasoned(_bench, "\n\n")},
        ),
        Benchmark(
            name="video-detail-caption",
            repository="lmms-lab/VideoDetailCaption",
            files="data/test-*.parquet",
            kind="video",
            media="**/{video_name}.*",
            unpack="videos.zip",
            asked={"sparrow": _plainly()},
        ),
        Benchmark(
            name="mvbench",
            repository="OpenGVLab/MVBench",
            revision="video",
            files="json/*.json",
            kind="video",
            media="{folder}/{video}",
            folders=_MVBENCH,
            asked={"sparrow": _plainly(_mvbench), "vispec": _explained()},
        ),
        Benchmark(
            name="msvd-qa",
            repository="https://github.com/KangJialiang/ViSpec",  # has the layout, not the files
            files="annotation_test.json",
            kind="video",
            media="videos/data/{video_name}.*",
            asked={"vispec": _explained()},
        ),
        Benchmark(
            name="longvideobench",
            repository="longvideobench/LongVideoBench",
            files="validation-*.parquet",
            kind="video",
            media="videos/{video_path}",
            unpack="videos.tar.part.*",
            asked={"sparrow": _plainly(_with(_columns(*(f"option{i}" for i in range(5)))))},
        ),
        Benchmark(
            name="video-mme",
            repository="lmms-eval/Video-MME",
            files="videomme/test-*.parquet",
            kind="video",
            media="data/{videoID}.*",
            unpack="videos_chunked_*.zip",
            asked={"sparrow": _plainly(_with(lambda row: "\n".join(row["options"])))},
        ),
    )
}
DEMO = "demo"  # made here, see `pipelines/demo/prompts.py`


def find(wanted: str) -> tuple[Benchmark, Paper]:
    """The set and the paper of `NAME` or `NAME@PAPER`; DataError lists the names."""
    name, _, paper = wanted.partition("@")
    known = BENCHMARKS.get(name)
    if known is None:
        raise DataError(
            f"there is no benchmark '{name}'{did_you_mean(name, [*BENCHMARKS, DEMO])}: choose from "
            f"{', '.join([*BENCHMARKS, DEMO])}"
        )
    if paper and paper not in known.asked:
        raise DataError(f"{name} has no prompts of the paper '{paper}': choose from {', '.join(known.asked)}")
    return known, PAPERS[paper or next(iter(known.asked))]
