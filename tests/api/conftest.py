"""A folder as `make demo` leaves it, made small and without Ray."""

from pathlib import Path

import pytest

import vlmdistill
from vlmdistill.drafters import catalogue
from vlmdistill.pipelines.demo import files
from vlmdistill.pipelines.train import planned, run
from vlmdistill.pipelines.workspace.workspace import Workspace

STEPS = ["steps=2", "batch_tokens=512"]


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `runs/demo` with scenes, a store of six samples and a drafter of two steps."""
    folder = tmp_path_factory.mktemp("api")
    workspace = Workspace("demo", folder / "runs" / "demo")
    data = workspace.root / "demo-data" / "eval"
    files.write(data, images=6, dialogues=1, seed=0, split="evaluation")
    target = vlmdistill.load_target("demo")
    prompts = [
        target.encode(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "path": image},
                        {"type": "text", "text": "Describe the scene."},
                    ],
                }
            ]
        )
        for image in sorted((data / "images").glob("*.png"))
    ]
    responses = target.generate(prompts, max_new_tokens=24, temperature=0.0)
    needs = catalogue.config("sparrow").model.needs(target.info)
    keys = [f"scene-{number}" for number in range(len(prompts))]
    samples = target.capture(
        prompts, [response.ids for response in responses], needs, keys=keys
    )
    store = vlmdistill.create_store(workspace.features, target, needs)
    with store.writer("scenes") as writer:
        for sample in samples:
            writer.add(sample)
    run(planned(workspace, "sparrow", settings=STEPS))
    return folder
