"""SpecFLASH -- SpecFLASH: A Latent-Guided Semi-autoregressive Speculative Decoding Framework for Efficient
Multimodal Generation, 2025.

Idea: the states of visual tokens say little that is new each, so learnable queries compress them (section
3.2); what an image shows comes in short phrases that can be foreseen, so one pass guesses several tokens from
placeholders at the places ahead (section 3.3).
Differs from EAGLE by: compressed visual states, and `group` tokens a pass in the place of one.
Its ablations are switches: `group=1` is the paper's VisComp, `compress=false` its SemiAR.
Follows the paper and not the released code: its first release cannot run (it makes the tokens of a group by
an MLP on one state), and a later one refines each place by guessed tokens, which the paper does not.
Departs from both in: at any temperature the drafter's best guesses are verified; the paper samples them.
Where the paper is silent: a placeholder is one learnable vector, at the rotary position of its place, that
sees its entry's prefix and the placeholders before it; scores of the compressor are divided by sqrt(D);
compressed tokens stand evenly spaced in their span and enter unfused, one for every `ratio` visual tokens
(576 to 64 and 324 to 36 are both 9 to 1); the losses of all places of a group count alike. Every response
position is an anchor; a group of G tokens has G - 1 placeholders, the entry itself giving the first. The
states that a pass makes are the input of the next group, as in appendix E.

Shapes: E entries, R rows, G tokens of a group, U visual tokens, M spans, C queries, X = M * C, D hidden.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vlmdistill.drafters.base import Batch, Drafter, DrafterConfig, Entries, Head, Stage, Tree, at_least
from vlmdistill.drafters.layers import layer_like
from vlmdistill.drafters.losses import Rows, Score, score
from vlmdistill.drafters.memory import Memory, Places
from vlmdistill.stores.schema import Feature, TargetInfo


class SpecFlash(Drafter):
    """One decoder layer over text entries and compressed visual states, several tokens a pass."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DrafterConfig):
        """Defaults: sections 3 and 4, appendix E; losses, rate and epochs of the released code."""

        compress: bool = True
        """Compress visual states (section 3.2); off: visual tokens are entries, as for EAGLE-2."""
        queries: int = 64
        """The most compressed tokens of an image (C of appendix C)."""
        ratio: int = 9
        """Visual tokens for each compressed one (N / C of appendix C)."""
        group: int = 4
        """Tokens guessed in one pass (section 3.3); 1 is autoregressive."""
        passes: int = 1
        """Passes trained, and the most that draft: a draft has up to `group * passes` tokens."""
        tree: Tree = Tree(5, 3, 1)
        stages: tuple[Stage, ...] = (Stage(name="multimodal", epochs=20, visual=(1, 1), learning_rate=3e-5),)

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, 1, "queries", "ratio", "group", "passes")

        @property
        def schedule(self) -> tuple[Stage, ...]:
            """The stages, each training every token that is drafted."""
            return tuple(replace(stage, hops=self.group * self.passes) for stage in self.stages)

    config: Config

    @classmethod
    def needs(cls, config: DrafterConfig, info: TargetInfo, *, decoding: bool = False) -> frozenset[Feature]:
        """States everywhere; without compression the visual embeddings too."""
        assert isinstance(config, cls.Config)
        states = frozenset({Feature("hidden", "text"), Feature("hidden", "visual")})
        return states if config.compress else states | {Feature("embed", "visual")}

    def __init__(self, config: Config, info: TargetInfo, head: Head) -> None:
        super().__init__(config, info, head)
        width = info.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.layer = layer_like(info, kv_heads=config.kv_heads)
        self.query_CD = nn.Parameter(torch.randn(config.queries if config.compress else 0, width))
        self.placeholder_D = nn.Parameter(torch.randn(width) * width**-0.5)
        # One token a pass is an ordinary drafter: it can go on for ever.
        self.max_hops = config.group * config.passes if config.group > 1 else None

    def condition(self, batch: Batch, memory: Memory) -> None:
        """Section 3.2: F_c = softmax(Q F_v^T) F_v of each span, at places spread over it."""
        places, hidden_UD = batch.visual_places, batch.feature("hidden", "visual")
        if not self.config.compress:
            before_ND, found_N = batch.before("hidden")
            text = len(batch.ids_T)
            x_UD = self.fc(torch.cat([batch.feature("embed", "visual"), before_ND[text:]], dim=-1))
            seen_U = found_N[text:]
            self.layer.remember(x_UD[seen_U], places.order_N[seen_U] - 1, places.only(seen_U), memory)
            return
        spans, queries = len(batch.start_M), len(self.query_CD)
        span_X = torch.arange(spans, device=hidden_UD.device).repeat_interleave(queries)
        query_X = torch.arange(queries, device=hidden_UD.device).repeat(spans)
        length_X = batch.length_M[span_X]
        count_X = ((length_X - 1) // self.config.ratio + 1).clamp(max=queries)
        used_X = query_X < count_X
        span_X, query_X, length_X, count_X = (x[used_X] for x in (span_X, query_X, length_X, count_X))
        compressed_1XD = nn.functional.scaled_dot_product_attention(
            self.query_CD[query_X][None],
            hidden_UD[None],
            hidden_UD[None],
            attn_mask=span_X[:, None] == places.span_N,
        )
        order_X = batch.start_M[span_X] + (2 * query_X + 1) * length_X // (2 * count_X)
        self.layer.remember(
            compressed_1XD[0], order_X - 1, Places(batch.segment_M[span_X], order_X, span_X), memory
        )

    def step(self, entries: Entries, memory: Memory) -> Tensor:
        """Section 3.3: one pass makes the states of a group, [R, G * D]; the hops within it hand them on."""
        group, places = self.config.group, entries.places
        last = group * (self.config.passes - 1)  # the hop of the last pass
        starts = entries.hop % group == 0
        if starts or entries.hop < last:
            hidden_ND = entries.hidden_ND
            if entries.hop:
                hidden_ND = self.of_group(hidden_ND, entries.hop - 1)
            embed_ND = nn.functional.embedding(entries.ids_N, self.embed_VD)
            x_ND = self.fc(torch.cat([embed_ND, hidden_ND], dim=-1))
            if starts:
                group_XD = self.placeholder_D.expand(group - 1, -1)
                return self.layer.ahead(
                    x_ND, group_XD, entries.position_N, places, memory, entries.hop
                ).flatten(1)
            self.layer.remember(x_ND, entries.position_N, places, memory, entries.hop)
        return entries.hidden_ND if places.rows_R is None else entries.hidden_ND[places.rows_R]

    def of_group(self, state_NX: Tensor, hop: int) -> Tensor:
        """The state [N, D] of a hop among those of its group, [N, G * D]."""
        width = self.info.hidden_size
        first = hop % self.config.group * width
        return state_NX[:, first : first + width]

    def logits(self, state_ND: Tensor, hop: int = 0) -> Tensor:
        """The target's LM head on the hop's place of its group."""
        return super().logits(self.of_group(state_ND, hop))

    def loss(self, rows: Rows, stage: Stage) -> Score:
        """The stage's losses of the hop's place of its group."""
        made = replace(rows, state_RD=self.of_group(rows.state_RD, rows.hop))
        return score(
            made,
            super().logits,
            self.lm_head_VD,
            stage.losses,
            keep_top=stage.keep_top,
            keep_failing=stage.keep_failing,
        )
