"""`birkhoff attribute TEXT` and `birkhoff circuit TEXT`: which parts of the model a prediction depends on.

Both print a table, or JSON with --json. The metric is the logit of --token, minus that of --other if given, at the end
of the text or at --position. `attribute --pairs FILE` takes several texts and prints their mean."""

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
from birkhoff.cli.text_pairs import Other, Pairs, Position, TextPairs, Token, metric_of
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.analysis.attribution import Node
    from birkhoff.api.engine import Engine

Text = Annotated[
    str | None, typer.Argument(help="Text to explain; - reads it from standard input.", show_default=False)
]
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
    `engine.attribute` and `engine.circuit`, whether to print JSON, and its own options. One that has `pairs` gets the
    texts of that file as a list, and their metrics and baselines."""
    own = [p for p in inspect.signature(verb).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def command(
        text: Text = None,
        token: Token = None,
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
        file = given.pop("pairs", None)
        if (text is None) == (file is None):
            raise OptionError("give a TEXT, or several with --pairs FILE.")
        prompt: Any = None
        metric: Any = None
        compared: Any = baseline
        if file is not None:
            pairs = TextPairs.read(file, token, other, position)
            prompt, metric = pairs.clean, pairs.metrics
            if pairs.corrupt is not None:
                if baseline != "zero":
                    raise OptionError(f"{file} has corrupted texts as baselines. Leave --baseline out.")
                compared = pairs.corrupt
        elif text is not None:
            prompt, metric = read_prompt(text), metric_of(token, other, position)
        with open_engine(load_options) as engine:
            keywords = {
                "metric": metric,
                "over": _attached(engine, over),
                "baseline": compared,
                "method": method,
                "steps": steps,
                "steer": load_vectors(parsed, engine) or None,
            }
            verb(engine, prompt, keywords, json, **given)

    *shared, rest = inspect.signature(command).parameters.values()
    if not any(p.name == "pairs" for p in own):
        required = {"text", "token"}
        shared = [p.replace(default=p.empty) if p.name in required else p for p in shared]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*(p.replace(kind=p.KEYWORD_ONLY) for p in shared), *own, rest]
    )
    command.__annotations__ |= {p.name: verb.__annotations__[p.name] for p in own}
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    return shared_options("Model")(command)


@_explains
def attribute(
    engine: Engine,
    text: str | list[str],
    keywords: dict[str, Any],
    json: bool,
    *,
    pairs: Pairs = None,
    top: Annotated[int, typer.Option(help="Number of parts to print.")] = 20,
) -> None:
    """Score parts of the model by how much a prediction depends on them."""
    from birkhoff.analysis.attribution import Attribution

    scores = engine.attribute(text, **keywords)
    if json:
        typer.echo(json_module.dumps(scores.to_json(top)))
        return
    result = scores if isinstance(scores, Attribution) else scores.mean
    if not isinstance(scores, Attribution):
        typer.echo(f"mean of {len(scores)} texts", err=True)
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
