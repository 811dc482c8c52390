"""One rank without vLLM: armed layers, the check at start, and requests that start, are cut, drafted and end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from birkhoff import Add, Project
from birkhoff.capture.store.reader import read_request
from birkhoff.errors import UnsupportedModel
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.vllm.armed_sites import ORDINARY, armed_schema
from birkhoff.vllm.model_state import V2Steps
from birkhoff.vllm.rank_requests import RankRequests, StepRows, armed_keys
from birkhoff.vllm.self_check import check_sites
from birkhoff.vllm.spec import FIELD, RankReport, RequestMark, RequestSpec, encode_edit, unpack_rows
from birkhoff.vllm.switched_model import SwitchedModel
from tests.vllm.toy import LAYERS, D, Seen, Toy, arm, embed

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": D, "num_hidden_layers": LAYERS}
ALL = dict.fromkeys(ORDINARY, tuple(range(LAYERS))) | {"final_hidden": (LAYERS - 1,)}
SCHEMA = armed_schema(CONFIG, "float32", ALL)
PROMPT = (5, 6, 7, 8)


class Rank:
    """A toy model with armed layers, and its requests. `caller` may stand between the layers and the hooks."""

    def __init__(self, armed=ALL, root=None, caller=None, start=0, stop=LAYERS):
        planner = RequestPlanner(SCHEMA, LAYERS, "toy", capture_root=root)
        self.requests = RankRequests(planner)
        self.model = Toy(start, stop)
        arm(self.model, armed, caller or self.requests.edit_in_place, self.requests.idle)
        self.keys = armed_keys(armed, range(start, stop))

    def check(self):
        forward = lambda count: self.model(embed([40 + i for i in range(count)]))  # noqa: E731
        return check_sites(self.requests.hooks, forward, self.keys, SCHEMA, LAYERS, 4, "rank 0")

    def prepare(self, key="k", edits=(), rows=({"hooks": {"post_mlp": [1]}, "positions": "all"},), **more):
        vectors = {}
        encoded = tuple(encode_edit(edit, vectors) for edit in edits)
        self.requests.add_vectors(vectors)
        return self.requests.prepare(RequestSpec(key, PROMPT, 10, encoded, tuple(rows), **more).to_text())

    def step(self, *parts, fail=False):
        """Parts are (request id, start, token ids, drafted)."""
        rows, ids = [], [90]  # a row of another request comes first
        for request_id, start, tokens, drafted in parts:
            rows.append(StepRows(request_id, len(ids), start, tokens, len(PROMPT), drafted))
            ids += tokens
        drafted = self.requests.begin(rows, len(ids))
        if fail:
            self.requests.hooks.fail()
            return None
        output = self.model(embed(ids))
        self.requests.end_step(drafted)
        return output

    def report(self, key, tokens, reason="length"):
        return RankReport(**self.requests.finish(key, reason, tokens))


def test_armed_and_idle_computes_the_same():
    x = embed([1, 2, 3, 4, 5])
    plain = Toy()(x.clone())
    rank = Rank()
    assert rank.requests.idle() and torch.equal(rank.model(x.clone()), plain)
    assert torch.allclose(rank.model.model.armed(x.clone()), plain, atol=1e-6)
    assert torch.equal(Rank({}).model.model.armed(x.clone()), plain)


def test_an_idle_step_runs_the_modules_of_vllm_and_others_share_what_has_no_site():
    model = Toy()
    own = model.model
    before = {name: id(module) for name, module in own.named_modules()}
    seen, idle = Seen(), [True]
    arm(model, {"post_mlp": (1,), "mlp_in": (2,), "final_hidden": (2,)}, seen, lambda: idle[0])
    assert {name: id(module) for name, module in own.named_modules()} == before
    assert model.model.own is own and model.model.end_layer == LAYERS, "attributes are vLLM's"
    armed = model.model.armed
    assert [layer is old for layer, old in zip(armed.layers, own.layers)] == [True, False, False]
    assert armed.layers[1].layer.mlp is own.layers[1].mlp and armed.layers[2].mlp.module is own.layers[2].mlp
    x = embed([1, 2, 3])
    output = model(x.clone())
    assert not seen
    idle[0] = False
    assert torch.allclose(model(x.clone()), output, atol=1e-6)
    assert set(seen) == {("post_mlp", 1), ("mlp_in", 2), ("final_hidden", 2)}


def test_both_models_run_in_the_first_call_if_they_are_compiled():
    ran = []
    own, armed = (lambda x, name=name: ran.append(name) or x for name in ("own", "armed"))
    model = SwitchedModel(nn.Identity(), nn.Identity(), lambda: True, warm=True)
    model.own.forward, model.armed.forward = own, armed
    assert (model(1), model(2)) == (1, 2) and ran == ["armed", "own", "own"]


@pytest.mark.parametrize("captures", [True, False])
def test_ranks_of_a_group_agree_whether_a_step_is_idle(captures):
    """One of them captures; all of them run the same code."""
    requests = RankRequests(RequestPlanner(SCHEMA, LAYERS, "toy"), captures=captures)
    last = {"hooks": {"post_mlp": [1]}, "positions": "last_prompt"}
    assert requests.prepare(RequestSpec("k", PROMPT, 10, rows=(last,)).to_text()) is None
    requests.start("1", "k")
    idle = []
    for start, tokens in ((0, list(PROMPT)), (4, [9])):
        drafted = requests.begin([StepRows("1", 0, start, tokens, len(PROMPT))], len(tokens))
        idle.append(requests.idle())
        requests.end_step(drafted)
    requests.begin([], 1)
    assert idle == [False, False] and requests.idle()


def test_the_check_at_start_passes_and_every_site_is_in_it():
    rank = Rank()
    assert rank.check() == len(rank.keys) == 6 * LAYERS + 1


@pytest.mark.parametrize(
    "fault, says",
    [
        ("missing", r"post_mlp\[1\] on rank 0 was never reached"),
        ("copied", r"post_mlp\[1\] on rank 0 has no effect"),
        ("other row", r"post_mlp\[1\] on rank 0 has no effect"),
        ("rounded", r"a known vector moved the probe row of post_mlp\[1\] on rank 0 by something else"),
    ],
)
def test_the_check_at_start_finds_what_is_wrong(fault, says, monkeypatch):
    def call(x, layer, site):
        broken = fault if (site.name, layer) == ("post_mlp", 1) else ""
        if broken == "missing":
            return
        if broken == "other row":
            x.copy_(rank.requests.at(layer)(site, x.roll(1, 0)).roll(-1, 0))
            return
        new = rank.requests.at(layer)(site, x)
        if broken != "copied" and new is not x:
            x.copy_(new)

    if fault == "rounded":  # an addition that loses bits

        def add(self, *given, **named):
            edit = resolve(self, *given, **named)
            sites = {key: replace(site, vector=site.vector * 1.001) for key, site in edit.sites.items()}
            return replace(edit, sites=sites) if ("post_mlp", 1) in sites else edit

        resolve = Add.resolve
        monkeypatch.setattr(Add, "resolve", add)
    rank = Rank(caller=call)
    with pytest.raises(UnsupportedModel, match=says):
        rank.check()


def test_rows_come_by_absolute_position():
    rank = Rank()
    v = torch.arange(D).float()
    assert rank.prepare(edits=[Add(v, "post_mlp", [1], scale=2.0)]) is None
    assert rank.prepare("plain") is None
    rank.requests.start("a", "k")
    rank.requests.start("b", "plain")
    rank.step(("a", 0, [5, 6, 7], False), ("b", 0, [5, 6, 7, 8], False))
    rank.step(("b", 4, [11], False), ("a", 3, [8], False))
    rank.step(("a", 4, [11], False))
    steered, plain = rank.report("k", 6), rank.report("plain", 6)
    assert steered.steered_positions() == {0, 1, 2, 3, 4} and plain.steered == []
    (rows,), (other,) = unpack_rows(steered.rows[0]), unpack_rows(plain.rows[0])
    assert rows.positions == other.positions == (0, 1, 2, 3, 4)
    assert rows.token_ids == other.token_ids == (5, 6, 7, 8, 11)
    wanted = embed([5, 6, 7, 8, 11])
    seen = Seen()
    model = Toy()
    arm(model, {"post_mlp": (1,)}, seen)
    model(wanted)
    assert torch.allclose(rows.tensor, seen["post_mlp", 1], atol=1e-5) and torch.equal(
        rows.tensor, other.tensor
    )


def test_a_preempted_request_delivers_nothing_twice():
    rank = Rank()
    rank.prepare()
    rank.requests.start("a", "k")
    rank.step(("a", 0, list(PROMPT), False))
    rank.step(("a", 4, [11], False))
    rank.requests.start("a", "k")  # vLLM sends it again
    rank.step(("a", 0, [*PROMPT, 11], False))
    rank.step(("a", 5, [12], False))
    (rows,) = unpack_rows(rank.report("k", 7).rows[0])
    assert rows.positions == (0, 1, 2, 3, 4, 5) and rows.token_ids == (*PROMPT, 11, 12)


def test_rejected_drafts_are_not_captured():
    rank = Rank()
    rank.prepare(edits=[Add(torch.ones(D), "pre_attn", [0])])
    rank.requests.start("a", "k")
    rank.step(("a", 0, list(PROMPT), False))
    rank.step(("a", 4, [11, 12, 13], True))  # 12 is kept, 13 is not
    rank.step(("a", 6, [14, 15], True))  # 15 is not
    report = rank.report("k", 8)
    (rows,) = unpack_rows(report.rows[0])
    assert rows.token_ids == (*PROMPT, 11, 12, 14) and rows.positions == tuple(range(7))
    assert report.steered_positions() == set(range(7))


def test_a_step_that_failed_is_captured_when_it_is_done_again():
    rank = Rank()
    rank.prepare()
    rank.requests.start("a", "k")
    rank.step(("a", 0, list(PROMPT), False), fail=True)
    rank.step(("a", 0, list(PROMPT), False))
    (rows,) = unpack_rows(rank.report("k", 5).rows[0])
    assert rows.positions == (0, 1, 2, 3)


@pytest.mark.parametrize("ended_first", [True, False])
def test_edits_stay_until_the_scheduler_has_dropped_the_request(ended_first):
    """Tokens that vLLM computes after the answer has ended are stored in the cache of the edited text."""
    rank = Rank()
    rank.prepare(edits=[Add(torch.full((D,), 9.0), "post_mlp", [1])])
    rank.requests.start("a", "k")
    rank.step(("a", 0, list(PROMPT), False))
    if ended_first:
        rank.requests.end("a")
        assert rank.report("k", 5).steered_positions() == {0, 1, 2, 3}
    else:
        assert rank.report("k", 5).steered_positions() == {0, 1, 2, 3}
        steered = rank.step(("a", 4, [11], False))
        plain = Toy()(embed([90, 11]))
        assert not torch.allclose(steered[1], plain[1], atol=1e-3)
        rank.requests.end("a")
    assert rank.requests.counts()["requests"] == 0 and not rank.requests.running
    assert rank.report("k", 5).errors == ["k is not known on this rank"]


def test_files_end_with_the_answer(tmp_path):
    """With `hold`, rows of tokens that were computed past a stop string are not written."""
    rank = Rank(root=tmp_path)
    files = {"hooks": {"post_mlp": [1], "pre_attn": [0]}, "positions": "all", "request_id": "a", "tag": "t"}
    assert rank.prepare(rows=(), files=files, hold=True) is None
    rank.requests.start("a", "k")
    rank.step(("a", 0, list(PROMPT), False))
    for position in (4, 5, 6):
        rank.step(("a", position, [20 + position], False))
    report = rank.report("k", 6, "stop")
    assert report.files["status"] == "ok" and report.files["rows"] == 10
    for entry in read_request(tmp_path / "t" / "a").values():
        assert list(entry.positions) == [0, 1, 2, 3, 4] and list(entry.token_ids) == [*PROMPT, 24]
    rank.requests.close()


def test_what_a_rank_refuses_is_said_and_nothing_is_kept():
    rank = Rank()
    refused = rank.prepare(edits=[Project([1.0, 2.0], "post_mlp", [1])])
    assert refused["code"] == "steering-invalid" and "2 numbers" in refused["message"]
    assert rank.requests.counts()["requests"] == 0
    rank.prepare()
    rank.requests.discard("k")
    rank.requests.start("a", "k")
    assert not rank.requests.running and rank.requests.counts()["requests"] == 0


class OwnState:
    """A model state of vLLM: what is asked of it is counted."""

    max_model_len = 77

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *given: self.asked.append(name) or {"positions": None}


class OwnV2Runner:
    """A V2 runner in the order of vLLM's: requests that ended or were preempted, new ones, the batch, the model."""

    def __init__(self, model):
        self.model = model
        self.model_state = OwnState()

    def execute_model(self, gone, new, parts, drafts=None):
        for request_id in gone:
            self.model_state.remove_request(request_id)
        for request_id, key in new:
            self.model_state.remove_request(request_id)
            extra = None if key is None else {FIELD: RequestMark(key).to_text()}
            params = SimpleNamespace(extra_args=extra)
            self.model_state.add_request(0, SimpleNamespace(req_id=request_id, sampling_params=params))
        ids = [token for _, _, tokens in parts for token in tokens]
        padded = torch.tensor([*ids, 0, 0])
        batch = SimpleNamespace(
            req_ids=[name for name, _, _ in parts],
            num_reqs=len(parts),
            query_start_loc_np=np.cumsum([0, *(len(tokens) for _, _, tokens in parts)]),
            num_computed_tokens_np=np.array([start for _, start, _ in parts]),
            num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
            input_ids=padded,
            num_tokens_after_padding=len(padded),
        )
        assert self.model_state.prepare_inputs(batch, None) == {"positions": None}
        if -1 in ids:
            raise RuntimeError("the step failed")
        return self.model(embed(padded.tolist()))


class HookedV2Runner(V2Steps, OwnV2Runner):
    pass


def v2_runner(rank):
    runner = HookedV2Runner(rank.model)
    runner.arm(rank.requests)
    return runner


def test_a_batch_of_the_v2_runner_has_the_same_rows():
    """The batch is made by hand: two hooked requests, one draft that is rejected, one other request, and padding."""
    rank = Rank()
    runner = v2_runner(rank)
    for key in ("k", "plain"):
        rank.prepare(key)
    assert runner.model_state.max_model_len == 77
    new = [("a", "k"), ("b", "plain"), ("other", None)]
    runner.execute_model([], new, [("b", 0, [5, 6]), ("other", 0, [1, 2, 3]), ("a", 0, [5, 6, 7, 8])])
    runner.execute_model([], [], [("a", 4, [11, 12]), ("b", 2, [7, 8]), ("other", 3, [4])], [1, 0, 0])
    with pytest.raises(RuntimeError, match="the step failed"):
        runner.execute_model([], [], [("b", 4, [11]), ("a", 5, [-1])])
    runner.execute_model([], [], [("b", 4, [11]), ("a", 5, [13])])
    for key, ids in (("k", (*PROMPT, 11, 13)), ("plain", (*PROMPT, 11))):
        (rows,) = unpack_rows(rank.report(key, len(ids) + 1).rows[0])
        assert rows.token_ids == ids and rows.positions == tuple(range(len(ids)))
    runner.execute_model(["a", "b", "other"], [], [("x", 0, [1])])
    assert not rank.requests.running and rank.requests.counts()["requests"] == 0


def test_a_preempted_request_of_the_v2_runner_is_hooked_again():
    """V2 removes a preempted request and adds it again, with its generated tokens as part of what is computed."""
    rank = Rank()
    runner = v2_runner(rank)
    rank.prepare(edits=[Add(torch.full((D,), 9.0), "post_mlp", [1], phase="decode")])
    runner.execute_model([], [("a", "k")], [("a", 0, list(PROMPT))])
    steered = runner.execute_model([], [], [("a", 4, [11])])
    plain = runner.execute_model(["a"], [], [("x", 4, [11])])
    assert not torch.allclose(steered[0], plain[0], atol=1e-3) and not rank.requests.running
    again = runner.execute_model([], [("a", "k")], [("a", 0, [*PROMPT, 11])])
    assert torch.allclose(again[4], steered[0], atol=1e-5)
    runner.execute_model([], [], [("a", 5, [12])])
    report = rank.report("k", 7)
    (rows,) = unpack_rows(report.rows[0])
    assert rows.token_ids == (*PROMPT, 11, 12) and report.steered_positions() == {4, 5}
    runner.execute_model(["a"], [], [("x", 0, [1])])
    assert rank.requests.counts()["requests"] == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 3))
def test_any_cut_of_the_text_captures_the_same(chunks, shared):
    ids = [*PROMPT, 11, 12, 13, 14, 15]
    rank = Rank()
    rank.prepare(edits=[Add(torch.ones(D), "post_attn", [1], phase="decode")])
    rank.requests.start("a", "k")
    start = 0
    for size in [*chunks, len(ids)]:
        tokens = ids[start : start + size]
        if tokens:
            rank.step(("a", start, tokens, False))
        start += len(tokens)
    report = rank.report("k", len(ids) + 1)
    (rows,) = unpack_rows(report.rows[0])
    assert rows.token_ids == tuple(ids) and report.steered_positions() == {4, 5, 6, 7, 8}
    rank.requests.end("a")
