"""A tour of Birkhoff in the terminal: load a model, generate, steer, and inspect activations.

    make demo            (or: python examples/tour.py [OUTPUT DIRECTORY])

Uses the embedded model if this installation includes it, else a random checkpoint of the same shape; it prints which.
Everything is computed during the run, on a CPU, through the public API.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

import birkhoff
from birkhoff import Add, SaeSet
from birkhoff.analysis.crosscoder_splice import crosscoder_loss
from birkhoff.cli.charts import mixing_matrix, sparkline
from birkhoff.cli.terminal import escape_control
from birkhoff.convert.synth import synth
from birkhoff.embedded import shipped_crosscoders
from birkhoff.errors import CheckpointError
from birkhoff.output import Output
from birkhoff.sae.crosscoder import Crosscoder
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.trace import Trace
from birkhoff.weights import inspect_checkpoint, open_checkpoint

QUESTION = [{"role": "user", "content": "Tell me a short story about a cat."}]
SENTENCE = "The little dog was afraid of the dark forest."
STORY = "One day,{} had a red ball. A boy wanted it. He asked"
NAMES = ((" Lily", " Anna"), (" Tom", " Ben"), (" Mia", " Sue"), (" Max", " Tim"))
FEATURE, FEATURE_STRENGTH = "the sea", 1.5  # feature label; in units of its largest activation
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "captures/tour")
console = Console(highlight=False)


def heading(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


def load(folder: Path) -> tuple[birkhoff.Engine, Path, bool]:
    """Load the embedded model, or a random one created in `folder`; also returns its path and whether it is trained."""
    try:
        return birkhoff.load("nano"), Path(birkhoff.__file__).parent / "models" / "nano", True
    except CheckpointError:
        console.print(
            "The embedded model is not part of this installation. The tour uses a random\n"
            "checkpoint of the same shape, with the released names and formats; its text\n"
            "is meaningless, its internal structure is that of a real model."
        )
        path = folder / "nano"
        synth(path, "nano")
        return birkhoff.load(path), path, False


def show_model(path: Path) -> None:
    heading("1  The model")
    report = inspect_checkpoint(path)
    config = open_checkpoint(path).config
    kinds = {"swa": "sliding window", "csa": "4-fold compressed, chosen", "hca": "128-fold compressed, all"}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_row("on disk", f"{report.file_bytes / 2**20:.1f} MiB, FP4 experts and FP8 matrices")
    table.add_row(
        "parameters",
        f"{report.parameters / 1e6:.1f} M, {(report.parameters_active or 0) / 1e6:.1f} M used per token",
    )
    for kind, layers in report.layers.items():
        table.add_row(f"{kind} layers", f"{', '.join(map(str, layers))}  ({kinds[kind]})")
    experts = f"{config.num_experts_per_tok} of {config.n_routed_experts} routed and 1 shared"
    table.add_row("experts", f"{experts}; layers 0 to {config.num_hash_layers - 1} choose by token id")
    table.add_row(
        "residual", f"{config.hc_mult} streams of {config.hidden_size}, mixed by a doubly stochastic matrix"
    )
    console.print(table)


def show_answer(engine: birkhoff.Engine, trained: bool) -> Output:
    heading("2  An answer" if trained else "2  An answer (random weights: arbitrary bytes)")
    output = engine.chat(QUESTION, max_tokens=96 if trained else 24, temperature=0.7, seed=1)
    console.print(f"[dim]>>> {QUESTION[0]['content']}[/]")
    if trained:
        console.print(Text(escape_control(output.text)))
    else:
        console.print(Text(f"token ids {', '.join(map(str, output.token_ids[:12]))} …"))
    t = output.timings
    read = f"prompt of {t['prompt_tokens']} tokens in {t['prefill_ms']:.0f} ms"
    console.print(
        f"[dim]{read}, then {t['output_tokens']} tokens at {t['tokens_per_second']:.0f} a second[/]"
    )
    return output


def show_steered(engine: birkhoff.Engine) -> None:
    """Generate with the same request and seed, steered by vectors shipped with the model."""
    heading("3  The same request, steered")
    names = [name for name in ("spooky", "dialogue") if name in engine.modules]
    for name in names:
        vector = engine.modules[name]
        output = engine.chat(QUESTION, max_tokens=64, temperature=0.7, seed=1, steer=[Add(name)])
        where = f"{vector.hook} of layer {vector.layers[0]}" if isinstance(vector, SteeringVector) else ""
        console.print(f"[dim]+ {name}, added at {where} to {output.interp['rows_steered']} tokens[/]")
        console.print(Text(escape_control(output.text)))
    console.print(f"[dim]All of them: {', '.join(sorted(engine.modules))}.[/]")


def show_features(engine: birkhoff.Engine) -> None:
    """Show the SAE features of a sentence, and a story with one feature raised."""
    heading("5  SAE features of a sentence")
    ids = engine.prompt_ids(SENTENCE)
    with engine.attach("features", "nano"):
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        table.add_column("token", style="cyan")
        table.add_column("strongest labelled features and activations")
        for token, active in list(zip(ids, engine.features(ids, "features", k=160)))[-8:]:
            labelled = [feature for feature in active if feature.label][:3]
            text = "   ".join(f"{feature.label} {feature.activation:.1f}" for feature in labelled)
            table.add_row(escape_control(engine.tokenizer.decode([token])), Text(text))
        console.print(table)
        plain = engine.chat(QUESTION, max_tokens=48, temperature=0.7, seed=2)
        clamp = [SaeSet("features", {FEATURE: {"x_max": FEATURE_STRENGTH}}, kind="additive")]
        raised = engine.chat(QUESTION, max_tokens=48, temperature=0.7, seed=2, steer=clamp)
        console.print(Text.assemble(("without  ", "dim"), escape_control(plain.text)))
        console.print(
            Text.assemble((f"with the feature “{FEATURE}” turned up  ", "dim"), escape_control(raised.text))
        )


def show_mixing(engine: birkhoff.Engine, trace: Trace, output: Output) -> None:
    layer = engine.config.num_hidden_layers // 2
    token = engine.tokenizer.decode(output.token_ids[-1:])
    heading(f"4  How layer {layer} mixes the four streams at the last token")
    console.print(Text(f"token {len(trace.logits)}, {escape_control(token)!r}", "dim"))
    tables = []
    for name, label in (("attn", "around attention"), ("ffn", "around the experts")):
        mix, read, write = (
            trace[f"mhc_{name}_{kind}_mix", layer][-1].tolist() for kind in ("res", "pre", "post")
        )
        tables.append(mixing_matrix(label, mix, read, write))
    console.print(Columns(tables, padding=(0, 3)))
    console.print(
        "[dim]Columns sum to one and rows nearly: mixing averages streams and never amplifies them.\n"
        "`read` weighs the streams into the sublayer, `write` its output into each.[/]"
    )


def show_norms(trace: Trace, layers: int) -> None:
    heading("6  Norm of each stream, layer by layer, at the last token")
    norms = [
        trace["mhc_streams_pre_attn", layer][-1].float().norm(dim=-1).tolist() for layer in range(layers)
    ]
    norms.append(trace["mhc_streams_final", layers - 1][-1].float().norm(dim=-1).tolist())
    for stream in range(len(norms[0])):
        values = [row[stream] for row in norms]
        numbers = " ".join(f"{value:5.1f}" for value in values)
        console.print(f"stream {stream}  [yellow]{sparkline(values)}[/]  {numbers}")
    console.print(f"[dim]At the input of layers 0 to {layers - 1}, then at the input of the head.[/]")


def show_experts(trace: Trace, layers: int) -> None:
    heading("7  Experts of the last token")
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("layer", style="dim")
    table.add_column("expert:weight")
    for layer in range(layers):
        chosen = sorted(trace["moe_topk", layer][-1].tolist(), key=lambda pair: -pair[1])
        table.add_row(str(layer), "  ".join(f"{int(expert):2d}:{weight:.2f}" for expert, weight in chosen))
    console.print(table)


def show_circuit(engine: birkhoff.Engine) -> None:
    """Find the sublayers that recall a name, verify them by ablating all others, and try them on other names."""
    heading("8  A circuit: how nano recalls a name")
    name, other = NAMES[0]
    circuit = engine.circuit(
        STORY.format(name), (name, other), baseline=STORY.format(other), faithfulness=0.9
    )
    measured = circuit.measured
    console.print(Text(f"{STORY.format(name)} …  instead of  {STORY.format(other)} …", "dim"))
    console.print(
        f"{circuit.metric}: {measured.full:+.1f}; with the other name in the story {measured.empty:+.1f}"
    )
    tokens = circuit.tokens or []
    for node in circuit.nodes:
        token = escape_control(tokens[node.position])
        console.print(Text(f"  {node.hook} of layer {node.layer} at token {node.position} {token!r}", "cyan"))
    for edge in circuit.edges[:4]:
        ends = " → ".join(_end(end, tokens) for end in (edge.source, edge.target))
        console.print(Text(f"    through stream {edge.stream}: {ends}  {edge.score:+.1f}"))
    shares = [
        circuit.evaluate(engine, STORY.format(a), (a, b), STORY.format(b)).faithfulness for a, b in NAMES[1:]
    ]
    console.print(
        f"{len(circuit)} of {circuit.candidates} nodes keep {circuit.faithfulness:.0%} of the difference with all "
        f"others as in the other story\n(random sets: {circuit.random:.0%}); without them "
        f"{1 - circuit.completeness:.0%} is left. On {len(shares)} other pairs of names they keep "
        f"{min(shares):.0%} to {max(shares):.0%}."
    )
    mean = engine.circuit(STORY.format(name), (name, other), baseline="mean", faithfulness=0.9)
    console.print(
        "[dim]This explains which name is recalled, not the sentence: everything the two stories share stays in place. "
        f"Against the\nmean of the text instead of the other story, {len(mean)} of {mean.candidates} nodes are needed "
        "for 90%, and fewer can do harm.[/]"
    )


def _end(end: tuple[str, int, int], tokens: list[str]) -> str:
    hook, layer, position = end
    place = hook if hook in ("embedding", "output") else f"{hook}[{layer}]"
    return f"{place} at {escape_control(tokens[position])!r}"


def show_crosscoders(engine: birkhoff.Engine) -> None:
    """Show where the features of a crosscoder write, and what the model does with a transcoder in place of experts."""
    shipped = {name: Crosscoder.load(path) for name, path in shipped_crosscoders("nano").items()}
    if not shipped:
        return
    heading("9  Dictionaries over several sites")
    ids = engine.prompt_ids(SENTENCE)
    crosscoder, transcoder = shipped["crosscoder"], shipped["transcoder"]
    trace = engine.trace(ids, [site.hook for site in crosscoder.inputs])
    active, norms = crosscoder.encode(trace), crosscoder.norms()
    places = ", ".join(str(site.layer) for site in crosscoder.outputs)
    console.print(f"A crosscoder: {crosscoder.features} features of the streams entering layers {places}.")
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("token", "feature", "activation", f"norm written at layers {places}"):
        table.add_column(column, style="cyan" if column == "token" else "")
    for token, row in list(zip(ids, active))[-5:]:
        value, feature = row.max(0)
        written = "  ".join(f"{norm:.2f}" for norm in norms[feature].tolist())
        text = escape_control(engine.tokenizer.decode([token]))
        table.add_row(text, f"#{int(feature)}", f"{float(value):.1f}", written)
    console.print(table)
    loss = crosscoder_loss(engine, transcoder, [ids], exclude=ids[:1])
    layer = transcoder.outputs[0].layer
    console.print(
        f"A transcoder: {transcoder.features} features of what enters the experts of layer {layer} give what leaves "
        f"them.\nLoss of the sentence in nats per token: {loss.plain:.2f}; with the transcoder in place of the experts "
        f"{loss.spliced:.2f}; with zeros {loss.ablated:.2f}."
    )


def write_files(trace: Trace) -> None:
    heading("10  Files written")
    OUT.mkdir(parents=True, exist_ok=True)
    kept = {
        f"{hook}.{layer}": trace[hook, layer].contiguous() for hook, layer in trace if hook.startswith("mhc_")
    }
    save_file(kept, OUT / "streams.safetensors")
    size = (OUT / "streams.safetensors").stat().st_size / 2**20
    console.print(f"{OUT / 'streams.safetensors'}, {size:.1f} MiB", soft_wrap=True)
    console.print(
        f"[dim]{len(kept)} tensors: every stream and every mixer of all {len(trace.logits)} tokens[/]"
    )


def main() -> None:
    began = time.perf_counter()
    console.print("[bold]Birkhoff[/]: run, read and steer DeepSeek-V4")
    with tempfile.TemporaryDirectory(prefix="birkhoff-tour-") as folder:
        engine, path, trained = load(Path(folder))
        with engine:
            layers = engine.config.num_hidden_layers
            show_model(path)
            output = show_answer(engine, trained)
            trace = engine.trace(output.prompt_token_ids + output.token_ids)
            if trained:
                show_steered(engine)
            show_mixing(engine, trace, output)
            if trained:
                show_features(engine)
            show_norms(trace, layers)
            show_experts(trace, layers)
            if trained:
                show_circuit(engine)
                show_crosscoders(engine)
            write_files(trace)
    heading("What to try next")
    if trained:
        console.print(
            ".venv/bin/birkhoff chat                         chat; /mix shows mixers, /steer steers"
        )
        console.print('.venv/bin/birkhoff generate --chat "Tell me a story" --steer "+1 spooky"')
        console.print(".venv/bin/birkhoff vectors list                 the vectors that ship with nano")
    else:
        console.print(".venv/bin/birkhoff synth random --like nano     write a random model")
        console.print(".venv/bin/birkhoff chat --model random          chat; /mix shows mixers")
    console.print("README.md                                       the same from Python")
    console.print(f"[dim]{time.perf_counter() - began:.1f} s from start to end[/]")


if __name__ == "__main__":
    main()
