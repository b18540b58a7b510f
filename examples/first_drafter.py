# %% [markdown]
# # A drafter for your photos, in ten minutes
#
# A *drafter* guesses some tokens, the *target* checks them in one pass, and the response stays what it was.
# This notebook trains one on the small embedded target, without a GPU and without a download: some minutes on
# two cores. `python -m examples.first_drafter` runs the same.
#
# For photos of your own, see the second cell; for another target, name it in `MODEL`.

# %%
import time
from html import escape
from pathlib import Path

import polars as pl

import vlmdistill

MODEL, RUNS = "demo-small", "first-drafter"
LIMIT, STEPS = 1000, 600  # samples to train on, and optimizer steps


class Shown:
    """HTML that a notebook shows."""

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


def progress(stage: str, done: int, total: int, remark: str = "") -> None:
    """Say how far a stage is, now and then."""
    if done == total or done % 100 == 0:
        print(f"{stage}: {done} of {total or '?'} {remark}")


# %% [markdown]
# ## Photos and questions
#
# `"demo"` means generated scenes with questions. For a folder of photos, write
# `vlmdistill.prompts("photos", ask="Describe the image.", eval_share=0.2, runs=RUNS, model=MODEL)`.

# %%
imported = vlmdistill.prompts("demo", model=MODEL, runs=RUNS, progress=progress)
print(f"{imported.train} prompts to train on, {imported.eval} held out")

# %% [markdown]
# ## Responses and hidden states
#
# The target responds to the prompts, and its hidden states go into a feature store, from which the drafter
# learns.

# %%
captured = vlmdistill.features(
    ["wren"], model=MODEL, runs=RUNS, limit=LIMIT, progress=progress
)
print(f"{captured.samples} samples with {', '.join(captured.features)}")

# %% [markdown]
# ## Training
#
# The target is not loaded. The curve is the share of tokens that the drafter's first guess has right.

# %%
settings = {"steps": STEPS}
trained = vlmdistill.train(
    "wren", model=MODEL, runs=RUNS, settings=settings, progress=progress
)
steps = pl.read_ndjson(
    trained.folder.with_name("wren.training") / "metrics.jsonl",
    infer_schema_length=None,
)
curve = (
    steps.select("step", "train/agreement/hop0")
    .drop_nulls()
    .gather_every(max(1, STEPS // 10))
)
bars = [
    f"step {step:>4}  {'█' * round(40 * share)} {share:.2f}"
    for step, share in curve.iter_rows()
]
Shown(f"<pre>{'<br>'.join(bars)}</pre>")

# %% [markdown]
# ## What it gains
#
# Every held-out prompt is decoded with and without the drafter. `tau` is the number of tokens that one pass
# of the target yields.

# %%
results = vlmdistill.evaluate(
    "wren", model=MODEL, runs=RUNS, max_new_tokens=128, progress=progress
)
for result in results:
    same = f"{result.figures.lossless.identical} of {result.figures.prompts} responses identical"
    print(
        f"{result.name}: tau {result.figures.tau:.2f}, speedup {result.speedup_text}, {same}"
    )
page = vlmdistill.report(model=MODEL, runs=RUNS, plots=Path(RUNS) / "plots")
Shown(
    "".join(file.read_text() for file in sorted((Path(RUNS) / "plots").glob("*.svg")))
)

# %% [markdown]
# ## Side by side
#
# The same response twice: by the target alone, and with the drafter, whose accepted tokens are green. The
# page of the report replays some responses at their measured pace: open the file that is named below.

# %%
target = vlmdistill.load_target(MODEL)
drafter = vlmdistill.load_drafter(trained.folder, target)
image = next(
    iter(sorted((Path(RUNS) / MODEL / "demo-data" / "eval" / "images").glob("*.png")))
)
shown = []
for name, guesses in (("target alone", None), ("with wren", drafter)):
    began = time.perf_counter()
    chunks = [
        *vlmdistill.generate(
            target, "Describe the scene.", images=[image], drafter=guesses
        )
    ]
    seconds = time.perf_counter() - began
    text = "".join(
        f"<span style='color: green'>{escape(chunk.text)}</span>"
        if chunk.accepted
        else escape(chunk.text)
        for chunk in chunks
    )
    shown.append(
        f"<td style='vertical-align: top; width: 50%'><b>{name}, {seconds:.2f} s</b><br>{text}</td>"
    )
print(f"replays: {page}")
Shown(f"<table><tr>{''.join(shown)}</tr></table>")
