"""An exported drafter, fed as vLLM feeds it in steps of any size, drafts what it drafts in our decoder."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.drafters import synthetic
from tests.drafters.synthetic import INFO, LAYOUTS
from tests.vllm_media import Image, Place
from vlmdistill.drafters.checkpoints.export import export
from vlmdistill.drafters.core.batch import Batch, Head
from vlmdistill.drafters.core.drafter import Drafter
from vlmdistill.drafters.core.eagle_drafter import EagleDrafter
from vlmdistill.drafters.core.layers import layer_names
from vlmdistill.drafters.core.serving import KEY, Feeding
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.pipelines.vllm.plugin.entry_map import EntryMap
from vlmdistill.pipelines.vllm.plugin.feeder import Feeder, Reading
from vlmdistill.pipelines.vllm.plugin.layer_input import LayerInput
from vlmdistill.pipelines.vllm.plugin.limits import drafter_of

SERVED = [
    ("eagle2", {}),
    ("hass", {"kv_heads": "target"}),
    ("msd", {}),
    ("msd", {"input_norm": True}),
    ("msd_vata", {}),
    ("sparrow", {}),
    ("sparrow", {"positions": "compact"}),
    ("text_only", {}),
    ("hivis", {}),
    ("hivis", {"threshold": 1, "last_visual": True}),
    ("eaglevlm", {"compressor": "prune", "ratio": 2}),
    ("eaglevlm", {"compressor": "pool", "ratio": 3}),
    ("eaglevlm", {"compressor": "convolve"}),
    ("eaglevlm", {"compressor": "resample"}),
    ("eaglevlm", {"compressor": "none"}),
    ("vispec", {}),
    ("vispec", {"num_q": 3}),
    ("vispec", {"num_q": 1}),
    ("vispec", {"injection": False}),
    ("specflash", {"ratio": 2}),
    ("specflash", {"queries": 0}),
    ("specflash", {"queries": 1}),
    ("specflash", {"compress": False}),
    ("specflash", {"group": 1, "ratio": 2}),
]

NORM = {"layer.input_layernorm": "block.layer.input_norm"}


class Served:
    """What the plugin computes from a folder, in float64, with a KV cache of numbered slots."""

    def __init__(self, folder: Path, head: Head) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.drafter = drafter_of(msgspec.convert(config[KEY], Feeding)).double()
        self.block, self.head = self.drafter.block, head
        weights = load_file(folder / "model.safetensors")
        own = {
            key.removeprefix("drafter."): one
            for key, one in weights.items()
            if "drafter." in key
        }
        for llama, ours in {**layer_names("layer", "block.layer"), **NORM}.items():
            name = ours.partition("/")[0]
            for kind in ("weight", "bias"):
                if (one := weights.get(f"{llama}.{kind}")) is not None:
                    key = f"{name}.{kind}"
                    own[key] = torch.cat([own[key], one]) if key in own else one
        self.drafter.load_state_dict(own)
        heads, width = self.block.layer.kv_heads, self.block.layer.head_dim
        self.input = LayerInput(self.drafter, 64, INFO.max_position).double()
        self.key_SHd, self.value_SHd = torch.zeros(
            2, 64, heads, width, dtype=torch.double
        )

    def run(
        self, embed_ND: Tensor, state_ND: Tensor, position_N: Tensor, slot_N: Tensor
    ) -> Tensor:
        layer = self.block.layer
        position_N, x_ND = self.input.entries(position_N, state_ND, embed_ND)
        query_NHd, self.key_SHd[slot_N], self.value_SHd[slot_N] = layer.qkv(
            x_ND, position_N
        )
        seen_NS = torch.arange(len(self.key_SHd)) <= slot_N[:, None]
        mixed_1HNd = F.scaled_dot_product_attention(
            query_NHd.transpose(0, 1)[None],
            self.key_SHd.transpose(0, 1)[None],
            self.value_SHd.transpose(0, 1)[None],
            attn_mask=seen_NS,
            enable_gqa=True,
        )
        return layer.finish(x_ND, mixed_1HNd[0].transpose(0, 1))

    def draft(
        self,
        visual_P: Tensor,
        embed_LD: Tensor,
        state_PD: Tensor,
        size: int,
        length: int,
    ) -> list[Tensor]:
        """The logits of each step of a greedy chain after a prompt that is read `size` entries at a time.

        Entry t has the embedding of token t + 1; the last one is the first token of the response.
        """
        drafter, feeder = self.drafter, Feeder(self.drafter, torch.device("cpu"))
        edges = torch.diff(F.pad(visual_P.int(), (1, 1))).nonzero()[:, 0].tolist()
        images, prompt = list(zip(edges[::2], edges[1::2], strict=True)), len(visual_P)
        embeds = {str(start): embed_LD[start:end] for start, end in images}
        features = [
            Image(str(start), Place(start, end - start)) for start, end in images
        ]
        for first in range(0, prompt, size):
            rows = slice(first, min(first + size, prompt))
            slot_K = torch.arange(prompt)[rows]
            embed_KD, state_KD = embed_LD[1:][rows].clone(), state_PD[rows].clone()
            shift_K = guess_shift_1 = None
            if drafter.visual == "raw":
                self.input.mark_raw(F.pad(visual_P[1:], (0, 1))[rows])
            if drafter.visual == "dropped":
                read = Reading(
                    names=["one"],
                    media={"one": features},
                    prompt_B=np.array([prompt]),
                    first_B=np.array([first]),
                    starts=[0, len(slot_K)],
                    alive={"one"},
                )
                feed = feeder.feed(read, slot_K, state_KD, self.input, embeds)
                if feed is not None:
                    slot_K, state_KD = feed.index_K, feed.hidden_KD
                    shift_K, guess_shift_1 = feed.shift_K, feed.guess_shift_B
                    if feed.kept is not None:
                        embed_KD = embed_KD[feed.kept.kept_K]
            self.input.guess_1.zero_()
            self.input.shift(shift_K)
            out_KD = self.run(embed_KD, state_KD, slot_K, slot_K)
        slot_1, state_1D, scores = slot_K[-1:], out_KD[-1:], list[Tensor]()
        self.input.shift(guess_shift_1)
        if drafter.joins:
            self.input.joined_ND[:1] = self.input.joined_ND[len(slot_K) - 1]
        for guess in range(1, length + 1):
            scores.append(F.linear(state_1D, self.head.lm_head_VD)[0])
            embed_1D = self.head.embed_VD[scores[-1].argmax()][None]
            slot_1 = slot_1 + 1
            self.input.guess_1.fill_(guess)
            state_1D = self.run(embed_1D, state_1D, slot_1, slot_1)
        return scores


def ours(drafter: Drafter, one: Batch, length: int) -> list[Tensor]:
    """The logits of our own chain after all tokens but the last."""
    scores: list[Tensor] = []
    logits = drafter.logits

    def record(*args: Any) -> Tensor:
        scores.append(logits(*args)[-1])
        return scores[-1][None]

    drafter.logits = record  # type: ignore[method-assign, assignment]
    synthetic.begun(drafter, one, len(one.ids_T) - 1).grow(
        Tree.parse(f"chain-{length}")
    )
    return scores


@torch.inference_mode()
@pytest.mark.parametrize(
    "layout", ["no image", "one image", "several images", "starts with an image"]
)
@pytest.mark.parametrize(("name", "settings"), SERVED, ids=lambda value: str(value))
def test_an_exported_drafter_drafts_what_it_drafts_here(
    name: str, settings: dict[str, object], layout: str, tmp_path: Path
) -> None:
    if name == "msd" and layout == "starts with an image":
        pytest.skip(
            "our decoder has an entry for a visual token with no token before it, and vLLM has none"
        )
    drafter = synthetic.build(name, **settings).eval()
    for parameter in drafter.parameters():
        nn.init.normal_(
            parameter, std=0.25
        )  # with larger weights attention sees one entry alone
    export(synthetic.save(name, tmp_path / name, drafter), tmp_path / "out", "float32")
    drafter.double()  # random weights blow rounding up from guess to guess

    letters = {**LAYOUTS, "starts with an image": "vvvvtttrrrr"}[layout]
    features = drafter.config.needs(INFO, decoding=True) | synthetic.build(
        "eagle2"
    ).config.needs(INFO)
    one = synthetic.batch([letters], features).to("cpu", torch.double)
    embed_ND = synthetic.in_order(
        one, drafter.embed_VD[one.ids_T], one.feature("embed", "visual")
    )
    state_ND = synthetic.states(one, "hidden")
    visual_N = torch.tensor([letter == "v" for letter in letters])

    expected = ours(drafter, one, 4)
    for size in (64, 5, 3, 1):
        served = Served(tmp_path / "out", Head(drafter.embed_VD, drafter.lm_head_VD))
        if served.drafter.compresses == "hidden" and size < 64:
            continue
        found = served.draft(visual_N[:-1], embed_ND, state_ND[:-1], size, 4)
        torch.testing.assert_close([row.float() for row in found], expected)


def test_a_step_of_visual_tokens_alone_keeps_one_row_and_its_slot_is_used_again() -> (
    None
):
    sparrow = synthetic.build("sparrow")
    assert isinstance(sparrow, EagleDrafter)
    entries = EntryMap.of(np.array([False, True, True, True, True, False]), sparrow)
    first, second = entries.step(0, 2), entries.step(2, 4)
    assert first.kept_N.tolist() == [False, True]
    assert (1 - first.dropped_N[1], first.dropped) == (0, 1)
    assert second.kept_N.tolist() == [False, False, True, True]
    assert (4 - second.dropped_N[2], second.dropped) == (0, 4)
