"""Execute the code cells of a notebook in order and store what they print: `python examples/execute_notebook.py
FILE...`.

Needs no Jupyter. Each notebook runs in a namespace of its own; standard output and the repr of a final expression
become the cell's outputs. With `--check` nothing is written and a failing cell ends the run with status 1.
"""

from __future__ import annotations

import ast
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
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    return outputs


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
