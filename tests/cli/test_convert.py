"""The verb `convert`: the path on stdout, status messages on stderr, exit status 2 on wrong usage, 1 on failure."""

from __future__ import annotations

import json

from tests.cli.conftest import birkhoff, no_trace_of_python


def test_round_trip_on_the_command_line(birkhoff_here, tiny, tmp_path):
    there = birkhoff(
        "convert", tiny, tmp_path / "m.gguf", "--dense", "bf16", "--no-mtp", "--shard-size", "1MB"
    )
    (first,) = tmp_path.glob("m-00001-of-*.gguf")
    assert there.returncode == 0 and there.stdout.decode().strip() == str(first), there.stderr
    assert b"every number is exactly what it was" in there.stderr and b"m-00001-of-" in there.stderr
    back = birkhoff_here("convert", first, tmp_path / "back", "--json", "--exact")
    result = json.loads(back.stdout)
    assert (
        back.returncode == 0
        and result["to"] == "safetensors"
        and result["written"]
        and result["checked"] > 200
    )
    whole = birkhoff_here("convert", tiny, tmp_path / "whole.gguf", "--no-mtp")
    assert whole.stdout.decode().strip() == str(tmp_path / "whole.gguf"), whole.stderr


def test_misuse(birkhoff_here, tiny, tmp_path):
    wrong = birkhoff_here("convert", tiny, tmp_path / "m.gguf", "--dense", "q3", "--dry-run")
    assert (
        wrong.returncode == 2
        and b"option-invalid  dense is 'q3'" in wrong.stderr
        and no_trace_of_python(wrong.stderr)
    )
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_a_file_that_no_format_has_is_refused(birkhoff_here, tiny, tmp_path):
    for name in ("m.bin", "m.safetensors", "m.GGUF"):
        refused = birkhoff_here("convert", tiny, tmp_path / name, "--no-mtp")
        assert refused.returncode == 2 and b"expected NAME.gguf" in refused.stderr, refused.stderr
    assert list(tmp_path.iterdir()) == []
    for name, *options in (("V4.1",), ("m.bin", "--to", "safetensors")):
        written = birkhoff_here("convert", tiny, tmp_path / name, "--no-mtp", *options)
        assert written.returncode == 0 and (tmp_path / name / "config.json").exists(), written.stderr
