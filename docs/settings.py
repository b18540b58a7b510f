"""Write docs/settings.md from the classes that define the settings; `make docs` runs it."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from vlmdistill.drafters import catalogue
from vlmdistill.drafters.core.config import (
    DrafterConfig,
    ModelConfig,
    Stage,
    TrainConfig,
)
from vlmdistill.drafters.core.documented import (
    DocumentedConfig,
    Setting,
    documented,
)
from vlmdistill.drafters.core.tree import Tree

PAGE = Path(__file__).with_name("settings.md")
INTRODUCTION = """\
# Settings

Every setting of a training: `vlmdistill train DRAFTER --set KEY=VALUE`, or a line of a recipe file
([train.md](train.md#settings)). `train DRAFTER --show-config` prints those of one drafter with their values.
The default of a method is what its paper or its code says; `--recipe` replaces some of them.
"""


GENERAL = documented(
    DrafterConfig(
        ModelConfig(), TrainConfig(stages=(Stage(name="multimodal"),)), Tree()
    )
)
"""The settings that all drafters have, and those of each stage."""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    """The settings that all drafters have, then those of each method."""
    yield "## All drafters\n"
    yield _table(GENERAL.settings)
    yield "## Each stage\n"
    yield "Keys begin with `stages.` and the name of a stage, its number or `*`.\n"
    yield _table(setting for setting in GENERAL.stages[0] if setting.name != "name")
    shared = {setting.name for setting in GENERAL.settings}
    for name in catalogue.NAMES:
        documentation = documented(catalogue.config(name))
        own = [
            setting for setting in documentation.settings if setting.name not in shared
        ]
        yield f"## {name}\n"
        if own:
            yield _table(own)
        yield _defaults(documentation)


def _defaults(documentation: DocumentedConfig) -> str:
    """What the paper of a method has otherwise than the tables of all drafters, in a line."""
    texts = [*_differing(documentation.settings, GENERAL.settings)]
    for stage in documentation.stages:
        (name,) = [setting.default for setting in stage if setting.name == "name"]
        stage_texts = ", ".join(_differing(stage, GENERAL.stages[0]))
        texts.append(f"stage `{name}` ({stage_texts or 'as above'})")
    return f"Defaults: {', '.join(texts) or 'as above'}.\n"


def _differing(
    settings: Iterable[Setting], general: Iterable[Setting]
) -> Iterator[str]:
    """The settings that are among the general ones and have another default."""
    usual = {setting.name: setting.default for setting in general}
    for setting in settings:
        if setting.name == "name" or setting.name not in usual:
            continue
        if setting.default != usual[setting.name]:
            yield f"`{setting.name}={json.dumps(setting.default)}`"


def _table(settings: Iterable[Setting]) -> str:
    """Settings with what they mean, may be and are by default."""
    rows = ["| setting | meaning | values | default |", "|---|---|---|---|"]
    for setting in settings:
        default = f"`{json.dumps(setting.default)}`"
        text = setting.text.replace("|", "\\|")
        rows.append(f"| `{setting.name}` | {text} | {setting.values} | {default} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
