"""Capture and steering over HTTP equal the Python API: same edits, rows and numbers (T-HTTP-1)."""

from __future__ import annotations

import base64
import json
import re
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors

import birkhoff
from birkhoff import (
    Add,
    AttentionEdit,
    Capture,
    Clamp,
    ExpertSet,
    Gate,
    Patch,
    Project,
    SaeReconstruct,
    SaeSet,
    Scale,
)
from birkhoff.analysis.contrast import contrast_rows, vector_of
from birkhoff.capture.store.reader import read_request
from tests.cli.conftest import ROOT
from tests.server.conftest import user

CHAT, MESSAGES = "/v1/chat/completions", user("Tell me a story about a fox.")
SHARED = {"temperature": 1, "seed": 11, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(served, dictionary):
    """The same model in Python, with the same modules and SAEs."""
    with birkhoff.load("nano") as loaded:
        loaded.attach("delta", dictionary)
        loaded.attach("full", dictionary, kind="full")
        generator = torch.Generator().manual_seed(5)
        for name, width in (("wide", 1536), ("narrow", 384)):
            vector = torch.randn(width, generator=generator)
            loaded.modules[name] = vector
            body = {"name": name, "vector": vector.tolist(), "replace": True}
            assert served.post("/v1/steering/modules/register", body).status_code == 200
        yield loaded


def packed(vector: np.ndarray, layer: int, scale: float) -> dict:
    data = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {
        "dtype": "float32",
        "shape": [1, len(vector)],
        "layer_indices": [layer],
        "data": data,
        "scales": [scale],
    }


VECTOR = np.random.default_rng(3).normal(size=1536).astype(np.float32)
NARROW = np.random.default_rng(4).normal(size=384).astype(np.float32)
STREAMS, OUT = "mhc_streams_pre_attn", "mlp_out"
CASES = {
    "interventions": (
        {
            "interventions": [
                {
                    "op": "add",
                    "at": {"hook": STREAMS, "layers": [4]},
                    "vector": "@wide",
                    "streams": [1],
                    "scale": 2.0,
                },
                {"op": "clamp", "at": {"hook": OUT, "layers": [3]}, "vector": "@narrow", "max": 0.0},
            ]
        },
        [Add("wide", STREAMS, [4], 2.0, [1]), Clamp("narrow", OUT, [3], max=0.0)],
    ),
    "steering_vectors": (
        {"steering_vectors": {STREAMS: packed(VECTOR, 4, 2.0)}},
        [Add(VECTOR, STREAMS, [4], 2.0, path="carry")],
    ),
    "float lists": (
        {"steering_vectors": {OUT: {"2": NARROW.tolist()}}},
        [Add(NARROW, OUT, [2], path="carry")],
    ),
    "prefill only": (
        {"prefill_steering_vectors": {OUT: packed(NARROW, 2, 4.0)}},
        [Add(NARROW, OUT, [2], 4.0, phase="prefill", path="carry")],
    ),
    "decode only": (
        {"decode_steering_vectors": {OUT: packed(NARROW, 2, 4.0)}},
        [Add(NARROW, OUT, [2], 4.0, phase="decode", path="carry")],
    ),
    "project": (
        {"interventions": [{"op": "project", "at": {"hook": OUT, "layers": [1]}, "vector": NARROW.tolist()}]},
        [Project(NARROW, OUT, [1])],
    ),
    "patch": (
        {
            "interventions": [
                {
                    "op": "patch",
                    "at": {"hook": OUT, "layers": [6]},
                    "source": "zeros",
                    "where": {"generated": "all"},
                }
            ]
        },
        [Patch(0, OUT, [6], where={"generated": "all"})],
    ),
    "mixers": (
        {
            "interventions": [
                {"op": "patch", "at": {"hook": "mhc_res_mix", "layers": "all"}, "source": "identity"},
                {"op": "scale", "at": {"hook": "mhc_pre_mix", "layers": [3]}, "factor": 0, "streams": [2]},
                {"op": "clamp", "at": {"hook": "mhc_post_mix", "layers": [1]}, "max": 0.5},
            ]
        },
        [
            Patch("identity", "mhc_res_mix", "all"),
            Scale(0, "mhc_pre_mix", [3], streams=[2]),
            Clamp(None, "mhc_post_mix", [1], max=0.5),
        ],
    ),
    "gates": (
        {
            "interventions": [
                {
                    "op": "add",
                    "at": {"hook": OUT, "layers": [4]},
                    "vector": "@narrow",
                    "scale": 3.0,
                    "when": {"vector": NARROW.tolist(), "hook": OUT, "layer": 2, "above": 0.0},
                },
                {
                    "op": "scale",
                    "at": {"hook": OUT, "layers": [5]},
                    "factor": 0,
                    "when": {"module": "delta", "feature": 3, "above": 0.1},
                },
                {
                    "op": "scale",
                    "at": {"hook": OUT, "layers": [1]},
                    "factor": 2,
                    "when": {"tokens": "letters"},
                },
            ]
        },
        [
            Add("narrow", OUT, [4], 3.0, when=Gate(NARROW, OUT, 2, above=0.0)),
            Scale(0, OUT, [5], when=Gate(module="delta", feature=3, above=0.1)),
            Scale(2, OUT, [1], when=Gate(tokens="letters")),
        ],
    ),
    "experts": (
        {
            "interventions": [
                {"op": "experts", "at": {"layers": [1, 5]}, "force": [3], "add": {"2": 0.5}},
                {
                    "op": "experts",
                    "at": {"layers": "all"},
                    "ban": [0],
                    "weights": {"3": 1.0},
                    "phase": "decode",
                },
            ]
        },
        [
            ExpertSet([1, 5], force=[3], add={2: 0.5}),
            ExpertSet("all", ban=[0], weights={3: 1.0}, phase="decode"),
        ],
    ),
    "attention": (
        {
            "interventions": [
                {"op": "attention", "at": {"layers": "all"}, "mask": {"text": "fox"}, "phase": "decode"},
                {"op": "attention", "at": {"layers": [2, 5]}, "heads": [0, 1]},
                {"op": "attention", "at": {"layers": "all"}, "sink": 0},
            ]
        },
        [
            AttentionEdit("all", mask={"text": "fox"}, phase="decode"),
            AttentionEdit([2, 5], heads=[0, 1]),
            AttentionEdit("all", sink=0.0),
        ],
    ),
    "steering_name": ({"steering_name": "spooky"}, [Add("spooky", path="carry")]),
    "steering_name with a scale": (
        {"steering_name": {"name": "sea", "scale": 2.5}},
        [Add("sea", scale=2.5, path="carry")],
    ),
    "sae_clamp_specs": (
        {
            "sae_clamp_specs": [
                {
                    "module_name": "delta",
                    "phase": "decode",
                    "clamps": {
                        OUT: {
                            "2": [
                                {"feature_idx": 3, "kind": "absolute", "value": 30.0},
                                {"feature_idx": 9, "kind": "multiply", "value": 0.0, "only_if_active": True},
                            ]
                        }
                    },
                },
                {
                    "module_name": "delta",
                    "phase": "prefill",
                    "clamps": {OUT: {"2": [{"feature_idx": 5, "kind": "additive", "value": 20.0}]}},
                },
            ]
        },
        [
            SaeSet(
                "delta",
                {(OUT, 2): {3: 30.0, 9: {"kind": "multiply", "value": 0.0, "only_if_active": True}}},
                phase="decode",
            ),
            SaeSet("delta", {(OUT, 2): {5: {"kind": "additive", "value": 20.0}}}, phase="prefill"),
        ],
    ),
    "sae_full_reconstruction_specs": (
        {
            "sae_full_reconstruction_specs": [
                {
                    "module_name": "full",
                    "clamps": {OUT: {"2": [{"feature_idx": 7, "kind": "absolute", "value": 5.0}]}},
                }
            ]
        },
        [SaeReconstruct("full", {(OUT, 2): {7: 5.0}})],
    ),
    "full reconstruction that keeps the error": (
        {
            "sae_full_reconstruction_specs": [
                {
                    "module_name": "full",
                    "error_term": "keep",
                    "phase": "decode",
                    "clamps": {OUT: {"2": [{"feature_idx": 7, "value": 9.0}]}},
                }
            ]
        },
        [SaeReconstruct("full", {(OUT, 2): {7: 9.0}}, error="keep", phase="decode")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_t_http_1_steering_equals_python(served, engine, name):
    fields, edits = CASES[name]
    expected = engine.chat(MESSAGES, steer=edits, baseline=True, **SHARED)
    body = {"messages": MESSAGES, **SHARED, **fields, "baseline": True, "return_token_ids": True}
    response = served.post(CHAT, body).json()
    assert response["choices"][0]["token_ids"] == expected.token_ids
    assert response["baseline"][0]["token_ids"] == expected.baseline.token_ids
    assert (
        name == "project" or expected.baseline.token_ids != expected.token_ids
    )  # this edit is too small to change the output
    assert response["interp"]["rows_steered"] == expected.interp["rows_steered"] > 0
    chunks = served.events(CHAT, body)
    sides = {False: [], True: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            sides[bool(chunk.get("baseline"))] += choice.get("token_ids", [])
    assert sides == {False: expected.token_ids, True: expected.baseline.token_ids}
    reported = next(chunk for chunk in chunks if "interp" in chunk)["interp"]
    for interp in (reported, response["interp"]):
        assert {key: interp[key] for key in ("rows_steered", "steered_positions", "steering_hash")} == {
            key: json.loads(json.dumps(expected.interp[key]))
            for key in ("rows_steered", "steered_positions", "steering_hash")
        }


def test_t_http_1_captures_equal_python_inline_and_in_files(served, engine):
    spec = {"hooks": {STREAMS: [2], "mhc_ffn_res_mix": "all"}, "positions": "all"}
    expected = engine.chat(MESSAGES, capture=Capture(**spec), **SHARED)
    files = {"filesystem": {"request_id": "equal", "tag": "http", **spec}, "memory": spec}
    response = served.post(
        CHAT, {"messages": MESSAGES, **SHARED, "capture": files, "capture_wait": True}
    ).json()
    results = response["capture_results"]
    assert results["filesystem"]["status"] == "ok" and results["filesystem"]["durable"]
    assert results["filesystem"]["paths"] == ["http/equal/packed.bin"]
    reported = {(entry["hook"], entry["layer"]): entry for entry in results["memory"]["tensors"]}
    assert set(reported) == set(expected.acts)
    for (hook, layer), rows in expected.acts.items():
        entry = reported[hook, layer]
        array = np.frombuffer(base64.b64decode(entry["data"]), np.float32).reshape(entry["shape"])
        assert np.array_equal(array, rows.tensor.numpy()) and entry["positions"] == list(rows.positions)
    on_disk = read_request(served.root / "http" / "equal")
    for (hook, layer), rows in expected.acts.items():
        assert np.array_equal(on_disk[hook, layer].values(), rows.tensor.numpy())

    where = f"/v1/interp/captures/{results['filesystem']['id']}"
    axes = {entry["hook"]: entry["axes"] for entry in served.get(where).json()["entries"]}
    assert set(axes) == {STREAMS, "mhc_ffn_res_mix"} and axes["mhc_ffn_res_mix"] == ["from", "to"]
    whole = served.get(f"{where}/data")
    tensors = load_safetensors(whole.content)
    assert torch.equal(tensors[f"{STREAMS}.2"], expected.acts[STREAMS, 2].tensor)
    part = served.get(f"{where}/data", range="bytes=100-199")
    assert part.status_code == 206 and part.content == whole.content[100:200]
    assert part.headers["etag"] == whole.headers["etag"]
    assert served.get(where, range="bytes=0-7").content == whole.content[:8]
    assert served.get(f"{where}/data", range="bytes=999999999-").status_code == 416
    rows = served.get(f"{where}/slice?hook=mhc_ffn_res_mix&layer=3").json()
    assert np.allclose(rows["values"], expected.acts["mhc_ffn_res_mix", 3].tensor.flatten(1).numpy())
    missing = served.get(f"{where}/slice?hook=mlp_out&layer=3")
    assert missing.status_code == 404 and "mhc_ffn_res_mix 3" in missing.json()["error"]["message"]
    for path, name, hint in (("/slice?hook=x&layers=3", "layers", "'layer'"), ("?wate=1", "wate", "'wait'")):
        unknown = served.get(where + path)
        assert unknown.status_code == 400 and unknown.json()["error"]["param"] == name
        assert hint in unknown.json()["error"]["message"]
    listed = served.get("/v1/interp/captures").json()["captures"]
    assert results["filesystem"]["id"] in {entry["id"] for entry in listed}


def test_ragged_captures_equal_python_inline_and_in_files(served, engine):
    spec = {
        "hooks": {"attn_weights": [2], "entry_tokens": [4], "attn_head_out": [3]},
        "positions": "all_prompt",
    }
    expected = engine.chat(MESSAGES, capture=Capture(**spec), **SHARED)
    consumers = {"filesystem": {"request_id": "ragged", "tag": "http", **spec}, "memory": spec}
    body = {"messages": MESSAGES, **SHARED, "capture": consumers, "capture_wait": True}
    response = served.post(CHAT, body)
    assert response.status_code == 200, response.text
    results = response.json()["capture_results"]
    assert results["filesystem"]["status"] == results["memory"]["status"] == "ok"
    inline = {(entry["hook"], entry["layer"]): entry for entry in results["memory"]["tensors"]}
    on_disk = read_request(served.root / "http" / "ragged")
    assert set(inline) == set(on_disk) == set(expected.acts)
    for key, rows in expected.acts.items():
        array = np.frombuffer(base64.b64decode(inline[key]["data"]), np.float32)
        array = array.reshape(inline[key]["shape"])
        assert np.array_equal(array, rows.tensor.numpy()) and inline[key]["positions"] == list(rows.positions)
        assert np.array_equal(on_disk[key].values(), rows.tensor.numpy())
        assert list(on_disk[key].positions) == list(rows.positions)
    props = served.get("/props").json()
    assert "attn_weights" in json.dumps(props)
    refused = served.post(
        CHAT,
        {"messages": MESSAGES, "capture": {"memory": {"hooks": {"attn_weights": [2]}, "reduce": "mean"}}},
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "capture.memory.reduce"


def test_a_capture_is_pending_until_it_is_waited_for(served):
    spec = {
        "filesystem": {"request_id": "late", "tag": "http", "hooks": {STREAMS: "all"}, "positions": "all"}
    }
    response = served.post(CHAT, {"messages": MESSAGES, **SHARED, "capture": spec}).json()["capture_results"][
        "filesystem"
    ]
    assert response["status"] in ("pending", "ok")
    assert served.get(f"/v1/interp/captures/{response['id']}?wait=20").json()["status"] == "ok"


def test_invalid_captures_are_refused_with_their_field(served):
    def refused(**capture):
        answer = served.post(CHAT, {"messages": MESSAGES, "max_tokens": 4, "capture": capture})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    assert refused(memory={"hooks": {"post_mlp": "all"}})["param"] == "capture.memory.hooks.post_mlp"
    assert refused(nowhere={"hooks": {OUT: "all"}})["code"] == "capture-invalid"
    large = refused(memory={"hooks": {STREAMS: "all"}, "positions": "all"})
    assert large["code"] == "capture-invalid" and "bytes" in large["message"]  # over the inline limit
    assert refused(filesystem={"request_id": "../x", "tag": "t", "hooks": {OUT: "all"}})["param"].endswith(
        "request_id"
    )
    extra = {
        "messages": MESSAGES,
        "max_tokens": 2,
        "extra_body": {"capture": {"memory": {"hooks": {OUT: [1]}}}},
    }
    merged = served.post(CHAT, extra).json()
    assert merged["capture_results"]["memory"]["status"] == "ok" and "extra_body" in merged["warnings"][0]


def test_signals_are_returned_complete_and_streamed(served, engine):
    expected = engine.chat(MESSAGES, signals=["res_mix", "stream_norm", "experts"], **SHARED)
    body = {"messages": MESSAGES, **SHARED, "signals": ["res_mix", "stream_norm", "experts"]}
    assert served.post(CHAT, body).json()["signals"] == json.loads(json.dumps(expected.signals))
    frames = [frame for chunk in served.events(CHAT, body) for frame in chunk.get("signals", ())]
    assert frames == json.loads(json.dumps(expected.signals))
    wrong = served.post(CHAT, {**body, "signals": ["res_mx"]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "signals[0]"


def test_selected_blocks_are_returned_and_equal_python(served, engine):
    """Complete and streamed; each prompt is new to both sides, so that both prefill it in one step."""
    body_fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "signals": ["blocks", "head_mix"]}
    for animal in ("hen", "cow"):
        ids = engine.encode_chat(user(f"Tell me a story about a fox and a {animal}. " * 26))
        assert len(ids) > 4 * engine.config.index_topk + 8  # more blocks than the indexer selects
        expected, body = (
            json.loads(json.dumps(engine.generate(ids, **body_fields).signals)),
            {"prompt": ids, **body_fields},
        )
        if animal == "hen":
            response = served.post("/v1/completions", body).json()["signals"]
        else:
            response = [
                frame
                for chunk in served.events("/v1/completions", body)
                for frame in chunk.get("signals", ())
            ]
        assert [frame["position"] for frame in response] == list(range(len(ids) + 5))
        prompt = slice(0, len(ids))
        assert [frame["blocks"] for frame in response[prompt]] == [
            frame["blocks"] for frame in expected[prompt]
        ]
        for http_frame, python_frame in zip(response, expected):
            assert http_frame["head_mix"] == pytest.approx(python_frame["head_mix"], rel=1e-4)
            for layer, spans in enumerate(http_frame["blocks"]):
                assert (spans is None) == (engine.config.compress_ratios[layer] != 4)
                if spans is not None:
                    count = min((http_frame["position"] + 1) // 4, engine.config.index_topk)
                    assert sum(stop - start for start, stop in spans) == count


def test_a_stream_reports_prompt_progress_on_request(served):
    body = {
        "prompt": [1] * 2500,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }  # more than one prefill step

    def says(choice):
        return choice.get("text") or choice.get("delta", {}).get("content")

    def progress(path, request_body):
        chunks = served.events(path, {**request_body, "return_progress": True})
        reported = [
            (index, chunk["prompt_progress"])
            for index, chunk in enumerate(chunks)
            if "prompt_progress" in chunk
        ]
        total = chunks[-1]["timings"]["prompt_tokens"]
        for _, each in reported:
            assert set(each) == {"total", "cache", "processed", "time_ms"} and each["total"] == total
            assert 0 <= each["cache"] <= each["processed"] and each["time_ms"] >= 0
        first = next(index for index, chunk in enumerate(chunks) if any(map(says, chunk["choices"])))
        assert reported[-1][0] < first and reported[-1][1]["processed"] == total
        return [(each["cache"], each["processed"]) for _, each in reported]

    assert progress("/v1/completions", body) == [(0, 2048), (0, 2500)]
    ((known, read),) = progress("/v1/completions", body)  # pages of the first prompt are cached by now
    assert 2048 < known < read == 2500
    assert len(progress(CHAT, {"messages": MESSAGES, "max_tokens": 2})) == 1
    assert not any("prompt_progress" in chunk for chunk in served.events("/v1/completions", body))


def test_the_lens_attention_schema_and_estimate(served, engine):
    ids = engine.tokenizer.encode("Once upon a time there was a fox")
    lens = engine.lens(ids)
    response = served.post("/v1/lens", {"token_ids": ids, "k": 2}).json()
    assert response["views"] == list(lens.views) and len(response["top"]) == lens.depths
    for depth in range(lens.depths):
        for view, tokens in zip(lens.views, response["top"][depth]):
            assert [entry["token_id"] for entry in tokens] == [
                token for token, _ in lens.top(depth, view, k=2)
            ]
    reported = served.post(
        "/v1/lens", {"token_ids": ids, "surprise": True, "views": ["head"], "depths": [-1]}
    ).json()
    assert np.allclose(
        reported["surprise"][0][0][:-1], lens.surprise(lens.depths - 1).tolist()[:-1], atol=1e-4
    )
    assert reported["surprise"][0][0][-1] is None
    edits = CASES["interventions"][0]["interventions"]
    steered = served.post("/v1/lens", {"token_ids": ids, "k": 1, "interventions": edits}).json()
    assert steered["top"] != [[[view[0]] for view in depth] for depth in response["top"]]
    layers = served.post("/v1/interp/attention", {"token_ids": ids}).json()["layers"]
    for layer in layers:
        parts = [span["weight"] for span in (*layer["window"], *layer["blocks"])]
        assert abs(sum(parts) + layer["sink"] + layer["rest"] - 1) < 1e-3
    schema = served.get("/v1/interp/schema").json()
    assert set(schema["hooks"]) == set(engine.schema) and schema["hooks"]["mhc_head_mix"]["level"] == "model"
    spec = {"memory": {"hooks": {STREAMS: [1]}, "positions": "all_prompt"}}
    cost = served.post("/v1/interp/estimate", {"token_ids": ids, "capture": spec}).json()
    assert cost["rows"] == len(ids) and cost["bytes"] == len(ids) * 1536 * 4


def test_the_global_tier_and_modules(served, engine):
    edit = {"op": "add", "at": {"hook": OUT, "layers": [3]}, "vector": "@narrow", "scale": 3.0}
    body = {"messages": MESSAGES, **SHARED, "return_token_ids": True}
    plain = served.post(CHAT, body).json()["choices"][0]["token_ids"]
    assert served.post("/v1/steering/set", {"interventions": [edit]}).json()["interventions"] == [edit]
    try:
        with engine.steering(Add("narrow", OUT, [3], 3.0)):
            expected = engine.chat(MESSAGES, **SHARED).token_ids
        assert served.post(CHAT, body).json()["choices"][0]["token_ids"] == expected != plain
        norm = float(engine.modules["narrow"].tensor().norm())
        assert abs(served.get("/v1/steering").json()["norms"][OUT]["3"] - 3 * norm) < 1e-2
        used = served.post("/v1/steering/modules/unregister", {"name": "narrow"})
        assert used.status_code == 409 and used.json()["error"]["code"] == "module-used"
        bad = served.post(
            "/v1/steering/set", {"interventions": [{**edit, "at": {"hook": OUT, "layers": [99]}}]}
        )
        assert bad.status_code == 400 and served.get("/v1/steering").json()["interventions"] == [edit]
    finally:
        served.post("/v1/steering/clear")
    assert served.post(CHAT, body).json()["choices"][0]["token_ids"] == plain
    assert {each["name"] for each in served.get("/v1/steering/modules").json()["modules"]} >= {
        "wide",
        "narrow",
    }
    assert OUT in served.get("/v1/steering/layers").json()["layers"]["0"]["hook_points"]


def test_e6_a_module_removed_during_use(served, engine):
    """Running requests keep the vector they started with; the next call gets an error."""
    vector = torch.randn(384, generator=torch.Generator().manual_seed(1))
    register = {"name": "brief", "vector": vector.tolist(), "replace": True}
    body = {
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": True,
        "return_token_ids": True,
        "interventions": [{"op": "add", "at": {"hook": OUT, "layers": [3]}, "vector": "@brief"}],
    }
    served.post("/v1/steering/modules/register", register)
    whole = served.post(CHAT, body).json()["choices"][0]["token_ids"]
    ids = []
    with served.http as client, client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        for index, line in enumerate(answer.iter_lines()):
            if index == 6:
                assert served.post("/v1/steering/modules/unregister", {"name": "brief"}).status_code == 200
            if line.startswith("data: {"):
                ids += [i for choice in json.loads(line[6:])["choices"] for i in choice.get("token_ids", ())]
    assert ids == whole
    gone = served.post(CHAT, body)
    assert gone.status_code == 400 and "brief" in gone.json()["error"]["message"]


def test_a_patch_sweep_finds_the_deciding_position(served, engine):
    """Patching the final streams at the last token gives the source's value; earlier positions change nothing."""
    source, target = (engine.prompt_ids(text) for text in ("Once upon a", "He was very"))
    token, other = (int(engine.logits(ids)[-1].argmax()) for ids in (source, target))
    body = {
        "source": {"token_ids": source},
        "target": {"token_ids": target},
        "hook": "mhc_streams_final",
        "metric": {"token": token, "other": other},
        "positions": [-1, 1],
        "run": "sweep",
    }
    response = served.post("/v1/patch_sweep", body).json()
    assert (
        response["source"] > 0 > response["target"]
        and response["positions"] == [3, 1]
        and response["layers"] == [7]
    )
    assert (
        abs(response["grid"][0][0] - response["source"]) < 1e-3
        and abs(response["grid"][0][1] - response["target"]) < 1e-3
    )
    kept = {"op": "patch", "at": {"hook": "mhc_streams_final", "layers": [7]}, "source": {"run": "sweep"}}
    request_body = {
        "prompt": target,
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
        "interventions": [kept],
    }
    assert served.post("/v1/completions", request_body).json()["choices"][0]["token_ids"] == [token]
    assert served.post("/v1/patch_sweep", body).status_code == 409
    anywhere = {**body, "hook": "mhc_streams_pre_attn", "run": None, "positions": [-1]}
    wide = served.post("/v1/patch_sweep", anywhere).json()
    assert (
        len(wide["grid"]) == 8 and wide["grid"][-1][0] > wide["grid"][0][0]
    )  # later layers have more effect
    with served.http as client:
        assert client.delete("/v1/patch_source/sweep").status_code == 200
        assert client.delete("/v1/patch_source/sweep").status_code == 404
        assert client.delete(f"/v1/patch_source/{wide['run']}").status_code == 200
    assert served.post("/v1/completions", request_body).status_code == 400
    assert served.post("/v1/patch_sweep", {**body, "positions": [200]}).status_code == 400


POSITIVE = [
    "The sun was warm and the children laughed.",
    "She smiled and hugged her happy little dog.",
    "What a wonderful, bright and merry day it was!",
    "They danced and sang with joy.",
]
NEGATIVE = [
    "The night was cold and the wolves howled.",
    "He wept alone in the dark, broken house.",
    "It was a grim and dreadful day of loss.",
    "They were afraid and hid in the cave.",
]


def test_two_sets_of_texts_are_contrasted_and_the_vector_is_saved(served, engine):
    """Table, best cell and vector equal Python's; a taken name and an unknown cell are refused."""
    where, body = "/v1/interp/contrast", {"positive": POSITIVE, "negative": NEGATIVE, "hook": STREAMS}
    rows = contrast_rows(engine, POSITIVE, NEGATIVE, STREAMS)
    expected = {(entry.layer, entry.stream): entry for entry in rows.separation()}
    response = served.post(where, body).json()
    assert response["layers"] == rows.layers and response["columns"] == [
        "whole row",
        *(f"stream {s}" for s in range(4)),
    ]
    for layer, aucs, apart in zip(response["layers"], response["table"], response["d_prime"]):
        for stream, auc, d_prime in zip([None, 0, 1, 2, 3], aucs, apart):
            assert (auc, d_prime) == pytest.approx(
                (expected[layer, stream].auc, expected[layer, stream].d_prime), abs=1e-5
            )
    assert response["best"]["auc"] == max(max(row) for row in response["table"]) and "saved" not in response

    named = {**body, "name": "warmth", "layer": 5, "column": "stream 2"}
    assert served.post(where, named).json()["saved"] == "warmth"
    engine.modules["warmth"] = vector_of(engine, rows, [5], "mean_diff", [2])
    request_body = {"messages": MESSAGES, **SHARED, "return_token_ids": True}
    steered = served.post(CHAT, {**request_body, "steering_name": {"name": "warmth", "scale": 4}}).json()
    edit = Add("warmth", scale=4.0, path="carry")
    assert steered["choices"][0]["token_ids"] == engine.chat(MESSAGES, steer=[edit], **SHARED).token_ids
    assert steered["interp"]["rows_steered"] > 0

    taken = served.post(where, named)
    assert taken.status_code == 409 and taken.json()["error"]["code"] == "module-taken"
    assert served.post(where, {**named, "replace": True, "how": "pca"}).status_code == 200
    for wrong, param in (
        ({"column": "stream 9"}, "column"),
        ({"layer": 99}, "column"),
        ({"hook": "nowhere"}, None),
        ({"positive": ["one"]}, "positive"),
        ({"hook": "mhc_ffn_res_mix"}, None),
    ):
        refused = served.post(where, {**named, "name": "other", **wrong})
        assert refused.status_code == 400 and param in (None, refused.json()["error"]["param"]), refused.text
    modules = served.get("/v1/steering/modules").json()["modules"]
    assert "other" not in {each["name"] for each in modules}
    assert served.post("/v1/steering/modules/unregister", {"name": "warmth"}).status_code == 200


def test_several_choices_have_separate_capture_files(served):
    spec = {
        "filesystem": {
            "request_id": "many",
            "tag": "http",
            "hooks": {"mhc_head_mix": "all"},
            "positions": "all",
        }
    }
    body = {"messages": MESSAGES, **SHARED, "n": 2, "capture": spec, "capture_wait": True}
    response = served.post(CHAT, body).json()
    results = [choice["capture_results"]["filesystem"] for choice in response["choices"]]
    assert [result["status"] for result in results] == ["ok", "ok"]
    assert [result["paths"] for result in results] == [["http/many-0/packed.bin"], ["http/many-1/packed.bin"]]


@pytest.mark.parametrize("page", ["README.md", "docs/server.md"])
def test_the_documented_call_works(served, page):
    text = (ROOT / page).read_text()
    (call,) = re.findall(r"^curl -s localhost:8000.*?}'$", text, re.MULTILINE | re.DOTALL)
    words = shlex.split(call)
    path, body = words[2].removeprefix("localhost:8000"), json.loads(words[words.index("-d") + 1])
    response = served.post(path, body)
    assert response.status_code == 200, response.text
    reported = response.json()
    assert reported["choices"][0]["message"]["content"] != reported["baseline"][0]["message"]["content"]
    assert (
        reported["capture_results"]["memory"]["tensors"][0]["shape"] == [1, 4, 4]
        and reported["interp"]["rows_steered"] > 0
    )
