"""Targets of other families than the embedded ones: vLLM accepts there what our own decoder accepts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from tests import tiny, tiny_families
from tests.engines import job as engine
from tests.engines import parity
from tests.engines.capturing import as_published, heads_of_32
from tests.engines.job import EngineJob
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.pipelines.bench.evaluate import held_out
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.workspace.workspace import Workspace

SIZES = (
    (60, 40),
    (40, 90),
    (84, 84),
    (120, 60),
    (56, 56),
    (70, 50),
    (64, 64),
    (33, 80),
)
SHOWN = ((0,), (1,), (2, 3), (), (4,), (5,), (6, 7), ())
SOME = (
    "--max-new-tokens",
    "32",
    "--temperature",
    "0",
    "--min-words",
    "0",
    "--max-repetition",
    "1",
)
# On a CPU, vLLM lets an image's tokens see what comes before them alone.
TEXT_ALONE = ("gemma3",)
# Gemma 4 can do without; and vLLM's windows of Cohere's layers are one token longer than transformers'.
OTHERWISE: dict[str, dict[str, Any]] = {
    "gemma4": {"use_bidirectional_attention": None},
    "cohere2_vision": {"sliding_window": 1024},
}
STEPS = (
    "--set",
    "steps=400",
    "--set",
    "batch_tokens=512",
    "--set",
    "stages.*.learning_rate=3e-3",
)

pytestmark = pytest.mark.timeout(1200)


def asked(folder: Path, side: str, rounds: range) -> list[str]:
    """Questions about one picture, two or none; the words that import them."""
    rows = []
    for at in rounds:
        for number, (width, height) in enumerate(SIZES):
            tiny.picture(width, height, 8 * at + number).save(
                folder / f"{8 * at + number}.png"
            )
        for number, pictures in enumerate(SHOWN):
            parts = [
                {"type": "image", "image": f"{8 * at + one}.png"} for one in pictures
            ]
            question = {
                "type": "text",
                "text": f"Question {at}-{number}: what is there?",
            }
            rows.append({"messages": [{"role": "user", "content": [*parts, question]}]})
    (folder / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        "prompts",
        str(folder / f"{side}.jsonl"),
        "--images",
        str(folder),
        "--split",
        side,
    ]


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # GLM's processor
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llava", "wren"),
        ("qwen2_vl", "hivis"),
        ("qwen3_vl", "wren"),
        ("internvl", "hivis"),
        ("qwen3_vl_moe", "wren"),
        ("gemma3", "hivis"),
        ("mistral3", "wren"),
        ("llava_next", "hivis"),
        ("llava_onevision", "hivis"),
        ("smolvlm", "hivis"),
        ("glm46v", "hivis"),
        ("glm4v_moe", "hivis"),
        ("glm4v", "hivis"),
        ("cohere2_vision", "hivis"),
        ("gemma4", "wren"),
        ("aya_vision", "hivis"),
    ],
)
def test_the_engine_accepts_what_our_decoder_accepts(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in tiny_families.FAMILIES and not tiny_families.runs_here(family):
        pytest.skip("its processor needs torchvision or num2words")
    heads_of_32(monkeypatch)
    if family in OTHERWISE:
        parts = tiny_families.FAMILIES[family]
        made = replace(parts, text={**parts.text, **OTHERWISE[family]})
        monkeypatch.setitem(tiny_families.FAMILIES, family, made)
    make: Callable[..., Path] = (
        tiny if family in tiny.FAMILIES else tiny_families
    ).checkpoint
    model = make(family, tmp_path / family)
    as_published(model / "model.safetensors")
    where = ["--model", str(model), "--runs", str(tmp_path / "runs")]

    def run(*words: str) -> None:
        assert main([*words, *where]) == 0

    run(*asked(tmp_path, "train", range(3)))
    run(*asked(tmp_path, "eval", range(3, 7 if family in TEXT_ALONE else 4)))
    workspace = Workspace.of(str(model), tmp_path / "runs")
    target = load(str(model), dtype="float32")
    prompts = held_out(workspace.prompts, 100, str(model))
    if family in TEXT_ALONE:
        prompts = [one for one in prompts if not target.encode(one.messages).spans]
    questions = parity.questions(target, prompts)
    job = EngineJob(target=str(target.folder), questions=questions, max_new_tokens=32)
    plain = engine.run(job)
    encoded = [target.encode(one.messages) for one in prompts]
    ours = [
        [*map(int, one.ids)]
        for one in target.generate(encoded, max_new_tokens=32, temperature=0.0)
    ]
    same = [at for at, response in enumerate(ours) if response == plain.responses[at]]
    assert (
        len(same) >= len(prompts) - 3
    )  # random weights come to near-ties and placeholders
    run("responses", *SOME, "--workers", "0")
    run("features", "--for", name, "--workers", "0")
    run("train", name, *STEPS)
    folder = workspace.drafter(name)
    found = parity.check(
        target,
        folder,
        export(folder, tmp_path / "served", "float32"),
        [prompts[at] for at in same],
        changed(job, questions=tuple(questions[at] for at in same)),
        changed(
            plain,
            prompts=[plain.prompts[at] for at in same],
            responses=[plain.responses[at] for at in same],
        ),
    )
    assert found.identical == found.prompts
    # Responses are cut at 32 tokens: vLLM also counts what was accepted beyond.
    assert found.engine.drafts == found.ours.drafts
    assert found.ours.accepted > 10
