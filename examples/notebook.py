"""Write `first_drafter.ipynb` from `first_drafter.py`, whose cells begin with `# %%`.

python -m examples.notebook
"""

import json
import re
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("first_drafter.py")
NOTEBOOK = SCRIPT.with_suffix(".ipynb")


def notebook(script: str) -> str:
    """The script as a notebook of format 4.5, without outputs."""
    cells: list[dict[str, Any]] = []
    parts = re.findall(r"# %%( \[markdown\])?\n(.*?)(?=# %%|\Z)", script, re.DOTALL)
    for number, (markdown, body) in enumerate(parts):
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if markdown else body
        kind = "markdown" if markdown else "code"
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
        }
        if not markdown:
            cell |= {"execution_count": None, "outputs": []}
        cells.append({**cell, "source": text.strip().splitlines(keepends=True)})
    metadata = {"language_info": {"name": "python"}}
    made = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")
