"""The notebooks run from top to bottom and are stored with their outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import clean_environment

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {
        "first_look",
        "patching",
        "steering_sweep",
        "features",
        "own_checkpoint",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "execute_notebook.py"), "--check", str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 2
    assert not [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
    shown = [kind for cell in cells for o in cell["outputs"] for kind in o.get("data", ())]
    assert "text/html" in shown and "image/png" in shown
    assert path.stat().st_size < 600_000
