"""The switch for reasoning: found in the chat template, the same for a prompt in every stage."""

import json
import shutil
from pathlib import Path

import pytest

from tests.drafters import synthetic
from tests.tiny import checkpoint
from vlmdistill.pipelines.data.responses.dataset import (
    SamplingSettings,
    check_settings,
    write_settings,
)
from vlmdistill.pipelines.targets.checkpoints.template import (
    served_otherwise,
    template_of,
)
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import DataError, TargetError
from vlmdistill.stores.schema import content_hash

SWITCH = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}no {% endif %}"


def with_switch(target: Path, out: Path) -> Path:
    """A copy of a checkpoint whose template ends a prompt with "no " where it is not to reason."""
    shutil.copytree(target, out)
    file = out / "chat_template.jinja"
    file.write_text(file.read_text() + SWITCH)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("thinking")
    return with_switch(
        checkpoint("qwen2_5_vl", made / "plain", layers=2), made / "switch"
    )


def lengths(target: VisionLanguageTarget) -> list[int]:
    return [
        target.encode([{"role": "user", "content": f"Question {n}?"}]).length
        for n in range(12)
    ]


def test_prompts_follow_the_switch(folder: Path) -> None:
    by_default, on, off, mixed = (
        load(str(folder), thinking=mode) for mode in ("", "on", "off", "mixed")
    )
    assert lengths(on) == lengths(by_default)
    extra = len(on.tokenizer("no ")["input_ids"])
    more = [
        length - short
        for length, short in zip(lengths(mixed), lengths(on), strict=True)
    ]
    assert set(more) == {0, extra}
    assert [length - extra for length in lengths(off)] == lengths(on)
    assert [one.provenance((), "float32").thinking for one in (by_default, mixed)] == [
        "",
        "mixed",
    ]


def test_a_template_without_a_switch_is_refused(folder: Path) -> None:
    with pytest.raises(
        TargetError, match=r"no switch for reasoning \(enable_thinking or thinking\)"
    ):
        load(str(folder.parent / "plain"), thinking="on")


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_the_template_is_read_from_the_files(family: str, tmp_path: Path) -> None:
    target = load(str(checkpoint(family, tmp_path, layers=1)))
    assert content_hash(template_of(tmp_path)) == target.fingerprint.template


def test_of_several_template_files_the_one_of_the_target_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("llava", tmp_path, layers=1)
    own = folder / "chat_template.jinja"
    published = own.read_text()
    for name in ("chat_template.json", "processor_config.json"):
        text = published.replace("USER", name)
        file = folder / name
        settings = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**settings, "chat_template": text}))
        target = load(str(folder))
        assert target.processor.chat_template == template_of(folder) == text
        assert served_otherwise(target.provenance((), "float32"), folder) == ""
    assert "chat_template.jinja is not read" in caplog.text
    file.unlink()
    text_only = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    as_json = text_only.replace("content']", "content'] | tojson")
    for template in (text_only, as_json):
        settings = {"chat_template": template}
        (folder / "chat_template.json").write_text(json.dumps(settings))
        with pytest.raises(TargetError, match=r"text only: .* a chat_template\.json"):
            load(str(folder))


def test_line_ends_do_not_make_another_template(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("qwen2_5_vl", tmp_path, layers=1)
    own = folder / "chat_template.jinja"
    template = "{# of the target #}\n" + own.read_text().rstrip("\n")
    copy = {"chat_template": template.replace("\n", "\r\n")}
    (folder / "chat_template.json").write_text(json.dumps(copy))
    own.write_text(template + "\n")
    load(str(folder))
    assert "is not read" not in caplog.text


def test_a_server_with_another_template_is_told(folder: Path, tmp_path: Path) -> None:
    trained, plain = (
        load(str(folder), thinking="off").provenance((), "float32"),
        folder.parent / "plain",
    )
    off = ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    assert served_otherwise(trained, folder, ["serve", *off]) == ""
    assert "trained with thinking off" in served_otherwise(trained, folder, ["serve"])
    assert "trained with thinking off" in served_otherwise(
        trained, folder, [f"{off[0]}={{}}"]
    )
    assert "template is not the one of training" in served_otherwise(
        trained, plain, off
    )
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    for arguments in (
        ["--chat-template", str(tmp_path / "own.jinja")],
        ["--chat-template={{ messages }}"],
    ):
        assert "template is not the one of training" in served_otherwise(
            trained, folder, [*off, *arguments]
        )
    by_default = load(str(folder)).provenance((), "float32")
    assert (
        served_otherwise(by_default, folder)
        == served_otherwise(by_default, folder, off)
        == ""
    )


def test_a_drafter_of_another_mode_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_default, on, off, mixed = (
        load(str(folder), thinking=mode) for mode in ("", "on", "off", "mixed")
    )
    drafter = synthetic.save("wren", tmp_path / "wren", target=off)
    off.drafter(drafter)
    assert caplog.text == ""
    by_default.drafter(drafter)
    assert "wren was trained with thinking off, and decodes with" in caplog.text
    caplog.clear()
    drafter = synthetic.save("wren", tmp_path / "hawk", target=on)
    by_default.drafter(drafter)  # which reasons, too
    assert caplog.text == ""
    mixed.drafter(drafter)
    assert "hawk was trained with thinking on" in caplog.text


def test_responses_of_two_modes_do_not_mix(tmp_path: Path) -> None:
    sampling = {
        name: value
        for name, value in vars(SamplingSettings()).items()
        if name != "thinking"
    }
    write_settings(tmp_path, {"sampling": sampling})  # as before there was a switch
    check_settings(tmp_path, {"sampling": vars(SamplingSettings())})
    with pytest.raises(DataError, match="made with thinking of the template, not off"):
        check_settings(tmp_path, {"sampling": vars(SamplingSettings(thinking="off"))})
    with pytest.raises(DataError, match="--thinking maybe: choose on, off or mixed"):
        SamplingSettings(thinking="maybe").check()  # type: ignore[arg-type]
