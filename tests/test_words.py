"""Identifiers: retired names stay retired, a class name is defined once, and the glossary stays short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "birkhoff"

# Names that were replaced by a term of the field. They must not come back as identifiers of the package.
RETIRED_NAMES = set(
    """
    Desk CaptureDesk SteeringDesk SaeDesk ChangeDesk StillTap StillSae LiveTap Tray Cut Lane LaneBuffers Hub Running
    Told
    Exit Landed Heat Loan Courier StreamCourier Pace Ran Piece Work Wish Wishes Wanted Take Holding Keeper MemoryKeeper
    DispatchKeeper Witness Around Shelf Lookers States Rows Picked FastKernels PortableKernels MixerFew HeadFew
    AttentionFew
    MoEFew MTPFew Contender Rival guesses desk hub tray courier loan shelf open_experts close_experts enter_experts
    still_kind wish wishes said told so_many whoever everybody nobody
    """.split()
)
RETIRED_MODULES = set(
    """
    desk still live tray lanes few many hub feed exit heat pace states courier stage record gate shelf looking inside
    placing passes contenders rival callers
    """.split()
)
# A name of a library that we call or subclass, not a name of ours.
FOREIGN = {("cli", "Exit")}
MAX_GLOSSARY = 16


def identifiers(path: Path) -> list[tuple[str, int]]:
    """Every NAME token of a file with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.string, token.start[0]) for token in tokens if token.type == tokenize.NAME]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_retired_names_are_not_used():
    result = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line in identifiers(path)
        if name in RETIRED_NAMES and (room_of(path), name) not in FOREIGN
    ]
    assert not result, result


def test_retired_module_names_are_not_used():
    assert not [str(path) for path in PACKAGE.rglob("*.py") if path.stem in RETIRED_MODULES]


def test_a_class_name_has_one_definition():
    defined = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined[node.name.lstrip("_")].append(path.relative_to(PACKAGE).as_posix())
    assert not {name: files for name, files in defined.items() if len(files) > 1}


def test_the_glossary_is_short_and_complete():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    own = re.findall(r"^\| ([a-z, ]+) \|", text.split("## ")[0], re.MULTILINE)
    assert len(own) - 1 <= MAX_GLOSSARY, own  # the first row is the table's head
    assert {"site", "tap", "plan", "stream", "mixer", "edit", "page", "placement", "pattern", "twin"} <= set(
        own
    )
