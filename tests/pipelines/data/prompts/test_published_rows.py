"""Rows as datasets of the hub have them: asked as their authors meant, or refused."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.pipelines.data.prompts.rows import imported, packed, refused
from vlmdistill.pipelines.data.prompts.importing import import_prompts
from vlmdistill.pipelines.data.prompts.prompt_table import read

A, B = {"path": "1.jpg"}, {"path": "2.jpg"}
FILM = "1.mp4"
TURNS = [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "So."}]
BASE64 = base64.b64encode(b"\xff\xd8\xff" * 40).decode()

ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "LLaVA-Instruct-150K": (
        {"id": "1", "image": "1.jpg", "conversations": TURNS},
        ["1.jpg", "Why?"],
    ),
    "LLaVA-OneVision-Data": (
        {"id": "1", "image": A, "conversations": TURNS, "data_source": "ai2d"},
        ["1.jpg", "Why?"],
    ),
    "LLaVA-Video-178K": (
        {"id": "1", "video": FILM, "conversations": TURNS, "data_source": "0_30_s"},
        ["1.mp4", "Why?"],
    ),
    "the_cauldron": (
        {"images": [A], "texts": [{"user": "Why?", "assistant": "So.", "source": "x"}]},
        ["1.jpg", "Why?"],
    ),
    "Mantis": (
        {"images": [A, B], "conversation": [{"role": "user", "content": "<image> <image> Which?"}]},
        ["1.jpg", "2.jpg", "Which?"],
    ),
    "MMMU": (
        {
            "question": "<image 1> Which?",
            "options": "['<image 2>', 'none']",
            "image_1": A,
            "image_2": B,
            "image_3": None,
        },
        ["1.jpg", "Which?\nA.", "2.jpg", "B. none"],
    ),
    "MMMU, open": (
        {"question": "<image 1> How many?", "options": "[]", "image_1": A, "answer": "7"},
        ["1.jpg", "How many?"],
    ),
    "MMBench": (
        {"question": "Which?", "hint": "nan", "A": "x", "B": "y", "C": "nan", "D": "nan", "image": A},
        ["1.jpg", "Which?\nA. x\nB. y"],
    ),
    "ScienceQA": (
        {"image": A, "question": "Which?", "choices": ["x", "y"], "hint": "H.", "solution": "S."},
        ["1.jpg", "Which?\nH.\nA. x\nB. y"],
    ),
    "MathVista": (
        {
            "question": "Which?",
            "choices": ["1", "2"],
            "image": A,
            "query": "Hint: Think.\nQuestion: Which?\nChoices:\n(A) 1\n(B) 2",
        },
        ["1.jpg", "Hint: Think.\nQuestion: Which?\nChoices:\n(A) 1\n(B) 2"],
    ),
    "RealWorldQA": (
        {"image": A, "question": "Which?\n\nA. Left.\nB. Right.\nAnswer with the letter.", "answer": "B"},
        ["1.jpg", "Which?\n\nA. Left.\nB. Right.\nAnswer with the letter."],
    ),
    "columns beside lines": (
        {"image": A, "question": "Which?\nleft\n- right", "A": "left", "B": "right"},
        ["1.jpg", "Which?\nleft\n- right"],
    ),
    "columns with letters": (
        {"image": A, "question": "Which?", "A": "A. left", "B": "B. right"},
        ["1.jpg", "Which?\nA. left\nB. right"],
    ),
    "columns with a gap beside lines": (
        {"image": A, "question": "Which?\nA. left\nC. right", "A": "left", "C": "right"},
        ["1.jpg", "Which?\nA. left\nC. right"],
    ),
    "Video-MME": (
        {"video": FILM, "question": "When?", "options": ["A. Now.", "B. Later."], "videoID": "x"},
        ["1.mp4", "When?\nA. Now.\nB. Later."],
    ),
    "AQuA-RAT": (
        {"question": "How many?", "options": ["A)21", "B)21.5"], "correct": "A"},
        ["How many?\nA. 21\nB. 21.5"],
    ),
    "labels of other forms": (
        {"question": "Which?", "choices": ["(a) red", "[B] blue", "c.green"]},
        ["Which?\nA. red\nB. blue\nC. green"],
    ),
    "a text that begins as a label": (
        {"question": "Which?", "choices": ["A.M.", "P.M."]},
        ["Which?\nA. A.M.\nB. P.M."],
    ),
    "MVBench": (
        {"video": FILM, "question": "What?", "candidates": ["x", "y"], "answer": "x"},
        ["1.mp4", "What?\nA. x\nB. y"],
    ),
    "A-OKVQA": (
        {
            "image": A,
            "question": "Why?",
            "choices": ["x", "y"],
            "correct_choice_idx": 0,
            "direct_answers": "['x', 'z']",
        },
        ["1.jpg", "Why?\nA. x\nB. y"],
    ),
    "VQAv2": (
        {
            "image": A,
            "question": "Why?",
            "multiple_choice_answer": "net",
            "answers": [{"answer": "net", "answer_id": 1}],
            "num_choices": 4,
        },
        ["1.jpg", "Why?"],
    ),
    "EgoSchema": (
        {"video": FILM, "question": "What?", "option": ["A. x", "B. y"], "answer": "1"},
        ["1.mp4", "What?\nA. x\nB. y"],
    ),
    "InternVL": (
        {
            "image": ["1.jpg", "2.jpg"],
            "conversations": [{"from": "human", "value": "Image-1: <image>\nImage-2: <image>\nSame?"}],
        },
        ["Image-1:", "1.jpg", "Image-2:", "2.jpg", "Same?"],
    ),
    "Qwen": (
        {"images": ["1.jpg", "2.jpg"], "messages": [{"role": "user", "content": "<image>\n<image>Same?"}]},
        ["1.jpg", "2.jpg", "Same?"],
    ),
    "verl": (
        {"images": [{"image": "1.jpg"}], "prompt": [{"role": "user", "content": "<image>Why?"}]},
        ["1.jpg", "Why?"],
    ),
    "verl in Parquet": (
        {"images": [{"image": {"path": "1.jpg", "bytes": None}}], "prompt": "<image>Why?"},
        ["1.jpg", "Why?"],
    ),
    "verl, a video": (
        {
            "videos": [{"type": "video", "video": FILM, "fps": 2.0}],
            "prompt": [{"role": "user", "content": "<video>Why?"}],
        },
        ["1.mp4", "Why?"],
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "M3IT": (
        {"instruction": "Answer.", "inputs": "What?", "image_base64_str": [BASE64]},
        "image in another column",
    ),
    "PixMo-AskModelAnything": (
        {"image_url": "https://example.org/1", "question": "What?"},
        "image in another column",
    ),
    "PixMo-Docs": (
        {"image": A, "questions": {"question": ["What?"], "answer": ["It."]}},
        "question of another form",
    ),
    "SEED-Bench": (
        {"image": [A], "question": "How many?", "choice_a": "One", "choice_b": "Two"},
        "choices",
    ),
    "NExT-QA": (
        {"video": FILM, "question": "how?", "a0": "x", "a1": "y", "answer": 0},
        "choices",
    ),
    "MedMCQA": ({"question": "Which?", "opa": "x", "opb": "y", "cop": 1}, "choices"),
    "HellaSwag": ({"query": "A man", "ending0": "x", "ending1": "y"}, "choices"),
    "ReClor": (
        {
            "context": "C.",
            "question": "Which?",
            "answers": ["w", "x", "y", "z"],
            "label": 2,
        },
        "choices",
    ),
    "images as choices": (
        {"question": "Which one follows?", "image": A, "options": ["0.png", "1.png"]},
        "choices",
    ),
    "images as text": ({"question": "Which?", "options": "['0.png', '-']"}, "choices"),
    "columns of images": (
        {"question": "Which?", "A": "0.png", "B": "1.png"},
        "choices",
    ),
    "data URLs as choices": (
        {
            "question": "Which?",
            "choices": ["none", "data:image/png;base64,iVBORw0KGgo="],
        },
        "choices",
    ),
    "small letters": ({"question": "Which?", "a": "x", "b": "y"}, "choices"),
    "other names": ({"question": "Which?", "answer_choices": ["x", "y"]}, "choices"),
    "EgoSchema without videos": (
        {"question": "What?", "video_idx": "0074f737", "option": ["A. x", "B. y"]},
        "video in another column",
    ),
    "TGIF-QA": (
        {"question": "What?", "gif_name": "tumblr_1", "vid_id": "7"},
        "video in another column",
    ),
    "a part of a video in an object": (
        {"question": "What?", "video": {"video": {"path": FILM, "start": 3, "end": 9}}},
        "part of a video",
    ),
    "a video as an image": (
        {"question": "What?", "images": [{"video": FILM}]},
        "no media file",
    ),
    "an object with two files": (
        {"question": "What?", "image": {"image": "1.jpg", "path": "2.jpg"}},
        "several media files",
    ),
    "an object without a file": (
        {"question": "What?", "image": {"id": "1.jpg"}},
        "no media file",
    ),
    "a video by its number": ({"question": "What?", "video": 0}, "no media file"),
    "MSRVTT-QA": ({"question": "What?", "vid": "vid1"}, "video in another column"),
    "GQA": ({"question": "Is it?", "imageId": "n1"}, "image in another column"),
    "NLVR2": (
        {"question": "Two?", "left_image": A, "right_image": B},
        "image in another column",
    ),
    "an export with an object": (
        {"question": "What?", "doc": {"image_id": "7"}},
        "image in another column",
    ),
    "VLMEvalKit": (
        {"question": "What?", "files": "['1.jpg', '2.jpg']"},
        "image in another column",
    ),
    "HotpotQA": (
        {"question": "Who?", "context": {"title": ["T"], "sentences": [["S"]]}},
        "text of another form",
    ),
    "a number as the question": (
        {"question": 12, "input": "half", "image": A},
        "question of another form",
    ),
    "NaN as a choice": (
        {"question": "Which?", "choices": ["red", float("nan")]},
        "choices",
    ),
    "PLM-Video-Human": (
        {"question": "What is cut?", "metadata": {"source_video_id": "x1"}},
        "video in another column",
    ),
    "Encyclopedic-VQA": (
        {"question": "Which bird?", "dataset_image_ids": "2512045|2512046"},
        "image in another column",
    ),
    "We-Math": (
        {"question": "How many?", "option": "A. 1; B. 2; C. 3", "image": A},
        "choices",
    ),
    "SAT": (
        {
            "image": A,
            "question": "Is it?",
            "answers": ["no", "yes"],
            "correct_answer": "yes",
        },
        "choices",
    ),
    "QuAIL": (
        {
            "question": "Who?",
            "context": "C.",
            "answers": ["Tim", "Jo"],
            "correct_answer_id": 1,
        },
        "choices",
    ),
    "NEPTUNE": (
        {
            "question": "Which?",
            "answer_choice_0": "x",
            "answer_choice_1": "y",
            "image": A,
        },
        "choices",
    ),
    "PAI-Bench-U": (
        {"question": "Is it so?", "index2ans": {"A": "yes", "B": "no"}, "image": A},
        "choices",
    ),
    "lmsys-arena-human-preference-55k": (
        {
            "prompt": '["Is it right?", "So?"]',
            "response_a": "Yes.",
            "response_b": "No.",
        },
        "question of another form",
    ),
    "Video-MMMU": (
        {
            "question": "What is shown?",
            "link_selected": "https://www.youtube.com/watch?v=x1",
        },
        "video in another column",
    ),
    "history as text": ({"question": "Who?", "history": "A: Hi"}, "history"),
    "a document": ({"question": "What?", "pdf": "1.pdf"}, "pdf"),
    "ms-swift": (
        {
            "images": ["1.jpg"],
            "messages": [{"role": "user", "content": "<image>Find <ref-object>"}],
            "objects": {"ref": ["a cat"], "bbox": [[1, 2, 3, 4]]},
        },
        "foreign placeholder",
    ),
}


def with_pictures(out: Path) -> None:
    tiny.picture(40, 30, seed=2).save(out.parents[1] / "2.jpg")


@pytest.mark.parametrize("dataset", ASKED)
def test_a_published_row_is_asked_as_its_author_meant(out: Path, dataset: str) -> None:
    with_pictures(out)
    row, asked = ASKED[dataset]
    assert imported(out, row).added == 1
    (message, *_) = read(out)[0].messages
    shown = [part.get("text") or Path(part["path"]).name for part in message["content"]]
    assert shown == asked


@pytest.mark.parametrize("dataset", REFUSED)
def test_a_published_row_that_cannot_be_asked_so_is_refused(
    out: Path, dataset: str
) -> None:
    with_pictures(out)
    row, reason = REFUSED[dataset]
    assert refused(out, row)[0] == reason


def test_a_question_of_a_table_has_all_its_values(tmp_path: Path, out: Path) -> None:
    rows = [{"question": "Who?", "context": "C.", "history": '[["Hi", "Hello"]]'}]
    rows += [{"question": "What?", "context": "", "history": "[]"}]
    source = packed(tmp_path, "a.parquet", rows)
    assert import_prompts([str(source)], out).unread_columns == {}
    first, second = read(out)
    assert [message["content"][0]["text"] for message in first.messages] == [
        "Hi",
        "Hello",
        "Who?\nC.",
    ]
    assert second.messages[0]["content"][0]["text"] == "What?"
