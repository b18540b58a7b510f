"""A target on a GPU: eager, compiled and stock decoding agree, and what does not fit is halved."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import tiny
from tests.drafters import synthetic
from tests.gpu.waits import lines, waits
from vlmdistill.cli.main import main
from vlmdistill.drafters.decoding.decoders import plain
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.fused_layers import attend_few_rows
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.schema import Sample, as_features

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

FEATURES = as_features(["hidden.text", "hidden.span", "embed.visual", "layer2.visual"])
SHOWN = [
    tiny.message("compare", tiny.picture(140, 84), tiny.picture(90, 64, 1)),
    tiny.message("what is it?", tiny.picture(57, 29, 2)),
    tiny.message("no image"),
]


@pytest.fixture(scope="module")
def target() -> VisionLanguageTarget:
    """The embedded target in float32: what rounds alike is compared exactly."""
    return load("demo-small", dtype="float32")


def prompts_of(target: VisionLanguageTarget) -> list[EncodedPrompt]:
    return [target.encode(messages) for messages in SHOWN]


def greedy(
    target: VisionLanguageTarget, prompt: EncodedPrompt, count: int
) -> list[int]:
    cycles = plain(target, prompt, max_new_tokens=count)
    return [token for cycle in cycles for token in cycle.ids]


def test_the_gpu_is_taken_and_its_attention_has_no_plans(
    target: VisionLanguageTarget,
) -> None:
    assert target.device.type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_eager_decoding_and_batches_are_the_stock_models(
    target: VisionLanguageTarget,
) -> None:
    prompts = prompts_of(target)
    stock = [target.reference(prompt, max_new_tokens=32) for prompt in prompts]
    expected = [list(response.ids) for response in stock if response is not None]
    assert [greedy(target, prompt, 32) for prompt in prompts] == expected
    batch = target.generate(prompts, max_new_tokens=32, temperature=0, batch_size=2)
    assert [list(response.ids) for response in batch] == expected


COMPILED = """
import json
from tests.gpu.test_targets import greedy, prompts_of
from vlmdistill.pipelines.targets.loading import load
compiled = load("demo-small", dtype="float32", compiled=True)
print(json.dumps([greedy(compiled, prompt, 24) for prompt in prompts_of(compiled)]))
"""


def test_compiled_decoding_is_the_same(target: VisionLanguageTarget) -> None:
    """In a process of its own: CUDA graphs outlive the target that recorded them."""
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    decoded = json.loads(ran.stdout.splitlines()[-1])
    assert decoded == [greedy(target, prompt, 24) for prompt in prompts_of(target)]


@contextmanager
def memory_left(size: int) -> Iterator[None]:
    """PyTorch may take this much more memory of the GPU."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + size) / total
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_batch_that_does_not_fit_is_halved(target: VisionLanguageTarget) -> None:
    prompts = [target.encode(tiny.message("what " * 40)) for _ in range(32)]
    responses = [[5 + number % 300 for number in range(400)] for _ in prompts]
    features = as_features(["hidden.text"])
    (whole,) = target.begin_capture(prompts, responses, features, "float32")
    expected = whole.samples()
    with memory_left(64 << 20):
        halves = load("demo-small", dtype="float32").begin_capture(
            prompts, responses, features, "float32"
        )
        samples = [sample for half in halves for sample in half.samples()]
    assert len(halves) > 1
    assert_alike(samples, expected)


def assert_alike(samples: list[Sample], expected: list[Sample]) -> None:
    for ours, theirs in zip(samples, expected, strict=True):
        for feature, state_ND in ours.features.items():
            np.testing.assert_allclose(
                state_ND, theirs.features[feature], rtol=1e-3, atol=1e-3
            )


def test_captured_states_are_those_of_a_cpu_and_arrive_pinned(
    target: VisionLanguageTarget,
) -> None:
    on_cpu = load("demo-small", device="cpu")
    responses = [[5, 6, 7], [8], [9, 10]]
    expected = on_cpu.capture(prompts_of(on_cpu), responses, FEATURES, "float32")
    (leaving,) = target.begin_capture(
        prompts_of(target), responses, FEATURES, "float32"
    )
    assert all(state_ND.is_pinned() for state_ND in leaving.features.values())
    assert_alike(leaving.samples(), expected)


def test_a_captured_batch_is_begun_without_waiting(
    target: VisionLanguageTarget,
) -> None:
    prompts, responses = prompts_of(target), [[5, 6, 7], [8], [9, 10]]
    target.begin_capture(prompts, responses, FEATURES)  # the first is checked
    with waits() as caught:
        (leaving,) = target.begin_capture(prompts, responses, FEATURES)
    assert not lines(caught)
    leaving.samples()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the demo with prompts and a drafter of random weights."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["prompts", "demo", "--runs", str(folder), "--limit", "8"]) == 0
    demo = load("demo-small", device="cpu")
    synthetic.save(
        "sparrow", folder / "demo-small" / "drafters" / "sparrow", target=demo
    )
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_evaluation_finds_every_response_lossless(
    dtype: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--limit",
        "2",
        "--max-new-tokens",
        "32",
        "--temperature",
        "0",
        "--anyway",
    ]
    where = ["--runs", str(runs), "--target-dtype", dtype]
    assert main(["eval", "sparrow", *where, *options]) == 0
    records = sorted(
        (runs / "demo-small" / "reports").glob("*.json"),
        key=lambda file: file.stat().st_mtime,
    )
    (evaluated,) = json.loads(records[-1].read_text())["temperatures"]
    checks = [prompt["drafted"]["check"] for prompt in evaluated["prompts"]]
    assert len(checks) == 2
    assert set(checks) <= (
        {"identical"} if dtype == "float32" else {"identical", "near_tie"}
    )


def test_generation_takes_as_many_slots_as_fit(target: VisionLanguageTarget) -> None:
    prompts = [target.encode(tiny.message("what " * count)) for count in (1, 9, 3, 30)]
    expected = [greedy(target, prompt, 16) for prompt in prompts]
    responses = target.generate(prompts, max_new_tokens=16, temperature=0)
    assert [list(response.ids) for response in responses] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_over_many_keys_are_as_exact_as_pytorchs_attention(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((4, 42, 128), (4, 5000, 128), (4, 5000, 128))
    query, key, value = (
        torch.randn(*shape, generator=generator, device="cuda").to(dtype)
        for shape in shapes
    )
    mask = torch.zeros(42, 5000, device="cuda", dtype=dtype)
    mask[:, 4990:] = torch.finfo(dtype).min
    exact = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask.double()
    )
    ours = attend_few_rows(query, key, value, mask, 128**-0.5)
    theirs = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert ours.dtype == dtype
    errors = [
        float((state.double() - exact).norm() / exact.norm())
        for state in (ours, theirs)
    ]
    assert errors[0] < max(2 * errors[1], 1e-6)
