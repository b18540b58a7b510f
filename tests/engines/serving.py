"""`make test-engine`: vLLM serves drafters that were trained here, and accepts what our own decoder accepts.

Not collected by name: it needs the environment that `make engine` creates, and minutes.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from msgspec.structs import replace as changed
from safetensors.torch import load_file, save_file

from tests.engines import job as engine
from tests.engines import parity
from tests.engines.draws import HIDDEN, Draws
from tests.engines.job import EngineJob
from tests.engines.parity import Parity
from tests.quantised import quantised
from vlmdistill.cli.main import main
from vlmdistill.drafters.checkpoints.export import Exported, export
from vlmdistill.drafters.dflash import MASK
from vlmdistill.pipelines.bench.evaluate import held_out
from vlmdistill.pipelines.cluster.engine_environment import engine_python
from vlmdistill.pipelines.data.prompts.prompt_table import Prompt
from vlmdistill.pipelines.targets.embedded import EMBEDDED
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.vllm.launch import EngineError, vllm_server
from vlmdistill.pipelines.vllm.plugin.limits import OTHER_TARGET
from vlmdistill.pipelines.workspace.workspace import Workspace

MODEL = "demo-video"
NAMES = (
    "eagle2",
    "eagle3",
    "eaglevlm",
    "msd",
    "msd_vata",
    "sparrow",
    "hivis",
    "vispec",
    "specflash",
    "medusa",
    "wren",
    "wren:cell",
)
SWAPPED = ("eagle3", "msd_vata", "hivis", "vispec", "specflash", "medusa", "wren")
MORE = {
    "eagle3": ["--set", "draft_vocab=300"],  # of 768 tokens
    "eaglevlm": ["--set", "compressor=concat", "--set", "ratio=9", "--set", "kernel=5"],
    "hivis": ["--set", "draft_vocab=300"],
    "wren:cell": ["--set", "cell=2", "--set", "stages.*.hops=4"],
}
SAMPLES, PROMPTS = 120, 20
SIZE = ["--set", "steps=60", "--set", "batch_tokens=1500"]
FEW = 12  # prompts with text, images, several images and videos

# Lets the V2 runner of a CPU build start without a CPU backend of Triton: TRITON_INTERPRET needs none.
SITE = """
import os, sys
from types import SimpleNamespace
if "TRITON_INTERPRET" in os.environ and "engine" in sys.prefix:
    import triton.backends
    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver)
"""

pytestmark = pytest.mark.timeout(1800)


def captured(folder: Path, model: str, samples: int, names: Sequence[str]) -> list[str]:
    """Make a workspace with features for drafters; the options that name it."""
    where, limit = (
        ["--runs", str(folder), "--model", model],
        ["--limit", str(samples), "--workers", "1"],
    )
    assert main(["prompts", "demo", *where]) == 0
    assert (
        main(
            [
                "responses",
                *limit,
                "--max-new-tokens",
                "128",
                "--batch-size",
                "64",
                *where,
            ]
        )
        == 0
    )
    methods = {name.partition(":")[0] for name in names}
    assert main(["features", *limit, "--for", ",".join(methods), *where]) == 0
    return where


class Served:
    """A workspace with small drafters, and the prompts that all are compared on."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = NAMES,
        more: Mapping[str, Sequence[str]] = MORE,
        prompts: int = PROMPTS,
    ) -> None:
        """Features for drafters of these names; `more` has options of `train` by name or `method:label`."""
        self.workspace, self._more = Workspace.of(MODEL, folder), more
        self._where, self._exported = (
            captured(folder, MODEL, SAMPLES, names),
            dict[str, Exported](),
        )
        self.target = load(MODEL, dtype="float32")
        held = held_out(self.workspace.prompts, 100, MODEL)
        self.prompts = [*held[:8], *several_images(held), *held[8:prompts]]
        questions = parity.questions(self.target, self.prompts)
        self.job = EngineJob(
            target=str(self.target.folder), questions=questions, max_new_tokens=256
        )
        self.plain = engine.run(self.job)

    def exported(self, name: str) -> Exported:
        """A drafter for the engine, trained when it is first asked for."""
        if name not in self._exported:
            method, folder = (
                name.partition(":")[0],
                self.workspace.drafter(name.replace(":", "-")),
            )
            options = [
                "--name",
                folder.name,
                *SIZE,
                *self._more.get(name, []),
                *self._where,
            ]
            assert main(["train", method, *options]) == 0
            self._exported[name] = export(
                folder, self.workspace.root / "served" / folder.name, "float32"
            )
        return self._exported[name]

    def check(self, name: str, job: EngineJob, prompts: int | None = None) -> Parity:
        """A drafter in the engine and in our decoder, on the first prompts or all."""
        plain = self.plain
        if job.max_new_tokens < self.job.max_new_tokens:
            longest = slice(job.max_new_tokens)
            plain = changed(
                plain, responses=[response[longest] for response in plain.responses]
            )
        exported = self.exported(name)
        return parity.check(
            self.target,
            self.workspace.drafter(name.replace(":", "-")),
            exported,
            self.prompts[:prompts],
            changed(job, questions=job.questions[:prompts]),
            changed(
                plain,
                prompts=plain.prompts[:prompts],
                responses=plain.responses[:prompts],
            ),
        )


def several_images(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts that show three images, text between them."""
    shown = [
        prompt
        for prompt in prompts
        if prompt.files and prompt.files[0].endswith(".png")
    ]
    files = [prompt.files[0] for prompt in shown]
    made = []
    for number, prompt in enumerate(shown[:4]):
        first, second, third = (
            {"type": "image", "path": file} for file in files[number : number + 3]
        )
        words = [
            {"type": "text", "text": text}
            for text in ("Describe them.", "And this one.")
        ]
        parts = [first, second, words[0], third, words[1]]
        made.append(
            replace(
                prompt,
                key=f"{prompt.key}-several",
                messages=[{"role": "user", "content": parts}],
            )
        )
    return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    engine_python()  # fails at once without one
    return Served(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_accepts_exactly_what_our_decoder_accepts(
    name: str, served: Served
) -> None:
    found = served.check(name, served.job)
    assert found.identical == found.prompts
    assert found.engine == found.ours
    assert found.engine.accepted > 0


def noise(drafter: Exported, out: Path) -> Path:
    """Another version of an exported drafter: weights at random."""
    shutil.copytree(drafter.out, out)
    torch.manual_seed(0)
    weights = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point():
            weights[name] = torch.randn_like(weight) / 8
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    if (mask := out / MASK).exists():
        described = torch.load(mask)
        torch.save(
            {**described, "embedding": torch.randn_like(described["embedding"])}, mask
        )
    return out


@pytest.mark.parametrize("name", SWAPPED)
def test_a_running_engine_takes_over_another_version(
    name: str, served: Served, tmp_path: Path
) -> None:
    """It then drafts as one that was started with it."""
    first = noise(served.exported(name), tmp_path / "first")
    found = served.check(name, changed(served.job, first=str(first)), prompts=FEW)
    assert found.identical == found.prompts
    assert found.engine == found.ours


def test_entries_of_a_drafter_that_was_withdrawn_harm_no_later_request(
    served: Served, tmp_path: Path
) -> None:
    """Its weights are NaN, and so are the entries that it left in blocks that are used again."""
    first = shutil.copytree(served.exported("sparrow").out, tmp_path / "first")
    weights = load_file(first / "model.safetensors")
    broken = {
        name: torch.full_like(weight, torch.nan) for name, weight in weights.items()
    }
    save_file(broken, first / "model.safetensors", {"format": "pt"})
    job = changed(served.job, first=str(first), asked_of_first=FEW, max_new_tokens=64)
    found = served.check("sparrow", job, prompts=FEW)
    assert found.identical == found.prompts
    assert found.engine == found.ours


def test_requests_that_were_preempted_respond_the_same(served: Served) -> None:
    """They read their prompts and responses again, in steps of 16 tokens."""
    written = served.exported("hivis")
    found = engine.run(
        changed(
            served.job,
            drafter=str(Path(written.out).absolute()),
            draft_tokens=written.draft_tokens,
            step_tokens=16,
            blocks=12,
        )
    )
    assert found.responses == served.plain.responses
    assert found.preempted > 0
    assert found.accepted > 0


@pytest.mark.parametrize("name", ["eagle2", "eagle3", "msd", "medusa"])
def test_prompts_from_the_prefix_cache_draft_the_same_and_so_they_do_after_a_reset(
    name: str, served: Served
) -> None:
    """The target's states of a cached prefix are not computed again: its entries must be those of eval."""
    check_caching(name, served)


def check_caching(name: str, served: Served) -> None:
    """Ask questions, ask them again, and once more with an empty prefix cache: counts are always eval's."""
    written = served.exported(name)
    job = changed(
        served.job,
        questions=served.job.questions[:FEW],
        drafter=str(Path(written.out).absolute()),
        method=written.method,
        draft_tokens=written.draft_tokens,
        prefix_caching=True,
    )
    found = engine.run(job)
    drafter = served.target.drafter(served.workspace.drafter(name.replace(":", "-")))
    ours = parity.ours(served.target, drafter, served.prompts[:FEW], job)
    plain = served.plain.responses[:FEW]
    cached, emptied = found.repeats
    assert (cached.cached > 0, emptied.cached) == (True, 0)
    assert [found.responses, cached.responses, emptied.responses] == [plain] * 3
    for counts in (found, cached, emptied):
        assert parity.DraftCounts(counts.drafts, counts.accepted) == ours
    assert ours.accepted > 0


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_that_share_each_layer_accept_the_same(
    name: str, served: Served, tmp_path: Path
) -> None:
    """A version that one of them cannot read is loaded by none."""
    refused = noise(served.exported(name), tmp_path / "refused")
    job = changed(
        served.job, tensor_parallel=2, max_new_tokens=48, refused=str(refused)
    )
    found = served.check(name, job, prompts=6)
    assert found.identical == found.prompts
    assert found.engine.drafts == found.ours.drafts
    assert found.engine.accepted > 0


def test_a_draft_takes_at_most_a_tenth_more_operators_than_one_of_vllms_own_head(
    served: Served, tmp_path: Path
) -> None:
    """The head is vLLM's EAGLE-3 without our plugin; four requests decode."""

    def operators(written: Exported, plugin: bool) -> float:
        job = changed(
            served.job,
            questions=served.job.questions[:4],
            drafter=str(Path(written.out).absolute()),
            method=written.method,
            draft_tokens=4,
            max_new_tokens=24,
            plugin=plugin,
            operators=True,
        )
        return median(engine.run(job).operators)

    served.exported("eagle3")
    trained = served.workspace.drafter("eagle3")
    head = export(trained, tmp_path / "head", "float32", "speculators")
    counts = {"": operators(head, False)}
    for name in ("eagle3", "msd", "sparrow", "hivis", "vispec", "wren"):
        counts[name] = operators(served.exported(name), True)
    assert max(counts.values()) <= 1.1 * counts[""], counts


def test_a_drafter_of_other_origin_drafts_as_without_the_plugin(
    served: Served, tmp_path: Path
) -> None:
    """In the format of speculators, which names nothing of ours."""
    served.exported("eagle3")
    trained = served.workspace.drafter("eagle3")
    written = export(trained, tmp_path / "other", "float32", "speculators")
    job = changed(
        served.job,
        questions=served.job.questions[:8],
        drafter=written.out,
        method=written.method,
        draft_tokens=written.draft_tokens,
        max_new_tokens=48,
    )
    beside = engine.run(job)
    alone = engine.run(changed(job, plugin=False))
    assert beside.responses == alone.responses
    assert (beside.drafts, beside.accepted_at) == (alone.drafts, alone.accepted_at)
    assert beside.accepted > 0


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("hivis", 16),
        ("eaglevlm", 16),
        ("vispec", 16),
        ("medusa", 16),
        ("specflash", 80),
        ("wren", 16),
    ],
)
def test_a_prompt_read_in_several_steps_drafts_the_same(
    name: str, tokens: int, served: Served
) -> None:
    """Steps of 16 tokens: some have only visual tokens or end within an image.

    A video has 72 tokens, which `specflash` must have in one step.
    """
    found = served.check(
        name, changed(served.job, step_tokens=tokens, batch=3), prompts=FEW
    )
    assert found.identical == found.prompts
    assert found.engine == found.ours


@pytest.fixture
def v2_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's newer runner; on a CPU its kernels are interpreted, which takes a second for each draft."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    for variable in ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("v2_runner")
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("hivis", 16), ("vispec", 0), ("wren", 16), ("wren:cell", 0)],
)
def test_the_v2_runner_accepts_the_same(name: str, tokens: int, served: Served) -> None:
    found = served.check(
        name, changed(served.job, max_new_tokens=24, step_tokens=tokens), prompts=4
    )
    assert found.identical == found.prompts
    # vLLM counts what it accepts beyond the limit of a response.
    assert found.engine.drafts == found.ours.drafts
    assert found.engine.accepted > 0


@pytest.mark.usefixtures("v2_runner")
def test_the_v2_runner_takes_over_another_version(
    served: Served, tmp_path: Path
) -> None:
    first = str(noise(served.exported("wren"), tmp_path / "first"))
    found = served.check(
        "wren", changed(served.job, max_new_tokens=24, first=first), prompts=4
    )
    assert found.identical == found.prompts
    assert found.engine.drafts == found.ours.drafts


def test_a_drafter_of_another_target_is_refused_in_the_last_line_of_the_log(
    served: Served, tmp_path: Path
) -> None:
    drafter, log = served.exported("sparrow"), tmp_path / "log"
    with (
        pytest.raises(EngineError) as failed,
        vllm_server(
            EMBEDDED["demo-small"],
            "demo-small",
            "float32",
            log,
            drafter,
            whole_images=False,
        ),
    ):
        pass
    assert (
        "sparrow was trained for another target (demo-video)"
        in failed.value.log.splitlines()[-1]
    )


def dtype_of_int8() -> str:
    """vLLM's int8 products take float32 on a CPU without AMX, and half precision alone on one that has it."""
    return "bfloat16" if "amx_int8" in Path("/proc/cpuinfo").read_text() else "float32"


@pytest.mark.parametrize(
    ("kind", "dtype"), [("int8", dtype_of_int8()), ("awq", "bfloat16")]
)
def test_a_quantised_target_is_served_as_it_is(
    kind: str,
    dtype: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its configuration and weights are others, so it has to be asked for."""
    monkeypatch.setenv(OTHER_TARGET, "1")
    quantised(Path(served.job.target), tmp_path / kind, kind)
    some = changed(
        served.job, questions=served.job.questions[:8], max_new_tokens=64, dtype=dtype
    )
    job = changed(some, target=str(tmp_path / kind))
    drafter, plain = served.exported("sparrow"), engine.run(job)
    assert plain.responses != [ids[:64] for ids in served.plain.responses[:8]]
    found = engine.run(
        changed(job, drafter=drafter.out, draft_tokens=drafter.draft_tokens)
    )
    assert found.responses == plain.responses
    assert found.accepted > 0


def test_a_seeded_request_samples_the_same_however_its_prompt_is_read(
    served: Served,
) -> None:
    """In several steps, stock vLLM ends on a CPU."""
    written = served.exported("hivis")
    job = changed(
        served.job,
        questions=served.job.questions[:4],
        drafter=str(Path(written.out).absolute()),
        draft_tokens=written.draft_tokens,
        max_new_tokens=24,
        temperature=1.0,
        seed=7,
        batch=1,
    )
    at_once = engine.run(job)
    in_steps = engine.run(changed(job, step_tokens=16))
    assert in_steps.responses == at_once.responses
    assert in_steps.accepted > 0


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 5)])
def test_sampled_responses_follow_the_distribution_of_the_target(
    top_p: float, top_k: int, served: Served
) -> None:
    """How likely their tokens are, and how often a token repeats the one before.

    With top-k alone, stock vLLM ends on a CPU.
    """
    written, question = served.exported("hivis"), served.job.questions[0]
    job = changed(
        served.job,
        questions=(question,) * 64,
        drafter=str(Path(written.out).absolute()),
        method=written.method,
        draft_tokens=written.draft_tokens,
        max_new_tokens=40,
        temperature=0.8,
        top_p=top_p,
        top_k=top_k,
    )
    found, draws = engine.run(job), Draws(served.target, 0.8, top_p, top_k)
    prompt = served.target.encode(served.prompts[0].messages)
    for number, ids in enumerate(found.responses):
        (sample,) = served.target.capture(
            [prompt], [ids], {HIDDEN}, "float32", [str(number)]
        )
        draws.add(sample, ids)
    assert found.accepted > 100
    assert draws.tokens > 1000
    assert draws.scores.abs().max() < 5, (draws.tokens, draws.sums)
