"""What six papers claim in their ablations, as data for `research.claims`.

A claim compares two settings of drafters at one length of the prompt. All settings are trained for the same
steps, tokens per step and learning rate, on the same store; steps are divided between stages in the ratio
of the paper's epochs. Only what the claim names differs. Papers print speedups with the prefill; on the
embedded targets the claims on speed are tested on the decoding alone, since the drafter changes nothing else.
"""

from dataclasses import dataclass, replace
from typing import Literal

from vlmdistill.pipelines.bench.statistics import Rate


@dataclass(frozen=True)
class Setting:
    """A drafter with settings as for `--set`, and the samples of the store that it is trained on."""

    drafter: str
    settings: tuple[str, ...] = ()
    where: str = ""  # an expression over the store's columns; empty: all samples

    def __str__(self) -> str:
        return " ".join(
            [
                self.drafter,
                *self.settings,
                *([f"on samples with {self.where}"] if self.where else []),
            ]
        )

    def but(self, *settings: str, where: str = "") -> "Setting":
        """The same with more settings."""
        return Setting(self.drafter, (*self.settings, *settings), where or self.where)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That `one` has a higher rate than `other`, or about the same."""

    name: str
    says: str
    source: str  # table or figure of the paper
    printed: str  # the paper's numbers, `one` against `other`
    one: Setting
    other: Setting
    rate: Rate = "tau"
    expects: Literal["more", "same"] = "more"
    margin: float = 0.1  # within which two rates are the same
    at: tuple[int, int] = (
        0,
        0,
    )  # visual tokens of the prompts of each side; 0: the held-out prompts
    ours: str = ""  # what `one` has and the paper has not, so that there is no verdict on the paper


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's claims, and those that are not tested."""

    title: str
    model: str  # the embedded target on which they are tested
    claims: tuple[Claim, ...]
    not_built: tuple[str, ...] = ()
    note: str = ""


IMAGES, TEXT, MIXED = (
    ("stages.*.visual=[1,1]",),
    ("stages.*.visual=[0,0]",),
    "stages.*.visual=[0.5,0.5]",
)

_msd = Setting("msd")
_decoupled = _msd.but(*IMAGES)
_coupled = Setting("eagle2", IMAGES)
_two_stage = Setting("eagle2", ("stages.multimodal.visual=[0.05,1]",))

MSD = Paper(
    title="MSD",
    model="demo-small",
    claims=(
        Claim(
            name="msd-decoupling",
            says="decoupled visual tokens, images alone",
            source="table 4",
            printed="3.88 / 3.43",
            one=_decoupled,
            other=_coupled,
        ),
        Claim(
            name="msd-decoupling-two-stage",
            says="decoupled visual tokens, both trained on text, then the mix",
            source="table 4",
            printed="4.43 / 4.17",
            one=_msd,
            other=_two_stage,
        ),
        Claim(
            name="msd-two-stage",
            says="text, then the mix; against images alone",
            source="table 4, figure 5",
            printed="4.43 / 3.88",
            one=_msd,
            other=_decoupled,
        ),
        Claim(
            name="msd-gradually",
            says="text, then the mix; against text, then images at once",
            source="figure 5",
            printed="higher; no number in the text",
            one=_msd,
            other=_msd.but("stages.multimodal.visual=[1,1]"),
        ),
        Claim(
            name="msd-images",
            says="a baseline trained on images; against one on text",
            source="table 2",
            printed="3.47 / 2.86",
            one=_coupled,
            other=_coupled.but(*TEXT),
        ),
        Claim(
            name="msd-speed",
            says="MSD against its baseline, speed",
            source="table 3, mean",
            printed="2.12 / 1.81",
            one=_msd,
            other=_coupled,
            rate="decode_speedup",
        ),
    ),
    not_built=(
        "Table 5, visual features against visual embeddings: `msd` has no switch for states at visual "
        "positions.",
        "Figure 5, two different sets of images: the embedded targets have one.",
    ),
)

_hivis = Setting("hivis")
_stage1 = _hivis.but("stages.stage2.epochs=0")
_fed = Setting(
    "eagle2",
    (
        "detach=true",
        MIXED,
        'stages.*.losses={"regression":1,"cross_entropy":0.1,"top_k":1}',
        "stages.0.epochs=40",
        "stages.1.epochs=20",
        "stages.1.hops=4",
        "stages.1.keep_top=5",
    ),
)

HIVIS = Paper(
    title="HiViS",
    model="demo-small",
    not_built=(
        "The section on results, the share of the input that is left to the drafter: nothing here prints it.",
    ),
    claims=(
        Claim(
            name="hivis-hiding",
            says="visual tokens hidden, not fed, all else equal",
            source="table 1, mean (its EAGLE-2 has another training)",
            printed="5.07 / 3.51",
            one=_hivis.but("threshold=0", "positions=expanded", "last_visual=true"),
            other=_fed,
        ),
        Claim(
            name="hivis-msd",
            says="HiViS against MSD, each as published",
            source="table 1, mean",
            printed="5.07 / 4.33",
            one=_hivis,
            other=_msd,
        ),
        Claim(
            name="hivis-stage2",
            says="both stages; against as many steps of stage 1",
            source="table 2",
            printed="5.20 / 4.84",
            one=_hivis,
            other=_stage1,
        ),
        Claim(
            name="hivis-sequential",
            says="sequential embeddings",
            source="eqs. 5-6",
            printed="no ablation",
            one=_hivis,
            other=_hivis.but("threshold=0"),
        ),
        Claim(
            name="hivis-filter",
            says="top-K filter of rows",
            source="eq. 7",
            printed="no ablation",
            one=_hivis,
            other=_hivis.but("stages.stage2.keep_top=0"),
        ),
        Claim(
            name="hivis-both-text",
            says="stage 1 on text and images; against text",
            source="table 3",
            printed="4.84 / 4.69",
            one=_stage1,
            other=_stage1.but(*TEXT),
        ),
        Claim(
            name="hivis-both-images",
            says="stage 1 on text and images; against images",
            source="table 3",
            printed="4.84 / 3.42",
            one=_stage1,
            other=_stage1.but(*IMAGES),
        ),
    ),
    note="The paper adds stage 2 after stage 1; here one stage has as many steps as two.",
)

_vispec = Setting("vispec")
_compressed = _vispec.but("mtp=false", "injection=false")
_plain = Setting(
    "eagle2",
    (
        'stages.text.losses={"regression":1,"cross_entropy":0.1,"list_mle":0.01}',
        'stages.multimodal.losses={"l1":10,"list_mle":0.1}',
    ),
)
_injected = _vispec.but("mtp=false")
LONG = 80  # words of a long response of the embedded targets

VISPEC = Paper(
    title="ViSpec",
    model="demo-video",
    note="Images have 9 visual tokens and videos 72, so 64 compressed tokens hardly compress.",
    claims=(
        Claim(
            name="vispec-adaptor",
            says="compressed visual tokens; against all, one hop",
            source="table 3, COCO",
            printed="2.04 / 1.24",
            one=_compressed,
            other=_plain,
        ),
        Claim(
            name="vispec-global",
            says="the global feature, one hop",
            source="table 3, COCO",
            printed="2.14 / 2.04",
            one=_injected,
            other=_compressed,
        ),
        Claim(
            name="vispec-long",
            says=f"trained on responses of over {LONG} words; against shorter ones",
            source="table 3, COCO",
            printed="3.30 / 2.14",
            one=_vispec.but(where=f"visual_tokens = 0 or words > {LONG}"),
            other=_vispec.but(where=f"visual_tokens = 0 or words <= {LONG}"),
        ),
        *(
            Claim(
                name=f"vispec-{count}",
                says=f"1 compressed token is as good as {count}",
                source="table 2, COCO",
                printed=f"3.30 / {tau}",
                one=_vispec,
                other=_vispec.but(f"num_q={count + 1}"),
                expects="same",
            )
            for count, tau in ((4, 3.24), (16, 3.23), (64, 3.25))
        ),
        Claim(
            name="vispec-64-speed",
            says="1 compressed token is faster than 64",
            source="table 2, COCO",
            printed="3.22 / 2.71",
            one=_vispec,
            other=_vispec.but("num_q=65"),
            rate="decode_speedup",
        ),
    ),
    not_built=(
        'Table 3\'s long responses are asked for ("at least 1000 words"), which the embedded targets do not '
        "understand: long and short ones of the same prompts are compared instead.",
        "Table 5, output length against speedup, compares data sets, not settings.",
    ),
)

_flash = Setting("specflash")
_viscomp, _semiar = Setting("viscomp"), Setting("semiar")
_neither = _viscomp.but("compress=false")
_no_image = _flash.but("queries=0")


def _tokens(count: int) -> Setting:
    """K of appendix D: tokens of a pass, and of a draft."""
    return _flash.but(f"group={count}", f"tree=chain-{count}")


SPECFLASH = Paper(
    title="SpecFLASH",
    model="demo-video",
    note="Some of the paper's numbers are missing in our copy of its text.",
    claims=(
        Claim(
            name="specflash-viscomp-tau",
            says="VisComp accepts as much as all visual tokens (Eagle-MM)",
            source="table 2, 4 delta + 1",
            printed="4.04 / 4.04",
            one=_viscomp,
            other=_neither,
            expects="same",
        ),
        Claim(
            name="specflash-viscomp",
            says="VisComp is faster than Eagle-MM",
            source="tables 1, 2",
            printed="faster",
            one=_viscomp,
            other=_neither,
            rate="decode_speedup",
        ),
        Claim(
            name="specflash-semiar",
            says="SemiAR is faster than Eagle-MM",
            source="tables 1, 2",
            printed="faster",
            one=_semiar,
            other=_neither,
            rate="decode_speedup",
        ),
        Claim(
            name="specflash-both",
            says="both are faster than SemiAR",
            source="table 7, C/N = 1",
            printed="2.55 / 2.49",
            one=_flash,
            other=_semiar,
            rate="decode_speedup",
        ),
        Claim(
            name="specflash-both-viscomp",
            says="both are faster than VisComp",
            source="tables 1, 2",
            printed="faster",
            one=_flash,
            other=_viscomp,
            rate="decode_speedup",
        ),
        *(
            Claim(
                name=f"specflash-k{count}",
                says=f"K = {more} is faster than {count}",
                source="figure 3",
                printed="faster",
                one=_tokens(more),
                other=_tokens(count),
                rate="decode_speedup",
            )
            for count, more in ((1, 2), (2, 4))
        ),
        Claim(
            name="specflash-k6",
            says="K = 6 is about as fast as 4",
            source="figure 3",
            printed="marginal benefits",
            one=_tokens(6),
            other=_tokens(4),
            rate="decode_speedup",
            expects="same",
        ),
        *(
            Claim(
                name=f"specflash-ratio{ratio}",
                says=f"1/9 of the visual tokens; against {label}",
                source="table 7",
                printed=f"2.55 / {speed}",
                one=_flash,
                other=other,
                rate="decode_speedup",
                expects="same" if ratio == 4 else "more",
            )
            for ratio, label, speed, other in (
                (4, "1/4", 2.51, _flash.but("ratio=4")),
                (16, "1/16", 2.33, _flash.but("ratio=16")),
                (0, "none", 1.92, _no_image),
            )
        ),
        Claim(
            name="specflash-no-image-tau",
            says="1/9 of the visual tokens; against none, acceptance",
            source="appendix C",
            printed="higher",
            one=_flash,
            other=_no_image,
        ),
    ),
    not_built=(
        "Tables 4 and 5, other compressions and other sizes of the drafter: no drafter has them.",
        "Table 6, quantised drafters: drafters are not quantised.",
        "Tables 1 and 2, columns of FLOPs: nothing here counts them.",
    ),
)

_rows = [
    Setting("sparrow", (f"mtp={mtp}", f"ivsb={ivsb}", f"vata={vata}"))
    for mtp, ivsb in (("false", "false"), ("true", "false"), ("true", "true"))
    for vata in ("false", "true")
]
# Table 6 of the paper, by visual tokens.
_printed = {
    500: (3.95, 3.95, 4.44, 4.45, 4.53, 4.51),
    1500: (3.87, 3.85, 4.31, 4.34, 4.38, 4.36),
    6000: (3.29, 3.83, 3.87, 4.24, 3.08, 4.29),
    17000: (2.97, 3.77, 3.58, 4.24, 1.91, 4.32),
    25000: (2.95, 3.86, 3.51, 4.29, 1.21, 4.37),
}
LENGTHS = tuple(_printed)
_unnormed = _rows[5].but("middle_norm=false")


def _row(
    kind: str, says: str, one: int, other: int, at: int, same: bool = False
) -> Claim:
    """A claim on two rows of table 6."""
    return Claim(
        name=f"sparrow-{kind}-{at}",
        says=f"{says}, {at:,} visual tokens",
        source=f"table 6, rows {one} and {other}",
        printed=f"{_printed[at][one - 1]} / {_printed[at][other - 1]}",
        one=_rows[one - 1],
        other=_rows[other - 1],
        expects="same" if same else "more",
        at=(at, at),
    )


def _normed(at: int) -> Claim:
    """IVSB as `sparrow` has it: with a norm that the paper does not name."""
    return replace(
        _row("ivsb", "IVSB, with MTP and VATA", 6, 4, at),
        ours="middle states are normed",
    )


def _as_printed(at: int) -> Claim:
    """IVSB as eq. 3 has it."""
    claim = _row("ivsb-unnormed", "IVSB without our norm, with MTP and VATA", 6, 4, at)
    return replace(claim, one=_unnormed)


SPARROW = Paper(
    title="Sparrow",
    model="demo-video",
    note="Four comparisons, repeated at five lengths with the same drafters and three clips, so their "
    "intervals are over seeds alone. All drafters were trained on images and on videos of 72 visual tokens.",
    claims=(
        *(_row("mtp", "MTP", 3, 1, at) for at in LENGTHS),
        *(_as_printed(at) for at in LENGTHS),
        *(_normed(at) for at in LENGTHS),
        *(_row("vata-alone", "VATA alone", 2, 1, at, same=at < 6000) for at in LENGTHS),
        *(
            _row("vata", "VATA, with MTP and IVSB", 6, 5, at, same=at < 6000)
            for at in LENGTHS
        ),
        Claim(
            name="sparrow-length",
            says="all three: as good at 25,000 visual tokens as at 500",
            source="table 6, row 6",
            printed="4.37 / 4.51",
            one=_rows[5],
            other=_rows[5],
            at=(25000, 500),
            expects="same",
            margin=0.15,
        ),
    ),
    not_built=(
        "Table 1, training on a share of the visual tokens, and figure 1b and table 7, drafting with one: "
        "`sparrow` has no switch for it.",
        "Figures 2, 3, 5 and 6, attention by kind of token, truncation by layer and cosines of retained "
        "states: nothing here measures them.",
    ),
)


def _left(compressor: str, *settings: str) -> Setting:
    """EagleVLM with a compressor, trained on images and text: on images alone all forget text."""
    return Setting("eaglevlm", (MIXED, f"compressor={compressor}", *settings))


ELASTIC = Paper(
    title="SpecVLM (EagleVLM)",
    model="demo-video",
    note="Images have 9 visual tokens and videos 72. Half of the samples have images.",
    claims=(
        *(
            Claim(
                name=f"eaglevlm-{name}",
                says=f"{says}; against all visual tokens",
                source=source,
                printed=printed,
                one=_left(name),
                other=_left("none"),
            )
            for name, says, source, printed in (
                (
                    "select",
                    "a gate selects a compressor",
                    "table 3, mean",
                    "3.69 / 3.53",
                ),
                ("weigh", "a gate weighs three", "table 3, mean", "3.71 / 3.53"),
                ("concat", "all four side by side", "table 3, mean", "3.67 / 3.53"),
                ("prune", "pruning, one of 20", "table 4", "3.40 / 3.29"),
                ("pool", "pooling, one of 20", "table 4", "3.40 / 3.29"),
                ("convolve", "convolution, one of 3", "table 4", "3.40 / 3.29"),
                ("resample", "a resampler of two queries", "table 4", "3.40 / 3.29"),
            )
        ),
        Claim(
            name="eaglevlm-kernel",
            says="convolution, one of 3; against one of 20",
            source="table 4",
            printed="3.40 / 2.90",
            one=_left("convolve"),
            other=_left("convolve", "kernel=20"),
        ),
        Claim(
            name="eaglevlm-queries",
            says="two queries are as good as eight",
            source="table 4",
            printed="3.40 / 3.39",
            one=_left("resample"),
            other=_left("resample", "queries=8"),
            expects="same",
        ),
        Claim(
            name="eaglevlm-cheap",
            says="pooling is as good as selecting",
            source="tables 3 and 4, different sets",
            printed="3.40 / 3.40 on LLaVA-Wild",
            one=_left("pool"),
            other=_left("select"),
            expects="same",
        ),
    ),
    not_built=("Section 5.2, longer training: any drafter here gains by more steps.",),
)

PAPERS = (HIVIS, VISPEC, MSD, SPECFLASH, SPARROW, ELASTIC)
