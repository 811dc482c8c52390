"""`birkhoff attribute TEXT` and `birkhoff circuit TEXT`: which parts of the model a prediction depends on.

Both print a table, or JSON with --json. The metric is the logit of --token, minus that of --other if given, at the end
of the text or at --position."""

from __future__ import annotations

import inspect
import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.atomic_file import write_atomic
from birkhoff.cli.engine_io import open_engine
from birkhoff.cli.generate import read_prompt
from birkhoff.cli.options import shared_options, split_options
from birkhoff.cli.steer_option import Steer, load_vectors, parse_steer
from birkhoff.cli.terminal import escape_control

if TYPE_CHECKING:
    from birkhoff.analysis.attribution import Node
    from birkhoff.api.engine import Engine

Text = Annotated[str, typer.Argument(help="Text to explain; - reads it from standard input.")]
Token = Annotated[str, typer.Option(help="Token whose logit is explained: its text, or id:NUMBER.")]
Other = Annotated[str | None, typer.Option(help="Token whose logit is subtracted.")]
Position = Annotated[int, typer.Option(help="Position of the prediction; negative ones count from the end.")]
Baseline = Annotated[
    str, typer.Option(help="What parts are moved to: zero, mean, or a text of the same number of tokens.")
]
Over = Annotated[
    list[str] | None,
    typer.Option(
        help="What is scored: a hook, sublayers, streams, mixers, heads, experts or features:FILE; repeatable. "
        "Default: sublayers."
    ),
]
Method = Annotated[str, typer.Option(help="gradient, integrated, inputs or exact.")]
GradientSteps = Annotated[int, typer.Option(help="Points at which gradients are integrated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _explains(verb: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say what is explained and how. The command gets the engine, the text, the keywords of
    `engine.attribute` and `engine.circuit`, whether to print JSON, and its own options."""
    own = [p for p in inspect.signature(verb).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def command(
        text: Text,
        token: Token,
        other: Other = None,
        position: Position = -1,
        over: Over = None,
        baseline: Baseline = "zero",
        method: Method = "gradient",
        steps: GradientSteps = 16,
        steer: Steer = None,
        json: Json = False,
        **options: Any,
    ) -> None:
        given = {p.name: options.pop(p.name) for p in own}
        load_options, _ = split_options(options)
        parsed = parse_steer(steer)
        text = read_prompt(text)
        with open_engine(load_options) as engine:
            keywords = {
                "metric": _metric(token, other, position),
                "over": _attached(engine, over),
                "baseline": baseline,
                "method": method,
                "steps": steps,
                "steer": load_vectors(parsed, engine) or None,
            }
            verb(engine, text, keywords, json, **given)

    *shared, rest = inspect.signature(command).parameters.values()
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*(p.replace(kind=p.KEYWORD_ONLY) for p in shared), *own, rest]
    )
    command.__annotations__ |= {p.name: verb.__annotations__[p.name] for p in own}
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    return shared_options("Model")(command)


@_explains
def attribute(
    engine: Engine,
    text: str,
    keywords: dict[str, Any],
    json: bool,
    *,
    top: Annotated[int, typer.Option(help="Number of parts to print.")] = 20,
) -> None:
    """Score parts of the model by how much a prediction depends on them."""
    result = engine.attribute(text, **keywords)
    if json:
        typer.echo(json_module.dumps(result.to_json(top)))
        return
    typer.echo(f"{escape_control(result.metric)}: {result.value:.4f}", err=True)
    _print_nodes(result.top(top), result.tokens)


@_explains
def circuit(
    engine: Engine,
    text: str,
    keywords: dict[str, Any],
    json: bool,
    *,
    faithfulness: Annotated[
        float, typer.Option(help="Share of the metric that the circuit must keep.")
    ] = 0.8,
    svg: Annotated[Path | None, typer.Option(help="Also draw the circuit to this SVG file.")] = None,
) -> None:
    """Find the parts that a prediction needs, and verify them by ablating all others."""
    found = engine.circuit(text, faithfulness=faithfulness, **keywords)
    if svg is not None:
        write_atomic(svg, found.svg())
    if json:
        typer.echo(json_module.dumps(found.to_json()))
        return
    typer.echo(f"{escape_control(found.metric)}: {found.measured.full:.4f}\n{found}", err=True)
    _print_nodes(found.nodes, found.tokens)
    if found.edges:
        typer.echo("\nedges, by stream:")
    for edge in found.edges:
        names = " -> ".join(_place(end, found.tokens) for end in (edge.source, edge.target))
        typer.echo(f"{edge.score:+9.4f}  stream {edge.stream}  {names}")


def _metric(token: str, other: str | None, position: int) -> dict[str, Any]:
    """`id:NUMBER` is a token id, everything else the text of a token."""

    def parsed(value: str) -> int | str:
        number = value.removeprefix("id:")
        return int(number) if value.startswith("id:") and number.isdigit() else value

    metric: dict[str, Any] = {"token": parsed(token), "position": position}
    return metric if other is None else metric | {"other": parsed(other)}


def _attached(engine: Engine, over: list[str] | None) -> list[str]:
    """The groups; dictionaries named by `features:FILE` are attached."""
    from birkhoff.analysis.attribute import FEATURES

    names = []
    for index, name in enumerate(over or ["sublayers"]):
        if name.startswith(FEATURES):
            engine.attach(f"features-{index}", name.removeprefix(FEATURES))
            names.append(f"{FEATURES}features-{index}")
        else:
            names.append(name)
    return names


def _print_nodes(nodes: list[Node], tokens: list[str] | None) -> None:
    for node in nodes:
        parts = "".join(f" {axis} {number}" for axis, number in node.index)
        place = _place((node.hook, node.layer, node.position), tokens, parts)
        typer.echo(f"{node.score:+9.4f}  {place}")


def _place(end: tuple[str, int, int], tokens: list[str] | None, parts: str = "") -> str:
    hook, layer, position = end
    token = "" if tokens is None else f" {escape_control(tokens[position])!r}"
    site = hook if hook in ("embedding", "output") else f"{hook}[{layer}]"
    return f"{site}{parts} at {position}{token}"
