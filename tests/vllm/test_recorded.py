"""What CUDA graphs record of the hooks, without vLLM and without a GPU: a step is traced once into its operations, with
nothing active, and these are run again for other requests. Python of ours is not run in a replay, as in a graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from birkhoff import Add, Clamp, Project
from birkhoff.errors import UnsupportedModel
from birkhoff.hooks.vector_table import Tables
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.vllm.armed_sites import ORDINARY, armed_schema
from birkhoff.vllm.rank_requests import RankRequests, StepRows, armed_keys
from birkhoff.vllm.recorded_sites import RecordedSites, RecordedSteps
from birkhoff.vllm.self_check import check_recorded
from birkhoff.vllm.spec import RankReport, RequestSpec, encode_edit, unpack_rows
from tests.vllm import toy
from tests.vllm.toy import LAYERS, D, Toy, embed

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": D, "num_hidden_layers": LAYERS}
ALL = dict.fromkeys(ORDINARY, tuple(range(LAYERS))) | {"final_hidden": (LAYERS - 1,)}
SCHEMA = armed_schema(CONFIG, "float32", ALL)
KEYS = armed_keys(ALL, range(LAYERS))
ROWS = 6  # of a recorded step, padding included
VECTORS = [torch.randn(D, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
EVERY = {"hooks": dict.fromkeys(ORDINARY, "all"), "positions": "all"}


class GraphRank:
    """A rank whose steps of `ROWS` rows are replays, if its requests fit them and `graphs` is true."""

    def __init__(self, graphs=True, arm=True):
        tables = Tables(fixed=graphs, max_slots=64, max_rows=64)
        recorded = RecordedSites(KEYS, SCHEMA, tables, ROWS + 2) if graphs else None
        self.in_graph = False
        planner = RequestPlanner(SCHEMA, LAYERS, "toy", tables=tables)
        self.requests = RankRequests(planner, recorded=recorded, in_graph=lambda: self.in_graph)
        self.model = Toy()
        if arm:
            toy.arm(self.model, ALL, self.requests.edit_in_place, self.requests.idle)
        self.replay = None
        self.replays = 0
        if graphs:
            self.in_graph = True
            with torch.no_grad():
                self.replay = make_fx(self.model)(embed(range(ROWS)))
            self.in_graph = False

    def add(self, key, prompt_len, edits=(), rows=(EVERY,)):
        vectors = {}
        encoded = tuple(encode_edit(edit, vectors) for edit in edits)
        self.requests.add_vectors(vectors)
        spec = RequestSpec(key, tuple(range(prompt_len)), 50, encoded, tuple(rows))
        assert self.requests.prepare(spec.to_text()) is None
        self.requests.start(key, key)

    def step(self, parts, num_rows=ROWS):
        """Parts are (request, start, token ids, prompt length); other rows are of requests without hooks."""
        steps, ids = [], []
        for key, start, tokens, prompt_len in parts:
            if key in self.requests.running:
                steps.append(StepRows(key, len(ids), start, tokens, prompt_len))
            ids += tokens
        ids += [0] * (num_rows - len(ids))
        fits = self.requests.recordable() if self.requests.running else True
        self.in_graph = self.replay is not None and num_rows == ROWS and fits
        self.replays += self.in_graph
        drafted = self.requests.begin(steps, num_rows) if self.requests.running else self.requests.skip()
        output = (self.replay if self.in_graph else self.model)(embed(ids))
        if drafted is not None:
            self.requests.end_step(drafted)
        self.in_graph = False
        return output

    def finish(self, key, num_tokens):
        report = RankReport(**self.requests.finish(key, "length", num_tokens))
        self.requests.end(key)
        rows = {(rows.hook, rows.layer): rows for packed in report.rows for rows in unpack_rows(packed)}
        return report.steered_positions(), rows


class Both:
    """The same steps, with graphs and without; outputs and captured rows must agree."""

    def __init__(self):
        self.ranks = [GraphRank(True), GraphRank(False)]

    def add(self, *given, **named):
        for rank in self.ranks:
            rank.add(*given, **named)

    def step(self, parts, num_rows=ROWS):
        graph, eager = (rank.step(parts, num_rows) for rank in self.ranks)
        assert torch.allclose(graph, eager, atol=1e-5)
        return graph

    def finish(self, key, num_tokens):
        (steered, rows), (also_steered, wanted) = (rank.finish(key, num_tokens) for rank in self.ranks)
        assert steered == also_steered and set(rows) == set(wanted)
        for site, part in wanted.items():
            assert rows[site].positions == part.positions and rows[site].token_ids == part.token_ids
            assert torch.allclose(rows[site].tensor, part.tensor, atol=1e-5), site
        return steered, rows


@pytest.fixture(scope="module")
def both():
    return Both()


def test_a_graph_recorded_without_requests_captures_and_steers(both):
    graph = both.ranks[0]
    graph.replays = 0
    plain = both.step([("other", 0, [1, 2, 3], 3)])
    both.add("a", 2, [Add(VECTORS[0], "post_mlp", [1], scale=3.0)])
    both.add("b", 2, [Add(VECTORS[1], "pre_attn", "all"), Add(VECTORS[2], "post_attn", [0], where=[0])])
    both.step([("a", 0, [1, 2], 2), ("b", 0, [5, 6], 2)])
    moved = both.step([("a", 2, [7], 2), ("other", 3, [4], 3), ("b", 2, [8], 2)])
    steered, rows = both.finish("a", 4)
    assert steered == {0, 1, 2} and len(rows) == len(KEYS)
    assert rows["post_mlp", 1].positions == (0, 1, 2) and rows["post_mlp", 1].token_ids == (1, 2, 7)
    both.finish("b", 4)
    assert graph.replays == 3
    assert torch.equal(both.step([("other", 0, [1, 2, 3], 3)]), plain), "nothing of the requests is left"
    unsteered = both.step([("x", 2, [7], 2), ("other", 3, [4], 3), ("y", 2, [8], 2)])
    assert not torch.allclose(unsteered[0], moved[0]) and torch.equal(unsteered[1], moved[1])


def test_vectors_of_a_waiting_request_do_not_reach_plain_rows(both):
    """A preempted request keeps its rows of the tables while steps without it are replayed."""
    plain = both.step([("other", 0, [1, 2, 3], 3)])
    both.add("a", 2, [Add(VECTORS[0], "post_mlp", "all", scale=9.0)])
    both.step([("a", 0, [1, 2], 2)])
    for rank in both.ranks:  # its rows are of nobody in this step
        rank.in_graph = rank.replay is not None
        drafted = rank.requests.begin([], ROWS)
        output = (rank.replay or rank.model)(embed([1, 2, 3, 0, 0, 0]))
        rank.requests.end_step(drafted)
        rank.in_graph = False
        assert torch.allclose(output, plain, atol=1e-5)
    both.finish("a", 3)


@pytest.mark.parametrize(
    "edits, rows",
    [
        ([Clamp(VECTORS[0], "post_attn", [1], min=0.5, max=1.0)], (EVERY,)),
        ([Project(VECTORS[1], "post_mlp", [2])], (EVERY,)),
        ([Add(vector, "post_mlp", [1]) for vector in VECTORS[:3]], (EVERY,)),
        ([Add(VECTORS[0], "post_mlp", [1], norm_match=True)], ()),
        ([], ({**EVERY, "capture_point": "after"},)),
    ],
    ids=["clamp", "project", "three vectors", "norm", "after"],
)
def test_what_does_not_fit_runs_without_a_graph(both, edits, rows):
    both.ranks[0].replays = 0
    both.add("a", 2, edits, rows)
    both.add("b", 2, [Add(VECTORS[3], "pre_attn", [0])])
    both.step([("a", 0, [1, 2], 2), ("b", 0, [1, 2], 2)])
    assert both.ranks[0].replays == 0
    both.finish("a", 3)
    both.step([("b", 2, [3], 2)])
    assert both.ranks[0].replays == 1, "the next step has only the request that fits"
    both.finish("b", 4)


def test_buffers_stay_in_place():
    rank = GraphRank()
    tap = rank.requests.recorded._tap

    def addresses():
        tables = rank.requests.recorded.tables
        parts = [part for hook, layer in KEYS for part in tables.site((hook, layer, "both"))]
        return [part.data_ptr() for part in (*parts, tap.buffer.data, tap._token_rows)]

    before = addresses()
    for number in range(25):
        vector = torch.full((D,), float(number))
        rank.add(f"r{number}", 1, [Add(vector, "post_mlp", "all"), Add(-vector, "pre_attn", "all")])
    rank.step([(f"r{number}", 0, [number], 1) for number in range(ROWS)])
    assert addresses() == before and rank.replays == 1


EDITS = st.lists(
    st.builds(
        lambda vector, hook, layers, scale, phase: Add(
            VECTORS[vector], hook, sorted(layers), scale=scale, phase=phase
        ),
        st.integers(0, 3),
        st.sampled_from([hook for hook in ORDINARY if hook != "final_hidden"]),
        st.sets(st.integers(0, LAYERS - 1), min_size=1),
        st.sampled_from([1.0, -2.0]),
        st.sampled_from(["both", "prefill", "decode"]),
    ),
    max_size=2,
)


@given(
    st.lists(st.tuples(st.integers(1, 4), EDITS), min_size=1, max_size=4),
    st.lists(st.tuples(st.sets(st.integers(0, 3)), st.sampled_from([ROWS, ROWS + 2])), max_size=8),
)
def test_replays_equal_steps_without_a_graph(both, requests, moves):
    """Requests come and go in any order; steps of another size run without a graph in between."""
    length = {str(index): 0 for index in range(len(requests))}
    try:
        run(both, requests, moves, length)
    finally:
        for rank in both.ranks:
            for key in length:
                rank.finish(key, 1)


def run(both, requests, moves, length):
    for index, (prompt_len, edits) in enumerate(requests):
        both.add(str(index), prompt_len, edits)
    for chosen, num_rows in moves:
        parts, room = [], num_rows
        for key in sorted(str(index) for index in chosen if index < len(requests)):
            prompt_len = requests[int(key)][0]
            count = min(prompt_len, room) if length[key] == 0 else 1
            if count and (length[key] or count == prompt_len) and room >= count:
                parts.append((key, length[key], list(range(length[key], length[key] + count)), prompt_len))
                length[key] += count
                room -= count
        both.step(parts, num_rows)
    for key, computed in length.items():
        both.finish(key, computed + 1)


def test_the_check_at_start_compares_replays_with_steps_without_a_graph():
    rank = GraphRank()
    hooks, recorded = rank.requests.hooks, rank.requests.recorded
    ids = [3 * number + 1 for number in range(ROWS)]

    def forward(count):
        return rank.model(embed(ids))[:count]

    def replay(count, graph=None):
        return (graph or rank.replay)(embed(ids))[:count]

    def check(replay=replay, steps=None):
        steps = steps or RecordedSteps(hooks, recorded)
        args = (recorded.tables, KEYS, SCHEMA, LAYERS, 4, "rank 0")
        return check_recorded(hooks, forward, steps, replay, *args)

    bare = make_fx(Toy())(embed(range(ROWS)))
    with pytest.raises(UnsupportedModel, match="rank 0, in a recorded graph, is captured with other numbers"):
        check(lambda count: replay(count, bare))
    assert check() == len(KEYS)
    assert recorded.tables.rows_used == 0

    class NotFilled(RecordedSteps):
        def begin(self, spans, num_rows):
            hooks.begin(spans, num_rows)

    with pytest.raises(UnsupportedModel, match="another output with its edit"):
        check(steps=NotFilled(hooks, recorded))
