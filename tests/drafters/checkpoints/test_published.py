"""Published checkpoints, in the layouts of their authors, compute here what plain modules of torch compute.

The modules below follow the published architectures; their random weights are written as the authors write
theirs, and read back through the importer.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, LAYOUTS
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.checkpoints import checkpoint, published
from vlmdistill.drafters.checkpoints.description import describe
from vlmdistill.drafters.checkpoints.initial import Initial
from vlmdistill.drafters.core.batch import Batch
from vlmdistill.drafters.core.config import features
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.stores.errors import TrainingError

WIDTH, HEADS = INFO.hidden_size, INFO.num_heads
THETA = 500.0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 40,  # not the target's
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "vocab_size": INFO.vocab_size,
}


class Attention(nn.Module):
    """Of Llama: separate projections, rotary positions in two halves, repeated key heads."""

    def __init__(self, inputs: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.kv_heads, self.width = kv_heads, WIDTH // HEADS
        self.q_proj = nn.Linear(inputs, WIDTH, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * self.width, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * self.width, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_ND: Tensor, place_N: Tensor) -> Tensor:
        half = self.width // 2
        angle_N1h = place_N[:, None, None] * THETA ** (-torch.arange(half) / half)
        cos, sin = angle_N1h.cos(), angle_N1h.sin()

        def turned(flat_NX: Tensor) -> Tensor:
            left, right = flat_NX.view(len(x_ND), -1, self.width).chunk(2, -1)
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

        repeat = HEADS // self.kv_heads
        query, key = (
            turned(self.q_proj(x_ND)),
            turned(self.k_proj(x_ND)).repeat_interleave(repeat, 1),
        )
        value = (
            self.v_proj(x_ND)
            .view(len(x_ND), -1, self.width)
            .repeat_interleave(repeat, 1)
        )
        score_HNN = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(self.width)
        later_NN = torch.ones(len(x_ND), len(x_ND)).triu(1).bool()
        weight_HNN = score_HNN.masked_fill(later_NN, -math.inf).softmax(-1)
        out_ND: Tensor = self.o_proj(
            torch.einsum("hqk,khd->qhd", weight_HNN, value).flatten(1)
        )
        return out_ND


class Layer(nn.Module):
    """One decoder layer, with the norms of its method."""

    post_attention_layernorm: nn.Module
    input_layernorm: nn.Module
    hidden_norm: nn.Module

    def __init__(
        self, inputs: int, kv_heads: int, bias: bool, norms: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.self_attn = Attention(inputs, kv_heads, bias)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(WIDTH, 40, bias=False),
                "up_proj": nn.Linear(WIDTH, 40, bias=False),
                "down_proj": nn.Linear(40, WIDTH, bias=False),
            }
        )
        self.norms = norms
        for name in (*norms, "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(WIDTH, 1e-5))

    def forward(self, x_ND: Tensor, residual_ND: Tensor, place_N: Tensor) -> Tensor:
        x_ND = residual_ND + self.self_attn(x_ND, place_N)
        normed_ND = self.post_attention_layernorm(x_ND)
        gate_NM = nn.functional.silu(self.mlp["gate_proj"](normed_ND))
        out_ND: Tensor = x_ND + self.mlp["down_proj"](
            gate_NM * self.mlp["up_proj"](normed_ND)
        )
        return out_ND


@dataclass
class Sequence:
    """A sample as the authors' code sees it: all positions in order, visual ones included."""

    embed_LD: Tensor
    hidden_LX: Tensor
    visual_L: Tensor

    @classmethod
    def of(cls, one: Batch, drafter: Drafter, sources: tuple[str, ...]) -> "Sequence":
        visual_UD = one.feature("embed", "visual")
        embed_LD = synthetic.in_order(one, drafter.embed_VD[one.ids_T], visual_UD)
        visual_L = synthetic.in_order(
            one, torch.zeros(len(one.ids_T)), torch.ones(len(visual_UD))
        ).bool()
        return cls(embed_LD, synthetic.states(one, *sources), visual_L)


class Eagle(nn.Module):
    """EAGLE-1, EAGLE-2 and HASS: fc over [embedding ; state], then one layer without an input norm."""

    def __init__(
        self,
        kv_heads: int = HEADS,
        bias: bool = True,
        attention_bias: bool = False,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(INFO.vocab_size, WIDTH)
        self.fc = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        norms = ("input_layernorm",) if norm else ()
        self.layers = nn.ModuleList([Layer(WIDTH, kv_heads, attention_bias, norms)])

    def layer(self, x_ND: Tensor, place_N: Tensor) -> Tensor:
        (layer,) = self.layers
        normed_ND = layer.input_layernorm(x_ND) if layer.norms else x_ND  # type: ignore[operator]
        out_ND: Tensor = layer(normed_ND, x_ND, place_N)
        return out_ND

    def forward(self, one: Sequence) -> Tensor:
        """The outputs of text entries."""
        x_ND = self.fc(torch.cat([one.embed_LD[1:], one.hidden_LX[:-1]], -1))
        return self.layer(x_ND, torch.arange(len(x_ND)))[~one.visual_L[1:]]


class Msd(Eagle):
    """MSD: visual embeddings enter the layer as they are."""

    def forward(self, one: Sequence) -> Tensor:
        x_ND = self.fc(torch.cat([one.embed_LD[1:], one.hidden_LX[:-1]], -1))
        x_ND = torch.where(one.visual_L[1:, None], one.embed_LD[1:], x_ND)
        return self.layer(x_ND, torch.arange(len(x_ND)))[~one.visual_L[1:]]


class Vispec(Eagle):
    """ViSpec: each image becomes compressed tokens at its last positions, and a vector for later text."""

    def __init__(self, num_q: int) -> None:
        super().__init__(attention_bias=True)
        self.imadpt = nn.Module()
        self.imadpt.q = nn.Parameter(torch.empty(num_q, HEADS, WIDTH // HEADS))
        for name in ("k_proj", "v_proj", "o_proj"):
            setattr(self.imadpt, name, nn.Linear(WIDTH, WIDTH, bias=name != "o_proj"))
        self.img_fc = nn.Linear(2 * WIDTH, WIDTH)

    def compress(self, embed_UD: Tensor) -> Tensor:
        shape = (len(embed_UD), HEADS, WIDTH // HEADS)
        key, value = (
            self.imadpt.k_proj(embed_UD).view(shape),  # type: ignore[operator]
            self.imadpt.v_proj(embed_UD).view(shape),  # type: ignore[operator]
        )
        score = torch.einsum("qhd,uhd->hqu", self.imadpt.q, key) / math.sqrt(shape[-1])
        mixed = torch.einsum("hqu,uhd->qhd", score.softmax(-1), value)
        out_QD: Tensor = self.imadpt.o_proj(mixed.flatten(1))  # type: ignore[operator]
        return out_QD

    def forward(self, one: Sequence) -> Tensor:
        rows, places, text = [], [], []
        last_D, place = torch.zeros(WIDTH), 1
        while place < len(one.embed_LD):
            if one.visual_L[place]:
                end = place
                while one.visual_L[end]:
                    end += 1
                out_QD = self.compress(one.embed_LD[place:end])
                last_D, kept = out_QD[-1], len(out_QD) - 1
                rows += [*out_QD[:-1]]
                places += [end - kept + number - 1 for number in range(kept)]
                text += [False] * kept
                place = end
                continue
            state_D = self.img_fc(torch.cat([one.hidden_LX[place - 1], last_D]))
            rows.append(self.fc(torch.cat([one.embed_LD[place], state_D])))
            places.append(place - 1)
            text.append(True)
            place += 1
        return self.layer(torch.stack(rows), torch.tensor(places))[torch.tensor(text)]


class Eagle3(nn.Module):
    """EAGLE-3: three states fused, a layer over [normed embedding ; normed state], its own vocabulary."""

    def __init__(self, kv_heads: int, chosen: list[int]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(INFO.vocab_size, WIDTH)
        self.fc = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.midlayer = Layer(
            2 * WIDTH, kv_heads, False, ("hidden_norm", "input_layernorm")
        )
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.lm_head = nn.Linear(WIDTH, len(chosen), bias=False)
        chosen_K = torch.tensor(chosen)
        self.register_buffer("d2t", chosen_K - torch.arange(len(chosen)))
        self.register_buffer(
            "t2d", torch.zeros(INFO.vocab_size).bool().index_fill(0, chosen_K, True)
        )

    def forward(self, one: Sequence) -> Tensor:
        layer, state_ND = self.midlayer, self.fc(one.hidden_LX[:-1])
        normed = [layer.input_layernorm(one.embed_LD[1:]), layer.hidden_norm(state_ND)]
        out_ND: Tensor = layer(
            torch.cat(normed, -1), state_ND, torch.arange(len(state_ND))
        )
        return out_ND[~one.visual_L[1:]]


class Speculators(Eagle3):
    """EAGLE-3 of speculators: another name for the layer, and perhaps the normed state as the residual."""

    def __init__(self, kv_heads: int, chosen: list[int], normed: bool) -> None:
        super().__init__(kv_heads, chosen)
        self.layers, self.normed = nn.ModuleList([self.midlayer]), normed
        del self.midlayer

    def forward(self, one: Sequence) -> Tensor:
        (layer,), state_ND = self.layers, self.fc(one.hidden_LX[:-1])
        embed_ND, normed_ND = (
            layer.input_layernorm(one.embed_LD[1:]),  # type: ignore[operator]
            layer.hidden_norm(state_ND),  # type: ignore[operator]
        )
        residual_ND = normed_ND if self.normed else state_ND
        x_ND = torch.cat([embed_ND, normed_ND], -1)
        out_ND: Tensor = layer(x_ND, residual_ND, torch.arange(len(state_ND)))
        return out_ND[~one.visual_L[1:]]


class Crossed(Layer):
    """DREAM's second layer: its keys and values are states, and gates are before what it adds."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__(WIDTH, kv_heads, False, ("input_layernorm",))
        self.cross_attn = self.self_attn
        del self.self_attn
        self.cross_attn.q_norm = nn.RMSNorm(WIDTH // HEADS, 1e-5)
        self.cross_attn.k_norm = nn.RMSNorm(WIDTH // HEADS, 1e-5)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_ND: Tensor, state_ND: Tensor, place_N: Tensor) -> Tensor:
        part, count, repeat = (
            self.cross_attn,
            len(x_ND),
            HEADS // self.cross_attn.kv_heads,
        )
        query = part.q_norm(
            part.q_proj(self.input_layernorm(x_ND)).view(count, HEADS, -1)
        )  # type: ignore[operator]
        key = part.k_norm(
            part.k_proj(state_ND).view(count, part.kv_heads, -1)
        ).repeat_interleave(repeat, 1)  # type: ignore[operator]
        value = (
            part.v_proj(state_ND)
            .view(count, part.kv_heads, -1)
            .repeat_interleave(repeat, 1)
        )
        score_HNN = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(part.width)
        later_NN = torch.ones(count, count).triu(1).bool()
        mixed = torch.einsum(
            "hqk,khd->qhd",
            score_HNN.masked_fill(later_NN, -math.inf).softmax(-1),
            value,
        )
        x_ND = x_ND + self.cross_attn_attn_gate.tanh() * part.o_proj(mixed.flatten(1))
        normed_ND = self.post_attention_layernorm(x_ND)
        gate_NM = nn.functional.silu(self.mlp["gate_proj"](normed_ND))
        added_ND = self.mlp["down_proj"](gate_NM * self.mlp["up_proj"](normed_ND))
        out_ND: Tensor = x_ND + self.cross_attn_mlp_gate.tanh() * added_ND
        return out_ND


class Dream(nn.Module):
    """DREAM: a layer over embeddings, one that looks at states, one more, and a norm."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(INFO.vocab_size, WIDTH)
        first, last = (
            Layer(WIDTH, kv_heads, False, norms) for norms in ((), ("input_layernorm",))
        )
        self.layers = nn.ModuleList([first, Crossed(kv_heads), last])
        self.norm = nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, one: Sequence) -> Tensor:
        """The normed output and that of the second layer."""
        first, crossed, last = self.layers
        x_ND, place_N = one.embed_LD[1:], torch.arange(len(one.embed_LD) - 1)
        x_ND = crossed(first(x_ND, x_ND, place_N), one.hidden_LX[:-1], place_N)
        out_ND = self.norm(last(last.input_layernorm(x_ND), x_ND, place_N))  # type: ignore[operator]
        return torch.cat([out_ND, x_ND], -1)[~one.visual_L[1:]]


def write(
    folder: Path, module: nn.Module, *, file: str = "pytorch_model.bin", **config: Any
) -> Path:
    """The checkpoint of a random module, whose embeddings are the target's."""
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    module.embed_tokens.weight.data = synthetic.head().embed_VD.clone()  # type: ignore[union-attr]
    put(folder, dict(module.state_dict()), file=file, **config)
    return folder


def put(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    file: str = "pytorch_model.bin",
    **config: Any,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, folder / file
        )


def imported(folder: Path, name: str, out: Path) -> Drafter:
    origin = synthetic.provenance()
    published.load(folder, name, synthetic.head(), INFO, out, origin)
    drafter = checkpoint.load(out, synthetic.head(), INFO, provenance=origin)
    assert isinstance(drafter, Drafter)
    return drafter


SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {**CONFIG, "num_key_value_heads": 2},
    "num_key_value_heads": 1,  # only that of the layers counts
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}
CHOSEN = [3, 4, 7, 11, 12, 15, 20, 21, 22]
CASES: dict[str, tuple[str, nn.Module, dict[str, Any]]] = {
    "EAGLE-2": ("eagle2", Eagle(), {}),
    "HASS": (
        "hass",
        Eagle(attention_bias=True),
        {"file": "model.safetensors", "qkv_bias": True},
    ),
    "EAGLE without bias": (
        "eagle2",
        Eagle(2, bias=False),
        {"num_key_value_heads": 2, "bias": False},
    ),
    "EAGLE-3": (
        "eagle3",
        Eagle3(2, CHOSEN),
        {"num_key_value_heads": 2, "draft_vocab_size": 9},
    ),
    "EAGLE-3, all tokens": (
        "eagle3",
        Eagle3(HEADS, [*range(23)]),
        {"draft_vocab_size": 23},
    ),
    "EAGLE-3, SpecForge": (
        "eagle3",
        Eagle3(2, CHOSEN),
        {
            "num_key_value_heads": 2,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            },
        },
    ),
    "EAGLE-3, speculators": (
        "eagle3",
        Speculators(2, CHOSEN, normed=False),
        {**SPECULATORS},
    ),
    "EAGLE-3, speculators, normed": (
        "eagle3",
        Speculators(2, CHOSEN, normed=True),
        {**SPECULATORS, "norm_before_residual": True, "file": "model.safetensors"},
    ),
    "DREAM": ("dream", Dream(HEADS), {"model_type": "llama", "dropout": 0.0}),
    "DREAM, fewer key heads": (
        "dream",
        Dream(2),
        {"num_key_value_heads": 2, "file": "model.safetensors"},
    ),
    "ViSpec": ("vispec", Vispec(2), {"model_type": "llava_next", "qkv_bias": True}),
    "ViSpec, two tokens": (
        "vispec",
        Vispec(3),
        {"file": "model.safetensors", "qkv_bias": True},
    ),
    "MSD": ("msd", Msd(), {"model_type": "llava"}),
    "MSD, Qwen2-VL": (
        "msd",
        Msd(2, attention_bias=True, norm=True),
        {
            "model_type": "qwen2_vl",
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
        },
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["no image", "several images"])
@pytest.mark.parametrize("case", CASES)
def test_an_imported_drafter_computes_what_its_authors_module_computes(
    case: str, layout: str, tmp_path: Path
) -> None:
    name, module, config = CASES[case]
    folder = write(tmp_path / "theirs", module, **config)
    drafter = imported(folder, name, tmp_path / "ours")
    one = synthetic.batch([LAYOUTS[layout]], features(*synthetic.ALL))
    expected_ED = module(Sequence.of(one, drafter, drafter.sources))
    cache = PackedKVCache()
    drafter.condition(one, cache)
    entries, token_E = drafter.entries(one)
    tokens = entries.tokens.with_rows(torch.arange(len(token_E)))
    state_ED = drafter.step(replace(entries, tokens=tokens), cache)
    torch.testing.assert_close(state_ED, expected_ED, rtol=1e-4, atol=1e-4)
    if isinstance(module, Eagle3):
        logits = module.lm_head(module.norm(expected_ED))
        torch.testing.assert_close(
            drafter.logits(state_ED, entries.ids_N), logits, rtol=1e-4, atol=1e-4
        )


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "layers.0.self_attn.q_norm.weight": ("eagle2", {}),
    "layers.1.mlp.up_proj.weight": ("eagle2", {}),
    "layers.0.input_layernorm.weight": ("hass", {}),
    "layers.0.self_attn.o_proj.bias": ("eagle2", {}),
    "norm.weight": ("msd", {}),
    "rope_scaling": ("eagle2", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mrope": (
        "eagle2",
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
    ),
    "hidden_act": ("eagle2", {"hidden_act": "gelu"}),
    "num_key_value|expected of its config": ("eagle2", {"num_key_value_heads": 2}),
    "norm_before_residual": ("eagle2", {"norm_before_residual": True}),
    "visual_norm": ("sparrow", {}),
    "another architecture": ("medusa", {}),
}


@pytest.mark.parametrize("odd", REFUSED)
def test_what_has_no_counterpart_is_refused_by_its_name(
    odd: str, tmp_path: Path
) -> None:
    name, config = REFUSED[odd]
    folder = write(tmp_path / "theirs", Eagle())
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    extra = {odd: torch.ones(WIDTH)} if odd.endswith((".weight", ".bias")) else {}
    put(folder, {**tensors, **extra}, **config)
    with pytest.raises(TrainingError, match=odd):
        imported(folder, name, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_vocabulary_that_differs_by_more_than_padding_is_refused(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "theirs", Eagle(), vocab_size=32000)
    with pytest.raises(
        TrainingError, match=f"vocab_size is 32000 and the target's {INFO.vocab_size}"
    ):
        imported(folder, "eagle2", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    write(folder, Eagle(), vocab_size=INFO.vocab_size + 64)
    imported(folder, "eagle2", tmp_path / "ours")


def test_a_checkpoint_without_a_table_to_compare_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "theirs", Eagle())
    imported(folder, "eagle2", tmp_path / "compared")
    assert not caplog.records
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del tensors["embed_tokens.weight"]
    put(folder, tensors)
    imported(folder, "eagle2", tmp_path / "ours")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_tables_that_are_not_the_targets_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", Eagle3(2, CHOSEN), num_key_value_heads=2)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for name, change in [
        ("embed_tokens.weight", tensors["embed_tokens.weight"] + 0.1),
        ("t2d", ~tensors["t2d"]),
        ("d2t", tensors["d2t"].flip(0)),
        ("d2t", tensors["d2t"] + 10**6),
    ]:
        put(folder, {**tensors, name: change}, num_key_value_heads=2)
        with pytest.raises(TrainingError, match=name):
            imported(folder, "eagle3", tmp_path / "ours")
        with pytest.raises(TrainingError, match=name):
            begun(folder)
    half = {
        key: one.half() if one.is_floating_point() else one
        for key, one in tensors.items()
    }
    put(folder, half, num_key_value_heads=2)
    imported(folder, "eagle3", tmp_path / "ours")
    begun(folder)


@pytest.mark.parametrize(
    "odd",
    [
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
        {"eagle_config": 3},
    ],
    ids=str,
)
def test_other_layers_of_the_target_are_refused(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    """One too many in the count of SpecForge, where a layer is that which a state leaves."""
    folder = write(tmp_path / "theirs", Eagle3(2, CHOSEN), num_key_value_heads=2, **odd)
    with pytest.raises(
        TrainingError, match=r"inputs of layers \(2, 3, 4\)|config\.json"
    ):
        imported(folder, "eagle3", tmp_path / "ours")


def begun(folder: Path) -> None:
    """Begin a run with an EAGLE-3 of as many tokens."""
    Initial.read(folder, "eagle3").into(
        synthetic.build("eagle3", draft_vocab=len(CHOSEN)), "eagle3"
    )


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, ("it-ran",)


def test_a_pickle_that_runs_code_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "theirs", Eagle())
    torch.save({"fc.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(TrainingError, match="tensors alone") as refused:
        imported(folder, "eagle2", tmp_path / "ours")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "it-ran").exists()


EXPANDED = torch.ones(1).expand(10**6, 10**6)  # 4 TB
STRANGE: dict[str, Any] = {
    "text": b"version https://git-lfs.github.com/spec/v1",
    "a short pickle": b"\x80\x02.",
    "a shorter one": b"\x80\x02}q",
    "memory of a pickle": b"\x80\x02h\x05.",
    "nothing": b"",
    "keys": {1: torch.ones(2)},
    "a sparse tensor": {"fc.bias": torch.ones(WIDTH).to_sparse()},
    "an expanded tensor": {"embed_tokens.weight": EXPANDED},
    "no storage": {"fc.bias": torch.ones(WIDTH, device="meta")},
    "a scalar": {"lm_head.weight": torch.ones(())},
    "a scalar bias": {"fc.bias": torch.ones(())},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", STRANGE)
def test_a_file_that_is_no_state_dict_is_refused_in_one_line(
    case: str, tmp_path: Path
) -> None:
    folder, content = write(tmp_path / "theirs", Eagle()), STRANGE[case]
    file = folder / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save({**torch.load(file, weights_only=True), **content}, file)
    for name in ("eagle2", "eagle3"):
        with pytest.raises(TrainingError) as refused:
            imported(folder, name, tmp_path / "ours")
        assert "\n" not in str(refused.value)
        assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    "odd",
    [
        {"rope_theta": "x"},
        {"rope_theta": None},
        {"rope_theta": math.inf},
        {"rope_parameters": {"rope_theta": "x"}},
        {"rope_parameters": {"rope_theta": None}},
        {"rms_norm_eps": -1.0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 1000},
        {"num_key_value_heads": 3},
        {"head_dim": 3},
        {"intermediate_size": 10**12},
    ],
    ids=str,
)
def test_a_configuration_of_no_layer_is_refused_in_one_line(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path / "theirs", Eagle(), **odd)
    with pytest.raises(TrainingError, match=r"config\.json"):
        imported(folder, "eagle2", tmp_path / "ours")


def test_a_configuration_that_is_a_pipe_blocks_no_command(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", Eagle())
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert not published.is_published(folder)
    for act in (
        lambda: imported(folder, "eagle2", tmp_path / "ours"),
        lambda: describe(folder),
    ):
        with pytest.raises(TrainingError, match=r"config\.json .*no regular file"):
            act()


def test_a_run_begins_with_a_published_checkpoint(tmp_path: Path) -> None:
    """Ours has a layer of the target's shape: what fits is taken, biases that are not there are zero."""
    folder = write(tmp_path / "theirs", Eagle(bias=False), intermediate_size=40)
    found = Initial.read(folder, "vispec")
    info = msgspec.structs.replace(found.info(INFO), intermediate_size=40)
    drafter = type(synthetic.build("vispec"))(
        catalogue.config("vispec").model, info, synthetic.head()
    )
    taken = found.into(drafter, "vispec")
    assert info.rope_theta == 500.0
    assert "block.layer.down_proj.weight" in taken.taken
    assert sorted(taken.zero) == ["block.fc.bias", "block.layer.qkv_proj.bias"]
    assert {name.partition(".")[0] for name in taken.fresh} == {"adaptor", "img_fc"}
    assert not taken.unused
    other = write(tmp_path / "eagle3", Eagle3(2, CHOSEN), num_key_value_heads=2)
    with pytest.raises(TrainingError, match="fits eagle2"):
        Initial.read(other, "eagle2").into(synthetic.build("eagle2"), "eagle2")
    lost = Initial.read(write(tmp_path / "vispec", Vispec(2)), "msd").into(
        synthetic.build("msd"), "msd"
    )
    assert "imadpt.q" in lost.unused
