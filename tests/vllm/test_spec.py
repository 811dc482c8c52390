"""What the front and the ranks exchange survives the exchange."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff import Add, Call, Clamp, Gate, Patch, Project, SaeSet, Scale
from birkhoff.errors import BirkhoffError
from birkhoff.hooks.plan import SiteRows
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.sae.sae_fields import parse_intervention
from birkhoff.steering.position_rows import PositionRows
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.vllm.armed_sites import V4, armed_schema, parse_hooks
from birkhoff.vllm.front_planner import VllmPlanner
from birkhoff.vllm.rank_requests import RankRequests
from birkhoff.vllm.spec import (
    FIELD,
    RankReport,
    RequestMark,
    RequestSpec,
    decode_edit,
    decode_vector,
    encode_edit,
    join_reports,
    pack_rows,
    ranges,
    unpack_rows,
)
from birkhoff.vllm.vectors_on_ranks import VectorsOnRanks

FLOATS = st.floats(-1e6, 1e6, width=32)


def test_a_mark_travels_in_extra_args():
    mark = RequestMark("r7", "a1b2", False)
    assert RequestMark.of({FIELD: mark.to_text(), "other": 1}) == mark
    assert RequestMark.of(None) is None and RequestMark.of({"other": 1}) is None


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple),
    st.integers(1, 99),
    st.booleans(),
    st.none() | st.just({"hooks": {"post_mlp": [1]}, "tag": "t", "request_id": "a"}),
)
def test_a_spec_is_read_back(ids, max_tokens, hold, files):
    spec = RequestSpec("k", ids, max_tokens, ({"op": "sae"},), ({"hooks": {"pre_attn": "all"}},), files, hold)
    assert RequestSpec.from_text(spec.to_text()) == spec


@pytest.mark.parametrize(
    "edit",
    [
        Add([1.0, 2.5], "post_mlp", [1], scale=-3.0, where=[0, -1]),
        Add(SteeringVector({1: [1.0, 2.0], 3: [0.5, 0.25]}, "add", "post_mlp")),
        Project([3.0, 4.0], "pre_attn", "all", phase="decode"),
        Clamp([0.0, 2.0], "post_attn", [0], min=1.0, max=2.0),
        Patch(0, "post_mlp", [2]),
        Patch("identity", "mhc_attn_res_mix", [1]),
        Patch({"permutation": [1, 0]}, "mhc_attn_res_mix", [1]),
        Scale(0.5, "mlp_out", [2]),
        Add([1.0, 2.5], "post_mlp", [1], when=Gate([3.0, 4.0], "pre_attn", 0, above=1.0)),
        Patch(PositionRows({0: [1.0, 2.0], 4: [3.0, 5.0]}), "post_mlp", [2]),
        SaeSet("dictionary", {5: 2.0}),
    ],
    ids=lambda edit: type(edit).__name__,
)
def test_an_edit_is_the_same_on_a_rank(edit):
    vectors: dict[str, str] = {}
    raw = encode_edit(edit, vectors)
    if isinstance(edit, SaeSet):
        assert parse_intervention(raw, "") == edit and not vectors
        return
    again = decode_edit(raw, {digest: decode_vector(text) for digest, text in vectors.items()})
    assert type(again) is type(edit) and again.to_json() == edit.to_json()
    assert all(len(digest) == 32 for digest in vectors)


V4_CONFIG = {"architectures": [V4], "hidden_size": 2, "hc_mult": 2, "num_hidden_layers": 3}


class Front:
    """A front and one rank, without vLLM."""

    def __init__(self, hooks=None):
        armed = parse_hooks(hooks, V4, 3)
        schema = armed_schema(V4_CONFIG, "float32", armed)
        self.planner = VllmPlanner(schema, 3, "m", armed, lambda *given: [])
        self.rank = RankRequests(RequestPlanner(schema, 3, "m"))

    def prepare(self, edits):
        planned = self.planner.plan([1, 2, 3], 5, self.planner.edits(edits, [1, 2, 3], 5))
        self.rank.add_vectors(planned.vectors)
        return planned, self.rank.prepare(planned.spec.to_text())


@pytest.mark.parametrize(
    "edit",
    [
        Scale(0.5, "mhc_attn_res_mix", [1], renormalise=True),
        Patch("identity", "mhc_ffn_res_mix", "all"),
        Patch({"permutation": [1, 0]}, "mhc_attn_res_mix", [1]),
        Add("calm", "post_attn", [1], when=Gate("calm", "pre_attn", 0, above=1.0)),
        Add([1.0, 2.0], "post_attn", [1], when=Gate(tokens="digits")),
    ],
    ids=["scale", "identity", "permutation", "gate by name", "gate by tokens"],
)
def test_what_only_the_front_knows_is_sent_along(edit):
    front = Front()
    front.planner.steering.modules["calm"] = [1.0, 2.0]
    front.planner.steering.token_texts = lambda: ["a", "1", "22", "b"]
    planned, refused = front.prepare([edit])
    assert refused is None
    (request,) = front.rank._requests.values()
    assert request.plan.decode_digest == planned.decode_digest is not None


def test_edits_that_cannot_run_on_a_rank_are_refused_in_front():
    front = Front({"post_attn": [1]})
    for edit, says in (
        (Call(lambda rows: rows, "post_attn", [1]), "functions are not sent"),
        (Add([1.0, 2.0], "post_attn", [1], when=Gate([1.0, 2.0], "pre_attn", 0, above=1.0)), "pre_attn"),
        (Add([1.0, 2.0], "post_attn", [2]), r"post_attn\[2\] is not armed"),
    ):
        with pytest.raises(BirkhoffError, match=says):
            front.prepare([edit])


@given(
    st.lists(FLOATS, min_size=1, max_size=6),
    st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True).map(sorted),
    st.integers(0, 21),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_are_cut_at_the_end_of_the_answer(numbers, positions, stop, dtype):
    tensor = torch.tensor(numbers).expand(len(positions), -1).to(dtype)
    rows = SiteRows("post_mlp", 3, tensor, tuple(positions), tuple(position + 100 for position in positions))
    (again,) = unpack_rows(pack_rows({("post_mlp", 3): rows}, stop))
    kept = tuple(position for position in positions if position < stop)
    assert (again.hook, again.layer, again.positions) == ("post_mlp", 3, kept)
    assert again.token_ids == tuple(position + 100 for position in kept)
    assert torch.equal(again.tensor, tensor[: len(kept)]) and again.tensor.dtype == dtype


@given(st.sets(st.integers(0, 40)))
def test_ranges_hold_exactly_their_positions(positions):
    assert RankReport(ranges(positions)).steered_positions() == positions


def test_the_parts_of_a_capture_are_one_result():
    part = {"status": "ok", "id": "a", "rows": 3, "bytes": 12, "keys": 1, "durable": True}
    first = part | {"paths": ["t/a/packed-pp00.bin"], "sha256": {"t/a/packed-pp00.bin": "00"}}
    second = part | {"paths": ["t/a/packed-pp01.bin"], "status": "partial_error", "error": "dropped"}
    steered, result = join_reports([RankReport([(0, 2)], files=first), RankReport([(0, 2)], files=second)])
    assert steered == {0, 1} and result is not None
    assert (result.status, result.error, result.rows, result.bytes) == ("partial_error", "dropped", 6, 24)
    assert result.paths == ("t/a/packed-pp00.bin", "t/a/packed-pp01.bin") and result.durable
    assert join_reports([RankReport([(4, 5)])]) == ({4}, None)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
def test_the_ranks_have_every_vector_that_a_request_names(moves):
    book = VectorsOnRanks(kept=2)
    there: set[str] = set()
    running: list[str] = []
    for begins, number in moves:
        digest = str(number)
        if begins:
            missing, dropped = book.use({digest: "text"})
            there |= set(missing)
            assert set(dropped) <= there
            there -= set(dropped)
            running.append(digest)
        elif digest in running:
            running.remove(digest)
            book.release([digest])
        assert set(running) <= there
