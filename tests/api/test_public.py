"""The public names: what importing them costs, how they are documented, and what they refuse."""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import vlmdistill
from tests.pipelines.bench.made_up import evaluation, measured
from vlmdistill.pipelines.report.results import of_drafters

HEAVY = {"torch", "ray", "transformers"}
CONVERSIONS = ("as_numpy", "as_torch")
FUNCTIONS = [
    name for name in vlmdistill.__all__ if name.islower() and name not in CONVERSIONS
]
SIGNATURES = Path(__file__).parent / "signatures.txt"


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        f"import sys, vlmdistill; dir(vlmdistill); print({HEAVY} & sys.modules.keys())"
    )
    assert python(code).strip() == "set()"


def test_opening_a_store_needs_neither_torch_nor_transformers(
    demo_folder: Path,
) -> None:
    store = str(demo_folder / "runs/demo/features")
    code = (
        f"import sys, vlmdistill; vlmdistill.open_store({store!r}).index; "
        f"print({HEAVY} & sys.modules.keys())"
    )
    assert python(code).strip() == "set()"


def test_a_store_is_read_where_only_the_packages_of_the_core_are_installed(
    demo_folder: Path,
) -> None:
    code = f"""import sys
sys.modules |= dict.fromkeys(["ray", "transformers", "deepspeed", "httpx2", "datasets", "accelerate"])
import vlmdistill
store = vlmdistill.open_store({str(demo_folder / "runs/demo/features")!r})
batches = vlmdistill.iterate_batches(store, tokens=512)
print(sum(len(store[key].ids_T) > 0 for key in store), next(iter(batches)).ids_T.dtype)"""
    samples = len(vlmdistill.open_store(demo_folder / "runs/demo/features"))
    assert python(code).split() == [str(samples), "torch.int64"]


def test_a_command_that_lacks_a_package_says_what_to_install(tmp_path: Path) -> None:
    code = """import sys
sys.modules["transformers"] = None
from vlmdistill.cli.main import main
sys.exit(main(["generate", "Hello?", "--model", "demo"]))"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(r"transformers .*pip install '(vlmdistill\[|transformers)", line)


def test_all_names_are_there_and_no_others() -> None:
    assert {*dir(vlmdistill)} == {*vlmdistill.__all__, "__version__"}
    assert [name for name in dir(vlmdistill) if not hasattr(vlmdistill, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'open_stores'"):
        _ = vlmdistill.open_stores  # type: ignore[attr-defined]


def test_a_stage_without_a_drafter_is_refused(tmp_path: Path) -> None:
    for stage in (partial(vlmdistill.features, []), vlmdistill.evaluate):
        with pytest.raises(vlmdistill.VlmdistillError, match="names no drafter"):
            stage(runs=tmp_path)


def test_public_signatures_change_only_on_purpose() -> None:
    """`signatures.txt` is edited by hand, with an entry in CHANGELOG.md."""

    def shown(name: str) -> str:
        """Without types, which mypy checks and Python versions print differently."""
        known = inspect.signature(getattr(vlmdistill, name))
        bare = [
            one.replace(annotation=inspect.Parameter.empty)
            for one in known.parameters.values()
        ]
        return f"{name}{inspect.Signature(bare)}"

    names = [
        name
        for name in vlmdistill.__all__
        if inspect.isfunction(getattr(vlmdistill, name))
    ]
    assert [*map(shown, names)] == SIGNATURES.read_text().splitlines()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_of_a_function_is_documented(name: str) -> None:
    function = getattr(vlmdistill, name)
    text = inspect.getdoc(function) or ""
    assert [
        part
        for part in inspect.signature(function).parameters
        if f"\n    {part}: " not in text
    ] == []
    assert [part for part in ("Args:", "Raises:", "Example:") if part not in text] == []
    assert "Returns:" in text or "Yields:" in text


def test_a_drafter_marks_what_it_had_right_and_changes_nothing(
    demo_folder: Path,
) -> None:
    target = vlmdistill.load_target("demo")
    image = next((demo_folder / "runs/demo/demo-data/eval/images").glob("*.png"))
    drafter = vlmdistill.load_drafter("lookahead", target)

    def said(**more: Any) -> list[vlmdistill.Chunk]:
        prompt = "Describe the scene."
        return [
            *vlmdistill.generate(
                target, prompt, images=[image], max_new_tokens=60, **more
            )
        ]

    plain, drafted = said(), said(drafter=drafter)
    assert (
        "".join(chunk.text for chunk in plain)
        == "".join(chunk.text for chunk in drafted)
        != ""
    )
    assert not any(chunk.accepted for chunk in plain)
    assert any(chunk.accepted for chunk in drafted)
    first, again = (said(temperature=1.0, seed=3) for _ in range(2))
    assert first == again != plain


def test_a_target_decodes_one_response_and_leaves_the_caller_its_gradients() -> None:
    target = vlmdistill.load_target("demo")
    lookahead = vlmdistill.load_drafter("lookahead", target)
    for drafter, other in ((None, lookahead), (lookahead, None)):
        first = vlmdistill.generate(target, "Describe the scene.", drafter=drafter)
        second = vlmdistill.generate(target, "What is this?", drafter=other)
        assert next(first).text
        assert not torch.is_inference_mode_enabled()
        assert next(second).text
        with pytest.raises(
            vlmdistill.VlmdistillError, match="another response was begun"
        ):
            list(first)
        assert list(second)


def test_ranks_share_an_epoch_and_epochs_differ(demo_folder: Path) -> None:
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")

    def order(**options: Any) -> list[list[int]]:
        batches = vlmdistill.iterate_batches(
            store, tokens=1, features=["hidden.text"], **options
        )
        return [batch.ids_T.tolist() for batch in batches]

    whole = order(epoch=0)
    shares = [order(epoch=0, rank=rank, world=2) for rank in (0, 1)]
    assert len(whole) == len(store)
    assert sorted(whole) == sorted(shares[0] + shares[1])
    assert whole == order(epoch=0) != order(epoch=1)
    dataset = vlmdistill.StoreDataset(store, tokens=1, features=["hidden.text"])
    dataset.set_epoch(1)
    assert [
        batch.ids_T.tolist() for batch in DataLoader(dataset, batch_size=None)
    ] == order(epoch=1)


def test_batches_that_are_kept_stay_as_they_were(demo_folder: Path) -> None:
    """The reader reuses its memory; a public batch is the caller's."""
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    hidden = vlmdistill.Feature("hidden", "text")
    kept = list(vlmdistill.iterate_batches(store, tokens=1, features=["hidden.text"]))
    one_by_one = {tuple(batch.ids_T.tolist()): batch.features[hidden] for batch in kept}
    for key in store:
        sample = store[key]
        expected = vlmdistill.as_torch(sample.features[hidden], store.provenance.dtype)
        assert torch.equal(one_by_one[tuple(sample.ids_T.tolist())], expected)


def test_a_store_maps_keys_to_samples(demo_folder: Path) -> None:
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    keys = store.index["key"].to_list()
    assert [*store] == keys
    assert len(store) == len(keys) > 5
    assert keys[5] in store
    assert "scene-6" not in store
    assert 5 not in store
    assert store[keys[5]].key == keys[5]


def test_features_come_in_the_dtype_of_the_store(demo_folder: Path) -> None:
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    batch = next(vlmdistill.iterate_batches(store, tokens=10_000))
    assert {rows.dtype for rows in batch.features.values()} == {torch.bfloat16}
    assert sorted(feature.name for feature in batch.features) == list(
        store.provenance.features
    )
    assert set(batch.segment_T.tolist()) == set(range(len(store)))


def test_features_are_taken_by_name(demo_folder: Path) -> None:
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    hidden = vlmdistill.Feature("hidden", "text")
    key = next(iter(store))
    sample = store.read(key, ["hidden.text"])
    assert (
        list(sample.features)
        == list(store.read(key, "hidden.text").features)
        == [hidden]
    )
    assert sample.feature("hidden.text") is sample.features[hidden]
    batch = next(vlmdistill.iterate_batches(store)).only(["hidden.text"])
    assert (
        batch.feature("hidden.text")
        is batch.feature("hidden", "text")
        is batch.features[hidden]
    )


def test_a_hand_made_sample_without_feature_objects_is_refused(
    demo_folder: Path,
) -> None:
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    sample: Any = store[next(iter(store))]
    named = {feature.name: rows for feature, rows in sample.features.items()}
    with (
        pytest.raises(vlmdistill.VlmdistillError, match=r"Feature\.parse\('"),
        store.writer("more") as writer,
    ):
        writer.add(dataclasses.replace(sample, key="named", features=named))


def test_a_notebook_shows_what_a_thing_is(demo_folder: Path) -> None:
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    assert f"{store.path}: {len(store)} samples of demo, " in repr(store)
    target = vlmdistill.load_target("demo")
    assert f"demo: {target.info.family}, " in repr(target)
    drafter = vlmdistill.load_drafter(
        demo_folder / "runs/demo/drafters/sparrow", target
    )
    assert re.match(r"Sparrow\(\s+for demo, [\d,]+ parameters, tree ", repr(drafter))
    (result,) = of_drafters([evaluation("wren", measured())])
    assert "wren on 24 prompts at temperature 0: tau 3.25, speedup 1.50" in repr(result)
    assert repr(result.evaluation).startswith("wren: evaluated on 24 prompts")
    assert repr(result.measurement) == "24 prompts at temperature 0"
    (broken,) = of_drafters([evaluation("wren", measured(missed=1))])
    assert "in doubt: 24 drafted tokens" in repr(broken)
    key = next(iter(store))
    assert re.match(rf"Sample\('{key}': \d+ text tokens, ", repr(store[key]))
    batch = next(vlmdistill.iterate_batches(store, tokens=10_000))
    assert re.match(
        rf"Batch\({len(store)} samples: \d+ text tokens; .*hidden\.text", repr(batch)
    )


def test_a_damaged_store_can_be_shown(demo_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_folder / "runs/demo/features", tmp_path / "store")
    next((tmp_path / "store" / "commits").glob("*.json")).write_text("{")
    assert "not readable" in repr(vlmdistill.open_store(tmp_path / "store"))


def refused(demo_folder: Path) -> dict[str, Callable[[], object]]:
    """Bad input of each function, by what the error says."""
    store = vlmdistill.open_store(demo_folder / "runs/demo/features")
    key = next(iter(store))
    target = vlmdistill.load_target("demo")
    lookahead = vlmdistill.load_drafter("lookahead", target)
    workers = DataLoader(vlmdistill.StoreDataset(store), batch_size=None, num_workers=1)
    new = vlmdistill.new_drafter("sparrow", store, recipe="demo")
    turn = [{"role": "user", "content": "Hello"}]
    untyped: Any = vlmdistill  # for values of a wrong type
    batches, generate = (
        partial(vlmdistill.iterate_batches, store),
        partial(vlmdistill.generate, target),
    )
    return {
        "there is no feature store at nowhere": lambda: vlmdistill.open_store(
            "nowhere"
        ),
        "has no sample 'no-key'": lambda: store["no-key"],
        "'hiden.text' is not a feature": lambda: batches(features=["hiden.text"]),
        "this store has no layer1.span": lambda: batches(features=["layer1.span"]),
        "this store has no layer3.text": lambda: vlmdistill.StoreDataset(
            store, features=["layer3.text"]
        ),
        "'nope.text' is not a feature": lambda: vlmdistill.StoreDataset(
            store, features=["nope.text"]
        ),
        "'hidden' is not a feature": lambda: store.read(key, ["hidden"]),
        "'embed' is not a feature": lambda: store[key].feature("embed"),
        "'layer.text' is not a feature": lambda: target.capture([], [], ["layer.text"]),
        "tokens=-1": lambda: batches(tokens=-1),
        "tokens='1k'": lambda: untyped.iterate_batches(store, tokens="1k"),
        "has no sample 0": lambda: untyped.open_store(store.path)[0],
        "the batch lacks layer3.text": lambda: next(batches()).feature("layer3.text"),
        "the sample lacks layer3.text": lambda: store[key].feature("layer3.text"),
        "eval_share 7": lambda: vlmdistill.prompts("demo", eval_share=7),
        "limit 0": lambda: vlmdistill.prompts("demo", limit=0),
        "settings=['steps=3']": lambda: untyped.train("wren", settings=["steps=3"]),
        "temperatures='0'": lambda: untyped.evaluate("wren", temperatures="0"),
        "one.png does not exist": lambda: generate("What?", images="one.png"),
        "rank=3": lambda: vlmdistill.StoreDataset(store, rank=3),
        "late": lambda: batches(view="late"),
        "set num_workers=0": lambda: next(iter(workers)),
        " of the batch is bfloat16 on cpu, and the drafter float32": lambda: (
            vlmdistill.unroll(new.drafter, next(batches()), new.config.schedule[0])
        ),
        "progress(stage, done, total, remark)": lambda: untyped.train(
            "wren", progress=lambda done, total: None
        ),
        "name a new folder": lambda: vlmdistill.create_store(
            demo_folder, target, ["hidden.text"]
        ),
        "demi": lambda: vlmdistill.load_target("demi"),
        "runs/x/sparow": lambda: vlmdistill.load_drafter("runs/x/sparow", target),
        "did you mean 'sparrow'": lambda: vlmdistill.load_drafter("sparow", target),
        "the prompt is empty": lambda: generate(" "),
        "belong in its messages": lambda: generate(turn, images=["a.png"]),
        "no.png does not exist": lambda: generate("What?", images=["no.png"]),
        "'5' is not a tree": lambda: generate("What?", drafter=lookahead, tree="5"),
        "has no drafter": lambda: generate("What?", tree="chain-4"),
        "did you mean 'vispec'": lambda: generate("What?", drafter="vispek"),
        "temperature -1": lambda: generate("What?", temperature=-1),
    }


def test_bad_input_is_refused_at_once_in_one_line(demo_folder: Path) -> None:
    for message, call in refused(demo_folder).items():
        with pytest.raises(vlmdistill.VlmdistillError) as caught:
            call()
        assert message in str(caught.value)
        assert "Traceback" not in str(caught.value)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vlmdistill", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"vlmdistill {vlmdistill.__version__}\n"


def test_the_shell_completes_commands() -> None:
    asked = {
        "_VLMDISTILL_COMPLETE": "complete_bash",
        "COMP_WORDS": "vlmdistill tr",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "vlmdistill"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["train"]
