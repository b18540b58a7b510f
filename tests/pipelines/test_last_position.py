"""No response has a token beyond the target's last position, whatever decodes it."""

import json
from pathlib import Path

import pytest

import vlmdistill
from tests import tiny
from vlmdistill.cli.main import main
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget

POSITIONS, LONG = 140, 500  # of the target; what is asked for


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few positions, which ends no response before them."""
    folder = tiny.checkpoint(
        "qwen2_5_vl",
        tmp_path_factory.mktemp("short") / "model",
        layers=1,
        vocabulary=80,
    )
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = POSITIONS
    tiny.write_json(folder, "config.json", **config)
    ends = json.loads((folder / "generation_config.json").read_text())
    tiny.write_json(folder, "generation_config.json", **{**ends, "eos_token_id": [319]})
    return folder


@pytest.fixture(scope="module")
def target(short: Path) -> VisionLanguageTarget:
    return load(str(short))


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [(None, None), ("lookahead", "chain-4"), ("lookahead", "12-3-4")],
)
def test_a_streamed_response_ends_at_the_last_position(
    target: VisionLanguageTarget, drafter: str | None, tree: str | None
) -> None:
    for words in (1, 9):
        text = "What is it? " * words
        prompt = target.encode(tiny.message(text))
        chunks = vlmdistill.generate(
            target, text, drafter=drafter, tree=tree, max_new_tokens=LONG
        )
        (batched,) = target.generate([prompt], max_new_tokens=LONG, temperature=0)
        stock = target.reference(prompt, max_new_tokens=LONG)
        assert stock is not None
        assert (
            prompt.length + len(batched.ids)
            == prompt.length + len(stock.ids)
            == POSITIONS
        )
        assert batched.text == stock.text
        assert stock.text.startswith("".join(chunk.text for chunk in chunks))


def test_each_response_of_a_batch_has_the_room_of_its_prompt(
    target: VisionLanguageTarget,
) -> None:
    prompts = [target.encode(tiny.message("What is it? " * words)) for words in (1, 9)]
    for prompt, response in zip(
        prompts, target.generate(prompts, max_new_tokens=LONG), strict=True
    ):
        assert (prompt.length + len(response.ids), response.finish) == (
            POSITIONS,
            "length",
        )


def test_an_evaluation_ends_there_too(short: Path, tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "What is it? " * words}]}
        for words in (1, 9)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    options = ["--model", str(short), "--runs", str(tmp_path / "runs")]
    assert (
        main(["prompts", str(tmp_path / "rows.json"), "--split", "eval", *options]) == 0
    )
    length = ["--max-new-tokens", str(LONG), "--threads", "1"]
    assert (
        main(
            [
                "eval",
                "lookahead",
                *length,
                "--temperature",
                "0",
                "--anyway",
                "--quiet",
                *options,
            ]
        )
        == 0
    )
    (record,) = (tmp_path / "runs" / "model" / "reports").glob("*.json")
    (measured,) = json.loads(record.read_text())["temperatures"]
    plain, drafted, stock = zip(
        *((one["plain"], one["drafted"], one["stock"]) for one in measured["prompts"]),
        strict=True,
    )
    target = load(str(short))
    rooms = sorted(
        POSITIONS - target.encode(tiny.message(row["conversations"][0]["value"])).length
        for row in rows
    )
    for results in (plain, drafted, stock):
        assert sorted(result["tokens"] for result in results) == rooms
