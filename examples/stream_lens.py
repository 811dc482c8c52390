"""Logit lens per residual stream: the most likely next token at every layer.

    python examples/stream_lens.py "Once upon a"

At every depth the model's final norm and head are applied to each stream, to their mean, and to the head's own merge of
them; the last column of the last row is the model's output.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

import birkhoff
from birkhoff.cli.terminal import escape_control


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="Once upon a")
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
    with birkhoff.load(options.model) as engine:
        lens = engine.lens(engine.prompt_ids(options.prompt), per_stream=True)
        table = Table(title=f"after {options.prompt!r}", title_justify="left")
        table.add_column("depth")
        for view in lens.views:
            table.add_column(f"stream {view}" if isinstance(view, int) else str(view))
        for depth in range(lens.depths):
            cells = []
            for view in lens.views:
                ((token, probability),) = lens.top(depth, view, k=1)
                word = escape_control(engine.tokenizer.decode([token])).replace("\n", "⏎")
                word = word if len(word) <= 8 else word[:7] + "…"
                cells.append(Text(f"{word!r} {probability:.0%}", style="bold" if probability > 0.5 else ""))
            table.add_row("embedding" if depth == 0 else f"layer {depth - 1}", *cells)
        Console(highlight=False, width=130).print(table)


if __name__ == "__main__":
    main()
