"""ViSpec: what its adaptor sees, where its compressed tokens stand, and the published sizes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.drafters.sizes import real
from tests.drafters.synthetic import INFO, LAYOUTS, batch, built, head, plain_layer
from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.batch import Batch, Head, TokenIndex
from vlmdistill.drafters.core.compressors import QueryCompressor
from vlmdistill.drafters.core.kv_cache import PackedKVCache
from vlmdistill.drafters.core.settings import override
from vlmdistill.drafters.core.tree import Tree
from vlmdistill.drafters.vispec import ViSpec
from vlmdistill.stores.errors import DataError
from vlmdistill.stores.schema import Feature

VISUAL = Feature("embed", "visual")
TWO_IMAGES = "tvvtrrvvvtrrr"


def build(**settings: object) -> ViSpec:
    drafter = built(ViSpec, **settings)
    if drafter.img_fc is not None:  # as after some training: an identity would hide g
        nn.init.normal_(drafter.img_fc.weight, std=0.2)
    return drafter


def sample(*layouts: str) -> Batch:
    return batch(layouts, ViSpec.Config().needs(INFO))


def states(drafter: ViSpec, one: Batch) -> tuple[Tensor, Tensor]:
    """The state of every entry, and the expanded position of its token."""
    cache = PackedKVCache()
    drafter.condition(one, cache)
    entries, token_E = drafter.entries(one)
    return drafter.step(entries, cache), one.position_T[token_E]


@pytest.mark.parametrize("hop", [0, 2])
def test_g_is_that_of_the_last_image_and_zero_before_the_first(hop: int) -> None:
    """At every hop: the drafter's own states meet g as the target's do."""
    drafter, one = build(), sample(TWO_IMAGES)
    cache = PackedKVCache()
    drafter.condition(one, cache)
    assert drafter.img_fc is not None
    inputs: list[Tensor] = []
    drafter.img_fc.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0])
    )
    entries, token_E = drafter.entries(one)
    for done in range(hop + 1):
        entries = replace(entries, hidden_ND=drafter.step(entries, cache), hop=done + 1)
    expected = {3: 0, 4: 0, 5: 0, 9: 1, 10: 1, 11: 1, 12: 1}
    assert sorted(expected) == one.position_T[token_E].tolist()
    torch.testing.assert_close(
        inputs[hop][:, INFO.hidden_size :],
        cache.context["joined"][[*expected.values()]],
    )
    prefix, cache = sample("ttrrvvvtrr"), PackedKVCache()
    drafter.condition(prefix, cache)
    drafter.step(drafter.entries(prefix)[0], cache)
    assert inputs[-1][:3, INFO.hidden_size :].eq(0).all()
    assert inputs[-1][3:, INFO.hidden_size :].ne(0).all()


def test_each_image_is_compressed_by_itself() -> None:
    torch.manual_seed(0)
    adaptor = QueryCompressor(INFO, 3)
    packed = batch(LAYOUTS.values(), [VISUAL])
    span_U, spans = packed.visual_tokens.span_N, len(packed.start_M)
    embed_UD = packed.feature("embed", "visual")
    out_MQD = adaptor(embed_UD, span_U, spans)
    assert spans == 6
    for span in range(spans):
        torch.testing.assert_close(
            out_MQD[span], naive(adaptor, embed_UD[span_U == span])
        )
        other_UD = torch.where(
            (span_U == span)[:, None], embed_UD, torch.randn_like(embed_UD)
        )
        assert torch.equal(adaptor(other_UD, span_U, spans)[span], out_MQD[span])
        own_UD = torch.where((span_U == span)[:, None], embed_UD + 1, embed_UD)
        changed_M = (adaptor(own_UD, span_U, spans) != out_MQD).flatten(1).any(1)
        assert changed_M.tolist() == [one == span for one in range(spans)]


def naive(adaptor: QueryCompressor, embed_UD: Tensor) -> Tensor:
    """One image, one head at a time: softmax(q k / sqrt(d)) v, then the output projection."""
    heads, width = adaptor.heads, adaptor.head_dim
    kv_UX = embed_UD @ adaptor.kv_proj.weight.T + adaptor.kv_proj.bias
    mixed = []
    for one in range(heads):
        key_Ud = kv_UX[:, one * width : (one + 1) * width]
        value_Ud = kv_UX[:, (heads + one) * width : (heads + one + 1) * width]
        weight_QU = (adaptor.query_QHd[:, one] @ key_Ud.T / math.sqrt(width)).softmax(
            -1
        )
        mixed.append(weight_QU @ value_Ud)
    return torch.cat(mixed, dim=-1) @ adaptor.o_proj.weight.T


def test_without_an_image_the_adaptor_is_still_part_of_the_gradient() -> None:
    """Ranks must reduce the same parameters, whatever samples each has."""
    drafter = build()
    state_ED, _ = states(drafter, sample("ttrrr"))
    for grad in torch.autograd.grad(state_ED.sum(), [*drafter.adaptor.parameters()]):
        assert grad.eq(0).all()


@pytest.mark.parametrize(
    ("num_q", "order"), [(2, [2, 8]), (3, [1, 2, 7, 8]), (5, [1, 1, 1, 2, 6, 6, 7, 8])]
)
def test_compressed_tokens_stand_at_the_last_places_of_their_span(
    num_q: int, order: list[int]
) -> None:
    drafter, cache = build(num_q=num_q), PackedKVCache()
    seen = []

    def spy(x_ND: Tensor, rotary_N: Tensor, tokens: TokenIndex, cache: object) -> None:
        seen.append((x_ND, rotary_N, tokens))

    drafter.block.layer.write_kv = spy  # type: ignore[method-assign, assignment]
    drafter.condition(sample(TWO_IMAGES), cache)
    ((x_XD, rotary_X, tokens),) = seen
    assert len(x_XD) == len(order)
    assert tokens.position_N.tolist() == order
    # As of every entry, the rotary position is that of the state before it.
    assert rotary_X.tolist() == [place - 1 for place in order]
    assert cache.context["joined"].shape == (2, INFO.hidden_size)


def test_img_fc_starts_as_the_identity() -> None:
    drafter = ViSpec(ViSpec.Config(), INFO, head())
    assert drafter.img_fc is not None
    hidden, glance = torch.randn(5, INFO.hidden_size), torch.randn(5, INFO.hidden_size)
    torch.testing.assert_close(
        drafter.img_fc(torch.cat([hidden, glance], dim=-1)), hidden
    )


@pytest.mark.parametrize("layout", ["trvvrrvvvvtrrrr", "vvvtrr", "ttrrr"])
def test_every_state_is_that_of_a_sequence_with_its_images_replaced(
    layout: str,
) -> None:
    """Against a plain causal layer over [text ; compressed ; text ...], made token by token."""
    drafter, one = build(num_q=3), sample(layout)
    assert drafter.img_fc is not None
    states_ED, position_E = states(drafter, one)
    flow: list[Tensor] = []  # hidden states by expanded position
    text, visual = iter(one.features[Feature("hidden", "text")]), one.features[VISUAL]
    ends = dict(
        zip(
            (one.start_M + one.length_M - 1).tolist(),
            one.features[Feature("hidden", "span")],
            strict=True,
        )
    )
    zero = torch.zeros(INFO.hidden_size)
    for place, kind in enumerate(layout):
        flow.append(next(text) if kind != "v" else ends.get(place, zero))
    rows, positions, glance, taken, ids = [], [], zero, 0, iter(one.ids_T)
    wanted = []
    for place, kind in enumerate(layout):
        if kind == "v":
            if place in ends:
                length = place + 1 - len(layout[: place + 1].rstrip("v"))
                image = naive(drafter.adaptor, visual[taken : taken + length])
                rows += [image[0], image[1]]
                positions += [place - 2, place - 1]
                glance, taken = image[2], taken + length
            continue
        embed = drafter.embed_VD[next(ids)]
        if place:
            augmented = drafter.img_fc(torch.cat([flow[place - 1], glance]))
            wanted.append(len(rows))
            rows.append(drafter.block.fc(torch.cat([embed, augmented])))
            positions.append(place - 1)
    expected = plain_layer(
        drafter.block.layer, torch.stack(rows), torch.tensor(positions)
    )[wanted]
    assert [
        place for place, kind in enumerate(layout) if kind != "v" and place
    ] == position_E.tolist()
    torch.testing.assert_close(states_ED, expected, rtol=1e-4, atol=1e-5)


def test_settings_reach_the_loss_of_the_paper_and_wrong_ones_are_named() -> None:
    paper = catalogue.config("vispec")
    config = override(
        paper, ['stages.multimodal.losses={"cross_entropy":1}', "mtp=false"]
    )
    assert config.schedule[1].losses == {"cross_entropy": 1}
    assert [stage.hops for stage in config.schedule] == [1, 1]
    assert [stage.hops for stage in catalogue.config("vispec").schedule] == [1, 2]
    assert ViSpec.tree == Tree.parse("30-3-8")
    with pytest.raises(DataError, match="num_q=0"):
        override(catalogue.config("vispec"), ["num_q=0"])
    with pytest.raises(DataError, match="at least 2"):
        ViSpec.Config(num_q=1, injection=False)


TABLE_4 = {
    "LLaVA-1.6 7B": (367, 451),
    "LLaVA-1.6 13B": (534, 665),
    "Qwen2.5-VL 3B": (404, 425),
    "Qwen2.5-VL 7B": (826, 890),
}


@pytest.mark.parametrize("target", TABLE_4)
def test_sizes_are_those_of_table_4(target: str) -> None:
    """Millions of parameters, the frozen embedding included: EAGLE-2's drafter, and with the adaptor."""
    info, sizes = real(target), []
    for name in ("eagle2", "vispec"):
        kind = catalogue.load(name)
        with torch.device("meta"):
            table_VD = torch.empty(info.vocab_size, info.hidden_size)
            drafter = kind(kind.Config(), info, Head(table_VD, table_VD))
        sizes.append(
            round(
                (sum(one.numel() for one in drafter.parameters()) + table_VD.numel())
                / 1e6
            )
        )
    assert tuple(sizes) == TABLE_4[target]
