"""Server settings from flags, variables and a file; the access log; body parsing; error conversion."""

from __future__ import annotations

import io
import json

import pytest

from birkhoff.errors import OptionError
from birkhoff.option_checks import is_loopback
from birkhoff.server.access_log import AccessLog
from birkhoff.server.api_errors import ApiError, to_api_error
from birkhoff.server.body import RequestBody, StrictBody, parse_json, validate
from birkhoff.server.server_settings import ServerSettings
from tests.cli.conftest import birkhoff
from tests.server.conftest import serving


def test_flags_variables_and_file_come_in_that_order(tmp_path):
    file = tmp_path / "birkhoff.toml"
    file.write_text('[serve]\nserved_name = "file"\nmax_queue = 3\nmax_choices = 2\nlog = "off"\n')
    with serving(
        tmp_path,
        "--served-name",
        "flag",
        BIRKHOFF_CONFIG=str(file),
        BIRKHOFF_MAX_QUEUE="5",
        BIRKHOFF_SERVED_NAME="variable",
    ) as running:
        props = running.get("/props").json()
        assert (
            props["model"] == "flag"
            and props["limits"]["max_queue"] == 5
            and props["limits"]["max_choices"] == 2
        )
        assert running.post("/v1/chat/completions", {"messages": [], "model": "file"}).status_code == 400
    calls = [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]
    assert calls[0] | {"time": 0, "ms": 0, "id": 0} == {
        "time": 0,
        "id": 0,
        "method": "GET",
        "path": "/props",
        "status": 200,
        "ms": 0,
        "client": "127.0.0.1",
        "note": "",
    }
    assert calls[1]["status"] == 400 and calls[1]["id"].startswith("req-")


def test_a_misspelt_setting_is_refused(tmp_path):
    file = tmp_path / "birkhoff.toml"
    file.write_text("[serve]\nmax_que = 3\n")
    done = birkhoff("--config", str(file), "serve")
    assert done.returncode == 2 and b"max_queue" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"host": "192.168.1.2"},
        {"port": -1},
        {"port": True},
        {"max_body_bytes": 0},
        {"log": ""},
        {"stall_seconds": 0},
        {"api_key": ("",)},
        {"api_key": ("a\n",)},
        {"sae": ("a",)},
        {"sae_full": ("=x",)},
        {"drain_seconds": "1"},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(OptionError):
        ServerSettings(**wrong)


def test_loopback_addresses_are_recognised():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.10")))
    assert not any(map(is_loopback, ("0.0.0.0", "localhost.evil", "127.0.0.1.evil", "", "::", "1")))
    ServerSettings(host="0.0.0.0", api_key=("k",))
    ServerSettings(host="0.0.0.0", i_know_this_is_open=True)


def test_the_log_has_one_line_per_call_without_control_characters():
    for form in ("text", "json"):
        out = io.StringIO()
        access_log = AccessLog(form, out)
        access_log.log_request("req-1", "GET", "/a\n\x1b[2Jb" + "c" * 500, 404, 0.001, "left")
        assert out.getvalue().count("\n") == 1 and "\x1b" not in out.getvalue() and len(out.getvalue()) < 500
        access_log.log_exception("req-2", ValueError("why"))
        assert "req-2" in out.getvalue() and "why" in out.getvalue()


def test_a_closed_log_does_not_stop_the_server():
    out = io.StringIO()
    access_log = AccessLog("text", out)
    out.close()
    access_log.log_request("req-1", "GET", "/", 200, 0.1)


class Inner(StrictBody):
    a: int


class Outer(RequestBody):
    inner: list[Inner]


def test_a_refusal_names_the_field():
    with pytest.raises(ApiError) as caught:
        validate(Outer, {"inner": [{"a": 1}, {"a": "1"}]})
    assert caught.value.param == "inner[1].a" and caught.value.status == 400
    with pytest.raises(ApiError) as extra:
        validate(Outer, {"inner": [{"a": 1, "b": 2}]})
    assert extra.value.param == "inner[0].b"
    assert validate(Outer, {"inner": [], "more": 1}).unknown_fields == ["more"]


def test_depth_is_counted_outside_of_strings():
    assert parse_json(b'{"a":"' + b"[" * 500 + b'"}', 4) == {"a": "[" * 500}
    assert parse_json(b'{"a":[[["\\"[["]]]}', 4)["a"] == [[['"[[']]]
    with pytest.raises(ApiError, match="nested"):
        parse_json(b'{"a":[[[[]]]]}', 4)


def test_a_body_is_decoded_once_and_duplicate_keys_are_named(monkeypatch):
    odd = {"a:b": ":", 'q"{': [{"c": {"d:": "\\"}}, [], {}], "é": {"e": None}}
    plain = json.dumps(odd).encode()
    twice = b'{"a": {"b:": 1, "b\\u003a": 2}}'
    with pytest.raises(ApiError, match="'b:' stands twice"):
        parse_json(twice, 8)
    monkeypatch.setattr(json, "loads", None)
    assert parse_json(plain, 8) == odd


def test_unknown_errors_leak_no_details():
    error = to_api_error(RuntimeError("/usr/secret 0x7f00"))
    assert error.status == 500 and "secret" not in error.message
    assert to_api_error(MemoryError()).status == 503
