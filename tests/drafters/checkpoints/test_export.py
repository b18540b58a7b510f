"""What is exported drafts the same in stock transformers modules, loaded by its published names."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, LAYOUTS
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.core.vocabulary import DraftVocabulary
from vlmdistill.stores.errors import TrainingError


class Engine(nn.Module):
    """A serving engine's EAGLE-3: each entry is the next token's embedding beside the fused states."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = transformers.AutoConfig.from_pretrained(
            folder, attn_implementation="sdpa"
        )
        width, count = config.hidden_size, config.num_aux_hidden_states
        self.fc = nn.Linear(count * config.target_hidden_size, width, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            heads = getattr(self.midlayer.self_attn, name).out_features
            setattr(
                self.midlayer.self_attn, name, nn.Linear(2 * width, heads, bias=False)
            )
        self.midlayer.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        weights = load_file(folder / "model.safetensors")
        spoken = config.draft_vocab_size < config.vocab_size
        self.d2t = (
            weights.pop("d2t")
            if spoken
            else torch.zeros(config.vocab_size, dtype=torch.long)
        )
        self.t2d = (
            weights.pop("t2d")
            if spoken
            else torch.ones(config.vocab_size, dtype=torch.bool)
        )
        self.load_state_dict(weights)

    def forward(self, embed_ND: Tensor, hidden_ND: Tensor) -> Tensor:
        layer = self.midlayer
        x_1ND = torch.cat(
            [layer.input_layernorm(embed_ND), layer.hidden_norm(hidden_ND)], -1
        )[None]
        turned = self.rotary(x_1ND, torch.arange(len(embed_ND))[None])
        mixed_1ND, _ = layer.self_attn(
            x_1ND, position_embeddings=turned, attention_mask=None
        )
        state_ND = hidden_ND + mixed_1ND[0]
        moved_ND: Tensor = state_ND + layer.mlp(
            layer.post_attention_layernorm(state_ND)
        )
        return moved_ND

    def chain(
        self, embed_ND: Tensor, state_NX: Tensor, table_VD: Tensor, length: int
    ) -> list[Tensor]:
        """The logits of each step of a greedy chain after these tokens and the states before them."""
        hidden_ND, facts = self.fc(state_NX), list[Tensor]()
        for _ in range(length):
            state_1D = self(embed_ND, hidden_ND)[-1:]
            facts.append(self.lm_head(self.norm(state_1D))[0])
            token = facts[-1].argmax()
            token = token + self.d2t[token]
            assert self.t2d[token]
            embed_ND = torch.cat([embed_ND, table_VD[token][None]])
            hidden_ND = torch.cat([hidden_ND, state_1D])
        return facts


def saved(
    folder: Path, name: str = "eagle3", **settings: object
) -> tuple[Path, Drafter]:
    drafter = synthetic.build(name, **settings).eval()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.4)
    if isinstance(drafter, DraftVocabulary):
        generator = torch.Generator().manual_seed(1)
        drafter.choose_vocabulary(
            torch.randint(0, 9, (INFO.vocab_size,), generator=generator)
        )
    return synthetic.save(name, folder, drafter), drafter


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["no image", "one image", "several images"])
@pytest.mark.parametrize("draft_vocab", [9, 32000])
@pytest.mark.parametrize("kv_heads", ["target", "all"])
def test_an_engine_drafts_what_the_drafter_drafts(
    tmp_path: Path, layout: str, draft_vocab: int, kv_heads: str
) -> None:
    folder, drafter = saved(
        tmp_path / "eagle3", draft_vocab=draft_vocab, kv_heads=kv_heads
    )
    export(folder, tmp_path / "out", "float32")
    engine = Engine(tmp_path / "out")

    one = synthetic.batch([LAYOUTS[layout]], drafter.config.needs(INFO))
    embed_ND = synthetic.in_order(
        one, drafter.embed_VD[one.ids_T], one.feature("embed", "visual")
    )
    states_NS = synthetic.states(one, *drafter.sources)
    # Each state is paired with the token after it.
    expected = engine.chain(embed_ND[1:], states_NS[:-1], drafter.embed_VD, 4)

    facts: list[Tensor] = []
    logits = drafter.logits

    def record(*args: Any) -> Tensor:
        facts.append(logits(*args))
        return facts[-1]

    drafter.logits = record  # type: ignore[method-assign, assignment]
    synthetic.begun(drafter, one, len(one.ids_T) - 1).grow(Tree.parse("chain-4"))
    torch.testing.assert_close([row[-1] for row in facts], expected)


def test_engines_read_which_layers_to_capture_each_in_its_own_way(
    tmp_path: Path,
) -> None:
    folder, drafter = saved(tmp_path / "eagle3")
    export(folder, tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    entered = [int(source.removeprefix("layer")) for source in drafter.sources]
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.eagle_aux_hidden_state_layer_ids == entered
    left = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
    assert [layer + 1 for layer in left] == entered
    assert config.rope_parameters["rope_theta"] == INFO.rope_theta


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_in_the_format_asked_for_and_ids_stay_ids(
    tmp_path: Path, dtype: str
) -> None:
    folder, _ = saved(tmp_path / "eagle3", draft_vocab=9)
    export(folder, tmp_path / "out", dtype)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.pop("d2t").dtype == torch.int64
    assert weights.pop("t2d").sum() == 9
    assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{dtype}"}


def test_a_weight_that_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    drafter = synthetic.build("eagle3").eval()
    nn.init.constant_(drafter.get_parameter("fc.weight"), 1e5)
    folder = synthetic.save("eagle3", tmp_path / "eagle3", drafter)
    with pytest.raises(
        TrainingError,
        match=r"fc.weight holds values too large for float16: use bfloat16",
    ):
        export(folder, tmp_path / "out", "float16")
    export(folder, tmp_path / "out", "bfloat16")


@torch.inference_mode()
def test_another_name_of_a_dtype_is_told_its_own(tmp_path: Path) -> None:
    folder = synthetic.save("sparrow", tmp_path / "sparrow")
    with pytest.raises(TrainingError, match=r"'fp16' is not a dtype.*mean 'float16'"):
        export(folder, tmp_path / "served", dtype="fp16")


def test_an_engine_reads_heads_by_their_names(tmp_path: Path) -> None:
    folder, drafter = saved(tmp_path / "medusa", "medusa", heads=3)
    export(folder, tmp_path / "out", "float32")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    state_ND = torch.randn(5, INFO.hidden_size)
    for head in range(3):
        weight_DD, bias_D = (
            weights.pop(f"blocks.{head}.layers.0.{name}") for name in ("weight", "bias")
        )
        moved_ND = state_ND + nn.functional.silu(
            nn.functional.linear(state_ND, weight_DD, bias_D)
        )
        torch.testing.assert_close(drafter.estimate(state_ND, head), moved_ND)
    assert not weights


def test_what_no_engine_serves_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "specflash", "specflash", passes=2)
    with pytest.raises(TrainingError, match=r"has passes=2, .* --set passes=1"):
        export(folder, tmp_path / "out")
    folder, _ = saved(tmp_path / "vispec", "vispec", positions="compact")
    with pytest.raises(
        TrainingError, match=r"has positions=compact, .* --set positions=expanded"
    ):
        export(folder, tmp_path / "out")
    folder, _ = saved(tmp_path / "sparrow", "sparrow", vata=False)
    with pytest.raises(TrainingError, match=r"has vata=False, .* --set vata=true"):
        export(folder, tmp_path / "out")
    folder, _ = saved(tmp_path / "hass", "hass", positions="target")
    with pytest.raises(
        TrainingError, match=r"has positions=target, .* --set positions=expanded"
    ):
        export(folder, tmp_path / "out")
    refused: dict[str, Any] = {
        "visual": "none",
        "positions": "target",
        "attention_window": 64,
    }
    for name, value in refused.items():
        folder, _ = saved(tmp_path / name, **{name: value})
        with pytest.raises(
            TrainingError, match=f"has {name}={value}, .* Train one with --set"
        ):
            export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "eagle3")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(TrainingError, match="exists: name a new folder"):
        export(folder, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    first = export(folder, tmp_path / "served")
    assert export(folder, tmp_path / "served") == first  # the same once more
    with pytest.raises(TrainingError, match="exists: name a new folder"):
        export(folder, tmp_path / "served", "float32")


@pytest.mark.parametrize(
    ("settings", "drafted"), [({"heads": 3}, 3), ({"heads": 7}, 4)]
)
def test_no_more_tokens_are_drafted_than_the_drafter_has_heads(
    settings: dict[str, int], drafted: int, tmp_path: Path
) -> None:
    folder, _ = saved(tmp_path / "medusa", "medusa", **settings)
    assert export(folder, tmp_path / "served", "float32").draft_tokens == drafted


@pytest.mark.parametrize(
    ("tree", "drafted"),
    [("chain-3", 3), ("chain-7", 7), ("30-3-8", 4), ("chain-8-0.2", 4), ("2-0-1", 1)],
)
def test_as_many_tokens_are_drafted_as_the_drafters_chain_has(
    tree: str, drafted: int, tmp_path: Path
) -> None:
    _, drafter = saved(tmp_path / "first")
    drafter.tree = Tree.parse(tree)
    folder = synthetic.save("eagle3", tmp_path / "eagle3", drafter)
    assert export(folder, tmp_path / "served", "float32").draft_tokens == drafted
