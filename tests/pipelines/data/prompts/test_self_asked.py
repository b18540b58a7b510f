"""A target that was tuned on conversations writes its own questions."""

from pathlib import Path

import pytest

from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.pipelines.data.prompts import prompt_table
from vlmdistill.pipelines.data.prompts.self_asked import questions
from vlmdistill.pipelines.targets.encode import EncodedResponse
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget


@pytest.fixture(scope="module")
def target() -> VisionLanguageTarget:
    return load("demo-small")


def letters(question: str) -> str:
    return "".join(filter(str.isalnum, question.casefold()))


def test_questions_are_different_and_whole(target: VisionLanguageTarget) -> None:
    asked = list(questions(target, 5))
    assert len({letters(question) for question in asked}) == len(asked) == 5
    assert all(len(question.split()) >= 3 for question in asked)
    special = target.tokenizer.all_special_tokens
    assert not [text for text in asked if any(token in text for token in special)]


def test_the_same_seed_asks_the_same(target: VisionLanguageTarget) -> None:
    assert list(questions(target, 3)) == list(questions(target, 3))
    assert list(questions(target, 3)) != list(questions(target, 3, seed=100))


def test_the_command_imports_them_as_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prompts", "self", "--limit", "4", "--model", "demo-small"]
    assert main([*command, "--eval-share", "0"]) == 0
    prompts = prompt_table.read(tmp_path / "runs" / "demo-small" / "prompts.parquet")
    assert len(prompts) == 4
    assert {prompt.dataset for prompt in prompts} == {"self"}


def test_without_a_number_the_command_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prompts", "self", "--model", "demo-small"]) == 1
    assert "--limit" in capsys.readouterr().err


def test_a_format_is_refused_as_there_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prompts", "self", "--limit", "4", "--format", "sharegpt"]
    assert main([*command, "--model", "demo-small"]) == 1
    assert "--format" in capsys.readouterr().err


@pytest.mark.parametrize(
    "rest", ["", "<|im_start|>assistant\nThey look.", "<|im_end|>"]
)
def test_a_question_ends_at_the_mark_of_its_turn_not_at_the_name_of_a_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    target = load(str(tiny.checkpoint("qwen2_5_vl", tmp_path / "model", layers=1)))
    question = "I am a teaching assistant. How do models see?"
    ids = target.tokenizer(f"{question}<|im_end|>{rest}")["input_ids"]
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    sampled = EncodedResponse(tuple(ids), "stop", text)
    monkeypatch.setattr(target, "generate", lambda *given, **named: [sampled])
    assert list(questions(target, 1)) == [question]


def test_a_line_break_may_stand_before_the_mark_of_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(tiny.checkpoint("qwen2_5_vl", tmp_path / "model", layers=1)))
    template = target.processor.chat_template.replace("<|im_end|>", "\n<|im_end|>")
    monkeypatch.setattr(target.processor, "chat_template", template)
    ids = target.tokenizer("How do models see?\n<|im_end|>\nThey look.")["input_ids"]
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    sampled = EncodedResponse(tuple(ids), "stop", text)
    monkeypatch.setattr(target, "generate", lambda *given, **named: [sampled])
    assert list(questions(target, 1)) == ["How do models see?"]
