"""`make test-engine`: vLLM serves drafters that were trained here, and accepts what our own decoder accepts.

Not collected by name: it needs the environment that `make engine` creates, and minutes.
"""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from tests.engines.draws import HIDDEN, Draws
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.pipelines.engines import parity, process
from vlmdistill.pipelines.engines.environment import engine_python
from vlmdistill.pipelines.engines.messages import EngineJob
from vlmdistill.pipelines.engines.parity import Parity
from vlmdistill.pipelines.engines.process import EngineError
from vlmdistill.pipelines.evaluation.evaluate import held_out
from vlmdistill.pipelines.prompts.importing import Prompt
from vlmdistill.pipelines.targets.checkpoints.loading import load
from vlmdistill.pipelines.workspace import Workspace

NAMES = (
    *("eagle2", "hass", "eagle3", "msd", "sparrow", "text_only", "hivis"),
    *("vispec", "specflash", "medusa"),
)
SAMPLES, STEPS, PROMPTS = 200, 60, 20

pytestmark = pytest.mark.timeout(1800)


class Served:
    """A workspace with a small drafter of each method, and the prompts that all are compared on."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace.of("demo", folder / "runs")
        runs, limit = ["--runs", str(folder / "runs")], ["--limit", str(SAMPLES), "--workers", "1"]
        assert main(["prompts", "demo", *runs]) == 0
        assert main(["responses", *limit, "--max-new-tokens", "128", "--batch-size", "64", *runs]) == 0
        assert main(["features", *limit, "--for", ",".join(NAMES), *runs]) == 0
        size = ["--set", f"steps={STEPS}", "--set", "batch_tokens=1500"]
        for name in NAMES:  # all samples that were captured show images
            images = ["--set", "stages.text.visual=[1,1]"] if name == "text_only" else []
            assert main(["train", name, *size, *images, *runs]) == 0
        self.target = load("demo", dtype="float32")
        prompts = held_out(self.workspace.prompts, 100, "demo")
        self.prompts = [*prompts[:PROMPTS], *several_images(prompts)]
        questions = parity.questions(self.target, self.prompts)
        self.job = EngineJob(target=str(self.target.folder), questions=questions, max_new_tokens=256)
        self.plain = process.run(self.job)
        self.exported = {
            name: export(self.workspace.drafter(name), folder / "served" / name, "float32") for name in NAMES
        }

    def check(self, name: str, job: EngineJob) -> Parity:
        """A drafter in the engine and in our decoder."""
        return parity.check(
            self.target,
            self.workspace.drafter(name),
            self.exported[name],
            self.prompts,
            job,
            plain=self.plain,
        )


def several_images(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts that show three images, text between them."""
    files = [prompt.files[0] for prompt in prompts if prompt.files]
    shown = [prompt for prompt in prompts if prompt.files][:4]
    made = []
    for number, prompt in enumerate(shown):
        first, second, third = ({"type": "image", "path": file} for file in files[number : number + 3])
        words = [{"type": "text", "text": text} for text in ("Describe them.", "And this one.")]
        parts = [first, second, words[0], third, words[1]]
        made.append(
            replace(prompt, key=f"{prompt.key}-several", messages=[{"role": "user", "content": parts}])
        )
    return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    engine_python()  # fails at once without one
    return Served(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_accepts_exactly_what_our_decoder_accepts(name: str, served: Served) -> None:
    found = served.check(name, served.job)
    assert found.identical == found.prompts
    assert found.engine == found.ours
    assert found.engine.accepted > 0


@pytest.mark.parametrize("name", ["hivis", "msd", "vispec"])
def test_a_prompt_read_in_several_steps_drafts_the_same(name: str, served: Served) -> None:
    """Steps of 16 tokens, room for three drafts: some have only visual tokens or end within an image."""
    found = served.check(name, changed(served.job, step_tokens=16, batch=3))
    assert found.identical == found.prompts
    assert found.engine == found.ours


def test_sampled_responses_follow_the_distribution_of_the_target(served: Served) -> None:
    """How likely their tokens are, and how often a token repeats the one before."""
    written, question = served.exported["hivis"], served.job.questions[0]
    job = changed(
        served.job,
        questions=(question,) * 64,
        drafter=str(Path(written.out).absolute()),
        method=written.method,
        draft_tokens=written.draft_tokens,
        max_new_tokens=40,
        temperature=0.8,
        top_p=0.9,
    )
    found, draws = process.run(job), Draws(served.target, 0.8, 0.9)
    prompt = served.target.encode(served.prompts[0].messages)
    for number, ids in enumerate(found.responses):
        (sample,) = served.target.capture([prompt], [ids], {HIDDEN}, "float32", [str(number)])
        draws.add(sample, ids)
    assert found.accepted > 100
    assert draws.tokens > 1000
    assert draws.scores.abs().max() < 5, (draws.tokens, draws.sums)


def test_prefix_caching_is_refused_where_visual_tokens_are_dropped(served: Served) -> None:
    job = changed(served.job, drafter=served.exported["sparrow"].out, draft_tokens=4, prefix_caching=True)
    with pytest.raises(EngineError, match=r"ValueError: sparrow drops .* --no-enable-prefix-caching"):
        process.run(job)


def test_eval_with_servers_of_its_own_counts_what_eval_counts(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(served.workspace.root.parent)]
    common = ["--limit", "8", "--max-new-tokens", "256", "--json", *runs]
    capsys.readouterr()
    concurrencies = ["--concurrency", "1", "--concurrency", "4"]
    assert main(["eval", "sparrow", "--engine", "vllm", *concurrencies, *common]) == 0
    loads = json.loads(capsys.readouterr().out)["sparrow"]["loads"]
    assert main(["eval", "sparrow", "--tree", "chain-4", *common]) == 0
    (offline,) = json.loads(capsys.readouterr().out)["sparrow"]["temperatures"]
    assert [one["concurrency"] for one in loads] == [1, 4]
    for one in loads:
        found = one["server"]
        assert (found["drafts"], found["tokens"]) == (offline["calls"], offline["tokens"])
        for name in ("tau", "accepted", "alpha"):
            assert found[name] == pytest.approx(offline[name])
        assert found["accepted"] > 0
        assert (one["identical"], one["warnings"]) == (8, [])
    assert main(["report", *runs]) == 0
    assert "sparrow" in capsys.readouterr().out
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if named(served.workspace.root, file)]


def named(folder: Path, command: Path) -> bool:
    """Whether a process has a folder in its command line."""
    with suppress(OSError):  # it has ended
        return str(folder).encode() in command.read_bytes()
    return False
