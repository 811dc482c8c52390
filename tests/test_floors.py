"""The layering of the package: a room (subpackage or module) imports only rooms of lower floors.

Rooms of the same floor do not import each other. Imports inside `if TYPE_CHECKING:` are ignored: they have no effect at
run time, and a lower room may name the type of an argument (`analysis` takes an `Engine`)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "birkhoff"
FLOORS = [
    "hooks kernels config errors embedded byte_size atomic_file option_checks dtype_names free_memory free_disk "
    "cgroups processors "
    "hf_hub json_limits small_file result_file notebook extras records",
    "offload",
    "model mhc",
    "decode",
    "engine capture steering sae text weights",
    "planning hf data",
    "output trace vllm",
    "analysis report",
    "api",
    "server web convert validate plot ray_capture",
    "cli",
]
SHARED = {
    "config",
    "errors",
    "byte_size",
    "atomic_file",
    "option_checks",
    "dtype_names",
    "free_disk",
    "json_limits",
    "small_file",
    "result_file",
    "notebook",
    "extras",
    "cgroups",
    "records",
}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
CORE = {
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "birkhoff",
}  # third-party packages allowed up to api
COMPILERS = {"numba", "triton"}  # optional for kernels
OPTIONAL = {
    "hf": {"transformers"},
    "data": {"pyarrow", "zstandard", "datasets", "zarr"},
    "vllm": {"vllm", "fastapi", "starlette"},
    "kernels": COMPILERS,
    "weights": {"gguf"},
    "sae": {"pyarrow"},
    "hf_hub": {"huggingface_hub"},
}  # optional packages of a room
BENCH_AVOIDS = {"server", "web", "cli"}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(text: str) -> set[str]:
    """Every module that a file imports at run time, at the top or inside functions."""
    nodes: list[ast.AST] = []
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        nodes.append(node)
        children = node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
        pending += children
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in sources), "imports are absolute"
    return plain | {f"{node.module}.{alias.name}" for node in sources for alias in node.names}


def violations(file: str, text: str) -> list[str]:
    """The forbidden imports of birkhoff/`file`, as messages."""
    room, result = file.removesuffix(".py").split("/")[0], []
    extras = OPTIONAL.get(room, set())
    for name in imported(text):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package == "birkhoff" and target in FLOOR:
            if room == "bench":
                allowed = target not in BENCH_AVOIDS
            else:  # shared modules may be imported on their own floor; __init__ exports the public names
                below = FLOOR.get(room, 9) > FLOOR[target] or target in SHARED
                allowed = room in ("__init__", "__main__", target) or below
            if not allowed:
                result.append(
                    f"{file}: {room} (floor {FLOOR.get(room)}) imports {target} (floor {FLOOR[target]})"
                )
        elif FLOOR.get(room, 9) <= FLOOR["api"] and package not in CORE | sys.stdlib_module_names | extras:
            result.append(f"{file}: the core imports {package}")
    return result


def test_every_import_is_from_a_lower_floor():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 40
    rooms = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in files}
    assert rooms <= {*FLOOR, "__init__", "__main__", "bench"}, "a new room needs a floor"
    assert not [
        v for f in files for v in violations(f.relative_to(PACKAGE).as_posix(), f.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    ("file", "line", "caught"),
    [
        ("model/block.py", "from birkhoff.engine.engine import Engine", True),
        ("model/block.py", "from birkhoff import api", True),
        ("model/block.py", "import birkhoff.weights.tensor_names as names", True),
        ("steering/vector_edits.py", "def late():\n    from birkhoff.capture.files import write", True),
        ("kernels/mhc/reference.py", "from birkhoff.model.block import Block", True),
        ("kernels/mhc/reference.py", "from birkhoff.hooks import sites", True),
        ("hooks/plan.py", "import transformers", True),
        ("api.py", "from typer import Option", True),
        ("bench/run.py", "from birkhoff.server.app import App", True),
        ("cli/serve.py", "from birkhoff.server.app import App\nimport typer", False),
        ("engine/runner.py", "import numba", True),
        (
            "engine/engine.py",
            "from birkhoff.engine.request import Request\nimport birkhoff.model.batch",
            False,
        ),
        ("kernels/mhc/kernel.py", "import triton.language as tl", False),
        ("model/block.py", "import gguf", True),
        (
            "kernels/quant/reference.py",
            "import math\nimport torch\nfrom birkhoff.errors import TensorShape",
            False,
        ),
        ("bench/run.py", "from birkhoff.engine.engine import Engine", False),
        ("analysis/lens.py", "if TYPE_CHECKING:\n    from birkhoff.api.engine import Engine", False),
        ("analysis/lens.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from birkhoff.api import engine", True),
        ("analysis/lens.py", "from birkhoff.api.engine import Engine", True),
    ],
)
def test_a_forbidden_import_is_detected(file, line, caught):
    assert bool(violations(file, line)) is caught


def test_the_core_imports_without_compilers():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(COMPILERS)})); import birkhoff.model.transformer; "
        "from birkhoff.kernels.select import select; print(select('cpu').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
