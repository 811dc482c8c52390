"""Execute the code cells of a notebook in order and store what they print: `python examples/execute_notebook.py
FILE...`.

Needs no Jupyter. Each notebook runs in a namespace of its own; standard output and the final expression (its repr, its
HTML, or the picture of a Matplotlib figure) become the cell's outputs. With `--check` nothing is written and a failing
cell ends the run with status 1.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute one cell; returns its outputs in notebook format."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = display_data(value)
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    return outputs


def display_data(value: Any) -> dict[str, Any]:
    """What a notebook keeps of a value: its repr and, where it has them, its HTML or its picture."""
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    html = value._repr_html_() if hasattr(value, "_repr_html_") else None
    if html is not None:
        data["text/html"] = html.splitlines(keepends=True)
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80)
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return data


def execute(path: Path) -> dict[str, Any]:
    """The notebook with fresh outputs."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), start=1):
        cell["outputs"] = run_cell("".join(cell["source"]), namespace)
        cell["execution_count"] = number
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = number
    return notebook


def main(arguments: list[str]) -> None:
    check = "--check" in arguments
    for name in arguments:
        if name != "--check":
            notebook = execute(Path(name))
            if not check:
                Path(name).write_text(
                    json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
