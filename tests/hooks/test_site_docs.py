"""docs/sites.md is up to date with the site tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from birkhoff.hooks.site_docs import document
from birkhoff.hooks.site_names import ALIASES, TOOLS
from birkhoff.hooks.sites import SITES

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_current():
    page = (ROOT / "docs" / "sites.md").read_text(encoding="utf-8")
    assert page == document(), "regenerate it: python -m birkhoff.hooks.site_docs > docs/sites.md"


def test_the_page_names_every_hook_alias_and_foreign_name():
    page = document()
    for name in [
        *(site.name for site in SITES),
        *ALIASES,
        *(row for t in TOOLS.values() for row in t.values()),
    ]:
        assert f"`{name.format('i')}`" in page, name


def test_the_module_prints_the_page():
    process = subprocess.run(
        [sys.executable, "-m", "birkhoff.hooks.site_docs"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        encoding="utf-8",
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, document(), "")
