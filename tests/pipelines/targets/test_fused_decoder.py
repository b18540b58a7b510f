"""Trees after images verify as one-token-at-a-time decoding does, and any committed path is a prefix."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.config import cpp
from torch._inductor.graph import GraphLowering

from tests import tiny
from tests.pipelines.targets.stock import Messages, Stock
from tests.thorough import THOROUGH
from vlmdistill.drafters.core.target import Target
from vlmdistill.pipelines.targets import packed_weights
from vlmdistill.pipelines.targets.loading import load
from vlmdistill.pipelines.targets.packed_weights import PackedWeight
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature

Checkpoint = Callable[..., Path]
PROMPTS: dict[str, Messages] = {
    "none": tiny.message("say something"),
    "one": tiny.message("what is it?", tiny.picture(90, 64)),
    "several": tiny.message(
        "compare", tiny.picture(33, 95, 1), tiny.picture(120, 60, 2)
    ),
}
VIDEOS: dict[str, Messages] = {
    "video": tiny.message("what moves?", tiny.clip(5, 61, 45)),
    "mixed": tiny.message(
        "compare",
        tiny.clip(4, 40, 40, 1),
        tiny.picture(90, 64),
        tiny.clip(7, 30, 70, 2),
    ),
}
SHOWN = [
    *((family, name) for family in tiny.FAMILIES for name in PROMPTS),
    *((family, name) for family in tiny.VIDEO for name in VIDEOS),
    *((family, "several") for family in tiny.OTHER_PARTS),
]
PROMPTS |= VIDEOS
SOURCES = ("hidden", "layer1", "layer2")
#           0
#      1    2     3
#    4  5   6    7 8
#    9     10 11
PARENT = (0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 6, 6)


def path(node: int) -> list[int]:
    """The nodes from the root down to this one."""
    return [*(path(PARENT[node]) if node else []), node]


def tree(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_N = torch.randint(20, 300, (len(PARENT),), generator=generator)
    visible_NN = torch.zeros(len(PARENT), len(PARENT), dtype=torch.bool)
    for node in range(len(PARENT)):
        visible_NN[node, path(node)] = True
    return ids_N, visible_NN.sum(1), visible_NN


@pytest.mark.parametrize(
    ("family", "shown", "attention"),
    [(*shown, "sdpa") for shown in SHOWN]
    + [(*shown, "eager") for shown in SHOWN if shown[1] in ("several", "mixed")],
)
def test_tree_equals_one_token_at_a_time(
    checkpoint: Checkpoint, family: str, attention: str, shown: str
) -> None:
    """Every path of the tree against a fresh pass of the stock model over prompt and path; then again
    after committing a path that is not a prefix of the tree's rows."""
    folder = checkpoint(family)
    target = load(str(folder), attention=attention)
    stock = Stock(folder, target, attention)
    before: list[int] = []
    target.prefill(target.encode(PROMPTS[shown]))
    for turn, chosen in enumerate((11, 5)):
        ids_N, depth_N, visible_NN = tree(turn)
        states = target.extend(ids_N, depth_N, visible_NN, SOURCES)
        states["logits"] = target.logits(states["hidden"])
        for leaf in set(range(len(PARENT))) - set(PARENT):
            nodes = path(leaf)
            expected = stock.states(PROMPTS[shown], [*before, *ids_N[nodes].tolist()])
            for source in (*SOURCES, "logits"):
                mine, theirs = states[source][nodes], expected[source][-len(nodes) :]
                torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=1e-4)
        target.commit(path(chosen))
        before += ids_N[path(chosen)].tolist()


def greedy(target: Target, prompt: object, count: int) -> list[int]:
    """Plain decoding over the decoder's protocol."""
    batch = target.prefill(prompt, ())
    hidden_1D, ids = batch.feature("hidden", "text")[-1:], list[int]()
    while True:
        token_1 = target.logits(hidden_1D).argmax(-1)
        ids.append(int(token_1))
        if len(ids) == count or ids[-1] in target.info.eos_ids:
            return ids
        hidden_1D = target.extend(
            token_1, torch.ones(1, dtype=torch.long), None, ("hidden",)
        )["hidden"]
        target.commit([0])


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.OTHER_PARTS])
def test_greedy_loop_equals_generate(checkpoint: Checkpoint, family: str) -> None:
    """Token by token, prompt after prompt: what one leaves behind does not reach the next."""
    folder = checkpoint(family)
    target = load(str(folder))
    stock = Stock(folder, target)
    for shown in [name for its_family, name in reversed(SHOWN) if its_family == family]:
        prompt = target.encode(PROMPTS[shown])
        theirs = stock.generate(PROMPTS[shown], 24)[0, prompt.length :].tolist()
        assert greedy(target, prompt, 24) == theirs
        assert (
            list(target.generate([prompt], max_new_tokens=24, temperature=0)[0].ids)
            == theirs
        )


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_packed_weights_decode_as_plain_ones(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tree and greedy responses, where a weight is large enough for them."""
    plain = load(str(checkpoint(family)))
    monkeypatch.setattr(packed_weights, "LARGE", {torch.float32: 1})
    packed = load(str(checkpoint(family)))
    times, rows = PackedWeight.times, list[int]()

    def counted(self: PackedWeight, rows_NI: Tensor, *bias: Tensor) -> Tensor:
        rows.append(len(rows_NI))
        return times(self, rows_NI, *bias)

    monkeypatch.setattr(PackedWeight, "times", counted)
    ids_N, depth_N, visible_NN = tree(seed=3)
    states = []
    for target in (plain, packed):
        prompt = target.encode(PROMPTS["several"])
        target.prefill(prompt)
        hidden_ND = target.extend(ids_N, depth_N, visible_NN)["hidden"]
        states += [hidden_ND, target.logits(hidden_ND)]
    torch.testing.assert_close(states[2:], states[:2], rtol=1e-4, atol=1e-4)
    assert set(rows) == {len(ids_N)}
    prompts = [plain.encode(PROMPTS[name]) for name in ("none", "one", "several")]
    responses = plain.generate(prompts, max_new_tokens=12, temperature=0)
    assert packed.generate(prompts, max_new_tokens=12, temperature=0) == responses
    assert (
        min(rows) == packed_weights.FEWEST[torch.float32]
    )  # of the three prompts together
    assert list(responses[1].ids) == greedy(packed, prompts[1], 12)


def test_weights_are_packed_on_a_cpu_if_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large_OI = torch.empty(1024, 1024)
    small_OI = torch.empty(256, 256)
    fewest_rows = packed_weights.fewest_rows
    assert fewest_rows([large_OI, small_OI]) == 3  # the mean counts
    assert fewest_rows([large_OI, small_OI, small_OI]) == inf
    assert fewest_rows([large_OI.half()]) == inf
    assert fewest_rows([large_OI.to("meta")]) == inf
    for supported, fewest in ((True, 1), (False, inf)):
        bfloat16 = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: supported)  # noqa: B023
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "mkldnn", bfloat16)
            assert fewest_rows([small_OI.bfloat16()]) == fewest
    monkeypatch.setattr(packed_weights, "SHARE", 0.0)
    assert fewest_rows([large_OI]) == inf


@pytest.fixture
def target(checkpoint: Checkpoint) -> VisionLanguageTarget:
    return load(str(checkpoint("qwen2_5_vl")))


def test_a_chain_is_causal_without_a_mask(target: VisionLanguageTarget) -> None:
    ids_N, depth_N = torch.tensor([40, 41, 42, 43]), torch.arange(1, 5)
    target.prefill(target.encode(PROMPTS["one"]))
    causal = target.extend(ids_N, depth_N, None)["hidden"]
    masked = target.extend(ids_N, depth_N, torch.ones(4, 4).tril().bool())["hidden"]
    torch.testing.assert_close(causal, masked)


@pytest.mark.slow
def test_compiled_steps_are_one_program_whatever_is_committed(
    checkpoint: Checkpoint,
    target: VisionLanguageTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced in one piece and run as traced: what a compiler or a CUDA graph is given."""
    counted = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    compiled = load(str(checkpoint("qwen2_5_vl")), compiled=True)
    for shown in ("one", "none", "several"):
        prompt = target.encode(PROMPTS[shown])
        assert greedy(compiled, prompt, 24) == greedy(target, prompt, 24)
    assert counted.frame_count == 1
    long = target.encode(tiny.message("what " * 200))
    assert (
        long.length < 1024 < long.length + 80
    )  # where a table of rotary factors would have grown
    assert greedy(compiled, long, 80) == greedy(target, long, 80)
    assert counted.frame_count == 2  # for the larger cache
    ids_N, depth_N, visible_NN = tree(0)
    for one in (compiled, target):
        one.prefill(target.encode(PROMPTS["one"]))
    for _ in range(3):
        states = [
            one.extend(ids_N, depth_N, visible_NN, ("hidden", "layer1"))
            for one in (compiled, target)
        ]
        torch.testing.assert_close(*states, atol=3e-5, rtol=1e-4)
        for one in (compiled, target):
            one.commit(visible_NN[-1].nonzero()[:, 0].tolist())
    assert counted.frame_count == 3


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning"
)  # of the compiler itself
@pytest.mark.slow
def test_a_compiled_step_does_not_copy_what_is_committed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()  # other capacities in this process would make it a variable
    target = load(str(checkpoint("llava", layers=1)), compiled=True)
    target.prefill(target.encode(PROMPTS["none"]))
    one = torch.ones(1, dtype=torch.long)
    codes: list[str] = []

    def look(code: str) -> None:
        codes.append(code)
        if not THOROUGH:
            raise OSError(
                "it is not built"
            )  # most of the time is that of the C++ compiler

    monkeypatch.setattr(GraphLowering, "save_output_code", look)
    monkeypatch.setattr(
        cpp, "vec_isa_ok", None if THOROUGH else True
    )  # else found by building programs
    with (
        torch.inference_mode(),
        nullcontext() if THOROUGH else pytest.raises(TargetError, match="not built"),
    ):
        assert target.extend(one + 40, one)["hidden"].isfinite().all()
    (code,) = codes
    assert re.search(
        r"assert_size_stride.*\(\d+, 512, \d+\)", code
    )  # the cache: it is an input
    assert not re.search(r"empty_strided\w*\(\([^()]*512, \d+\)", code)


def test_a_missing_compiler_is_one_line(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    target = load(str(checkpoint("llava")), compiled=True)
    target.prefill(target.encode(PROMPTS["none"]))
    with pytest.raises(TargetError, match=r"no C\+\+ compiler.*--compile"):
        target.extend(torch.tensor([40]), torch.tensor([1]))


def test_nothing_is_kept_unless_committed(target: VisionLanguageTarget) -> None:
    target.prefill(target.encode(PROMPTS["one"]))
    ids_N, depth_N, visible_NN = tree(0)
    first = target.extend(ids_N, depth_N, visible_NN)["hidden"].clone()
    target.extend(ids_N.flip(0), depth_N, visible_NN)
    torch.testing.assert_close(
        target.extend(ids_N, depth_N, visible_NN)["hidden"], first
    )


def test_a_committed_chain_equals_a_longer_prompt(target: VisionLanguageTarget) -> None:
    """Over more tokens than the cache and the rotary tables have room for at first."""
    prompt = target.encode(PROMPTS["several"])
    target.prefill(prompt)
    ids = torch.randint(20, 300, (700,), generator=torch.Generator().manual_seed(0))
    for start in range(0, 700, 7):
        part = ids[start : start + 7]
        hidden = target.extend(part, torch.arange(1, 8))["hidden"]
        target.commit(range(5))
        again = target.extend(part[5:], torch.arange(1, 3))["hidden"]
        torch.testing.assert_close(again, hidden[5:], atol=3e-5, rtol=1e-4)
        target.commit([0, 1])
    sample = target.capture(
        [prompt], [ids.tolist()], [Feature("hidden", "text")], "float32"
    )[0]
    whole = torch.from_numpy(sample.features[Feature("hidden", "text")])
    torch.testing.assert_close(again, whole[-2:], atol=1e-4, rtol=1e-3)


def test_prefill_returns_what_capture_stores(target: VisionLanguageTarget) -> None:
    features = [
        Feature(source, where)
        for source in SOURCES
        for where in ("text", "visual", "span")
    ]
    for shown in PROMPTS:
        prompt = target.encode(PROMPTS[shown])
        batch = target.prefill(prompt, features)
        sample = target.capture([prompt], [()], features, "float32")[0]
        assert batch.ids_T.tolist() == sample.ids_T.tolist()
        assert batch.position_T.tolist() == sample.position_T.tolist()
        assert batch.rope_T.tolist() == sample.rope_T.tolist()
        assert not batch.response_T.any()
        assert [tuple(vars(span).values()) for span in sample.spans] == list(
            zip(batch.start_M.tolist(), batch.length_M.tolist(), strict=True)
        )
        assert set(batch.features) == {*features, Feature("hidden", "text")}
        for feature in features:
            torch.testing.assert_close(
                batch.features[feature], torch.from_numpy(sample.features[feature])
            )
        assert Feature("hidden", "text") in target.prefill(prompt).features


def test_fusing_leaves_the_model_as_it_was(checkpoint: Checkpoint) -> None:
    """The stock modules are views of the fused weights: same values and responses, no copies."""
    target = load(str(checkpoint("llava_onevision")))
    prompt = target.encode(PROMPTS["one"])
    before = target.generate([prompt], max_new_tokens=20, temperature=0)
    weights = {name: value.clone() for name, value in target.model.state_dict().items()}
    target.prefill(prompt)
    assert target.generate([prompt], max_new_tokens=20, temperature=0) == before
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, weights[name])
    layer = target.model.model.language_model.layers[0]
    assert layer.mlp.gate_proj.weight.untyped_storage().data_ptr() == (
        layer.mlp.up_proj.weight.untyped_storage().data_ptr()
    )


def test_weights_that_are_not_plain_are_refused(target: VisionLanguageTarget) -> None:
    class Quantized(torch.nn.Linear):
        pass

    target.model.model.language_model.layers[1].mlp.up_proj = Quantized(32, 48)
    with pytest.raises(TargetError, match="Quantized"):
        target.prefill(target.encode(PROMPTS["none"]))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_half_precision_stays_close(checkpoint: Checkpoint, family: str) -> None:
    """In bfloat16 a tree rounds differently than one token does, by little."""
    target = load(str(checkpoint(family)), dtype="bfloat16")
    exact = load(str(checkpoint(family)), dtype="float32")
    ids_N, depth_N, visible_NN = tree(0)
    for one in (target, exact):
        one.prefill(one.encode(PROMPTS["several"]))
    mine = target.extend(ids_N, depth_N, visible_NN)["hidden"]
    assert mine.dtype == torch.bfloat16
    theirs = exact.extend(ids_N, depth_N, visible_NN)["hidden"]
    assert float((mine - theirs).pow(2).mean() / theirs.pow(2).mean()) < 1e-3
