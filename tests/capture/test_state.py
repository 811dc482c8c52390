"""T-STATE-1, captures: every hook in every mode is supported, rejected by a named rule, or skipped with a reason.

A cell is a hook and one field set to one of its forms, run through the engine in batches beside all other hooks, with
prompts cut into pieces. What it gives is compared with rows of a plain forward pass by the reference kernels that are
chosen, cut, projected, reduced and cast here by other means. "Runs but wrong" is a failure, and so is a cell that ends
otherwise than the table below says. Ragged hooks have their own tests in `tests/steering/test_attention_edits.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import birkhoff
from birkhoff import Capture
from birkhoff.capture.spec.validation import FIELDS
from birkhoff.capture.store.reader import CaptureEntry, read_request, read_sharded, to_torch
from birkhoff.convert.synth import synth
from birkhoff.errors import CaptureValidationError
from birkhoff.hooks.sites import SITES

L, P, OUT = 6, 20, 5  # layers, tokens of the prompt, tokens of the answer; the last of them is never run
RUN = P + OUT - 1
HOOKS = (*(site.name for site in SITES if not site.ragged), "mhc_streams_post_mlp", "post_block")
ABSENT = {"post_mlp", "post_block", "attn_z", "attn_out"}  # ordinary models have them
ONCE = {"mhc_streams_final", "mhc_head_mix", "final_hidden"}
STREAMED = {
    hook
    for hook in HOOKS
    if hook.startswith("mhc_streams_") or hook.endswith(("pre_mix", "post_mix", "head_mix"))
}
WIDE = {hook for hook in HOOKS if hook.startswith("mhc_streams_")}
FP8 = 1 / 16


@dataclass(frozen=True)
class Mode:
    """One form of one field, and its expected result, computed without the tested code."""

    name: str
    layers: Any = (2,)
    means_layers: tuple[int, ...] = (2,)
    positions: Any = "all_prompt"
    means: tuple[int, ...] = tuple(range(P))
    fields: dict[str, Any] = field(default_factory=dict)


def where(name: str, positions: Any, *means: int) -> Mode:
    return Mode(f"positions {name}", positions=positions, means=means)


def only(name: str, value: Any) -> Mode:
    label = "+".join(map(str, value)) if isinstance(value, list) else value
    return Mode(f"{name} {label}", fields={name: value})


MODES = [
    Mode("layers all", "all", tuple(range(L))),
    Mode("layers list", [0], (0,)),
    Mode("layers from the end", [0, -1], (0, 5)),
    Mode("layers ranges", {"layers": [1], "ranges": [[2, 3]]}, (1, 2, 3)),
    Mode("layers stride", {"every": 2, "from": 1}, (1, 3, 5)),
    where("all_prompt", "all_prompt", *range(P)),
    where("last_prompt", "last_prompt", P - 1),
    where("all_generated", "all_generated", *range(P, RUN)),
    where("all", "all", *range(RUN)),
    where("list", [0, 3, -1], 0, 3, P - 1),
    where("list beyond the prompt", [1, P + 2], 1, P + 2),
    where("window", {"prompt": {"window": [2, 6]}}, 2, 3, 4, 5),
    where("generated list", {"prompt": [4], "generated": [0, 2]}, 4, P, P + 2),
    where("token ids", {"prompt": {"token_ids": [77]}}, 5, 11),
    where("exclude", {"prompt": "all", "generated": "all", "exclude": {"window": [3, 22]}}, 0, 1, 2, 22, 23),
    *(only("capture_point", point) for point in ("before", "after")),
    *(only("dtype", dtype) for dtype in ("bf16", "fp16", "fp32", "fp8_e4m3")),
    *(only("reduce", kind) for kind in ("mean", "sum", "last", "max_norm")),
    *(only("streams", streams) for streams in ([0], [1, 3], [7])),
    *(only("project", name) for name in ("fits", "missing")),
    *(only("accepted_only", flag) for flag in (True,)),
    only("return", "inline"),
    Mode(
        "everything",
        "all",
        tuple(range(L)),
        "all",
        tuple(range(RUN)),
        {"streams": [0, 2], "project": "pair", "reduce": "mean", "dtype": "bf16"},
    ),
]
FILES = [
    *(
        Mode(f"file {name}", fields={"return": "file", "layout": name})
        for name in ("packed", "per_file", "sharded")
    ),
    Mode("handle", fields={"return": "handle"}),
    Mode("file packed fp8", fields={"return": "file", "layout": "packed", "dtype": "fp8_e4m3"}),
    Mode("file sharded mean", fields={"return": "file", "layout": "sharded", "reduce": "mean"}),
    Mode("file per_file projected", fields={"return": "file", "layout": "per_file", "project": "fits"}),
]


def declared(hook: str, mode: Mode) -> str:
    """The table: how a cell must end."""
    if hook in ABSENT:
        return "rejected V4"
    streams, project = mode.fields.get("streams"), mode.fields.get("project")
    if streams is not None and hook not in STREAMED:
        return "rejected"
    if streams == [7]:
        return "rejected"
    if project == "missing" or (project == "pair" and hook not in WIDE):
        return "rejected V12"
    return "supported"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "tiny"
    synth(path, "tiny", seed=9)
    return path


def open_engine(checkpoint, device="cpu", **options):
    """On a CPU by default, even if there is a GPU, where the engine would choose bfloat16."""
    engine = birkhoff.load(
        checkpoint,
        device=device,
        dtype="float32",
        max_requests=8,
        max_batch_tokens=48,
        cache_bytes=2**25,
        **options,
    )
    generator = torch.Generator().manual_seed(4)
    for hook, schema in engine.schema.items():
        engine.projections[f"fits {hook}"] = torch.randn(schema.width, 3, generator=generator)
    engine.projections["pair"] = torch.randn(2 * engine.config.hidden_size, 3, generator=generator)
    return engine


@pytest.fixture(scope="module")
def engine(checkpoint):
    with open_engine(checkpoint) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(checkpoint, engine):
    """The prompt, its answer, and every site of one whole forward pass over both, by the reference kernels on a CPU."""
    prompt = torch.randint(100, 500, (P,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt[5] = prompt[11] = 77
    answer = engine.generate(prompt, max_tokens=OUT, temperature=0, ignore_eos=True)
    with birkhoff.load(
        checkpoint, device="cpu", kernels="reference", max_requests=1, cache_bytes=2**25
    ) as other:
        trace = other.trace([*prompt, *answer.token_ids[:-1]])
    return prompt, answer.token_ids, trace


def name_of(project: str | None, hook: str) -> str | None:
    base = "mhc_streams_pre_attn" if hook == "mhc_streams_post_mlp" else hook
    return f"fits {base}" if project == "fits" else project


def capture_of(hook: str, mode: Mode) -> Capture:
    fields = dict(mode.fields)
    if "project" in fields:
        fields["project"] = name_of(fields["project"], hook)
    return Capture(
        {hook: list(mode.layers) if isinstance(mode.layers, tuple) else mode.layers}, mode.positions, **fields
    )


def expected(trace, projections, hook: str, layer: int, mode: Mode) -> torch.Tensor:
    """What the cell should hold, as float64 before the cast."""
    site = (hook, layer)
    if hook == "mhc_streams_post_mlp":
        site = ("mhc_streams_pre_attn", layer + 1) if layer + 1 < L else ("mhc_streams_final", layer)
    rows = trace[site].double()[list(mode.means)]
    if mode.fields.get("streams") is not None and hook in STREAMED:
        rows = torch.cat([rows[:, stream : stream + 1] for stream in mode.fields["streams"]], dim=1)
    if mode.fields.get("project") is not None:
        matrix = projections[name_of(mode.fields["project"], hook)].double()
        rows = torch.einsum("nw,wc->nc", rows.reshape(len(rows), -1), matrix)
    kind = mode.fields.get("reduce")
    if kind == "max_norm":
        return rows[rows.reshape(len(rows), -1).pow(2).sum(1).argmax()][None]
    return {None: rows, "mean": rows.mean(0, True), "sum": rows.sum(0, True), "last": rows[-1:]}[kind]


def close_enough(actual: torch.Tensor, scale: torch.Tensor | None, right: torch.Tensor, mode: Mode) -> bool:
    """Within the rounding of the stored dtype, on top of what two kernels may differ by."""
    if tuple(actual.shape) != tuple(right.shape):
        return False
    dtype, values = mode.fields.get("dtype"), actual.double()
    relative = {None: 0.0, "fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8_e4m3": FP8}[dtype]
    slack = 2e-4 * max(1.0, float(right.abs().max()))
    if dtype == "fp8_e4m3":
        per_row = scale.double().reshape(-1, *[1] * (values.dim() - 1))
        values, slack = values * per_row, slack + float(per_row.max()) * 2.0**-9
    return bool(((values - right).abs() <= relative * right.abs() * 1.01 + slack).all())


def layers_of(hook: str, mode: Mode) -> tuple[int, ...]:
    return (L - 1,) if hook in ONCE else mode.means_layers


def label_ok(positions, token_ids, mode: Mode, ids: list[int], count: int) -> bool:
    if mode.fields.get("reduce") in ("mean", "sum"):
        return not positions
    if mode.fields.get("reduce") is not None:
        return len(positions) == count == 1 and token_ids[0] == ids[positions[0]]
    return tuple(positions) == mode.means and list(token_ids) == [ids[position] for position in mode.means]


def run(engine, prompt, mode: Mode) -> tuple[dict[str, str], dict[str, Any]]:
    """The validation result of every cell of this mode, and the outputs of the accepted ones."""
    states, captures = {}, {}
    for hook in HOOKS:
        try:
            capture = capture_of(hook, mode)
            engine._capture_planner.plan(capture, tuple(prompt), OUT).close("cancelled", 0)
            captures[hook] = capture
        except CaptureValidationError as error:
            states[hook] = f"rejected {error.rule}".rstrip() if error.rule else "rejected"
            assert error.path.startswith("capture")
    if not captures:
        return states, {}
    outputs = engine.generate(
        [prompt] * len(captures),
        max_tokens=OUT,
        temperature=0,
        ignore_eos=True,
        capture=list(captures.values()),
    )
    return states, dict(zip(captures, outputs))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_t_state_1_every_hook_in_memory(engine, plain, mode):
    prompt, answer, trace = plain
    ids = [*prompt, *answer]
    states, outputs = run(engine, prompt, mode)
    for hook, output in outputs.items():
        assert output.token_ids == answer, hook  # capturing changed nothing
        acts = output.acts
        right = all(
            close_enough(
                acts[hook, layer].tensor,
                acts[hook, layer].scale,
                expected(trace, engine.projections, hook, layer, mode),
                mode,
            )
            and label_ok(
                acts[hook, layer].positions, acts[hook, layer].token_ids, mode, ids, len(acts[hook, layer])
            )
            for layer in layers_of(hook, mode)
        )
        states[hook] = (
            "supported" if right and len(acts) == len(set(layers_of(hook, mode))) else "runs but wrong"
        )
    assert states == {hook: declared(hook, mode) for hook in HOOKS}


@pytest.mark.parametrize("mode", FILES, ids=lambda mode: mode.name)
def test_t_state_1_every_hook_in_files(checkpoint, plain, mode, tmp_path):
    prompt, answer, trace = plain
    ids, states = [*prompt, *answer], {}
    with open_engine(checkpoint, capture_root=tmp_path) as engine:
        projections = engine.projections
        captures = {}
        for hook in HOOKS:
            try:
                capture = Capture.from_json(
                    capture_of(hook, mode).to_json() | {"request_id": hook, "tag": "t"}
                )
                output = engine.generate(
                    prompt, max_tokens=OUT, temperature=0, ignore_eos=True, capture=capture
                )
                assert output.capture_results["filesystem"].status == "ok" and output.token_ids == answer
                captures[hook] = capture
            except CaptureValidationError as error:
                states[hook] = f"rejected {error.rule}"
    shards = read_sharded(tmp_path / "t") if mode.fields.get("layout") == "sharded" else None
    for hook in captures:
        entries = shards[hook] if shards is not None else read_request(tmp_path / "t" / hook)
        assert len(entries) == len(set(layers_of(hook, mode)))
        (entry,) = entries.values()
        assert isinstance(entry, CaptureEntry)
        scale = None if entry.scale is None else torch.from_numpy(entry.scale)
        right = expected(trace, projections, hook, layers_of(hook, mode)[0], mode)
        good = close_enough(to_torch(entry), scale, right, mode)
        good &= label_ok(entry.positions or (), entry.token_ids or (), mode, ids, len(entry))
        states[hook] = "supported" if good else "runs but wrong"
    assert states == {hook: declared(hook, mode) for hook in HOOKS}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_t_state_1_every_hook_on_a_device(checkpoint, plain, mode):
    with open_engine(checkpoint, device="cuda") as engine:
        test_t_state_1_every_hook_in_memory(engine, plain, mode)


def test_t_state_1_the_table_knows_every_hook_and_field():
    """A hook or field that is added without cells fails here."""
    assert {site.name for site in SITES if not site.ragged} <= set(HOOKS)
    varied = {name for mode in [*MODES, *FILES] for name in mode.fields} | {
        "hooks",
        "positions",
        "request_id",
        "tag",
    }
    assert varied == set(FIELDS)
    states = [declared(hook, mode) for mode in [*MODES, *FILES] for hook in HOOKS]
    assert states.count("supported") > 400 and all(
        state.split()[0] in ("supported", "rejected") for state in states
    )
