"""Command lines of vLLM and its steering fork: a flag has its meaning here, or a line says what replaces it."""

from __future__ import annotations

import pytest

from birkhoff.cli.vllm_flags import REPLACED_SWITCHES, REPLACED_VALUES, adopt_environment, translate
from birkhoff.errors import OptionError


def test_a_command_line_of_the_fork():
    """The example of its guide, with several modules after one flag."""
    lines: list[str] = []
    line = (
        "serve google/gemma-3-4b-it --enable-steering --max-steering-configs 4 "
        "--steering-modules creativity=/path/to/creativity.json safety=/path/to/safety.json "
        "--steering-api-key primary-key --steering-api-key rotation-key "
        "--capture-consumers filesystem:root=captures --capture-consumers logging "
        "--capture-overload-policy block --capture_spill_max_bytes=0 "
        "--steering-config.max_clamp_directions=4 --sae-spare-slot-sites 2:mlp_out 3:mlp_out "
        "--max-model-len 512 --served-model-name a --no-enable-prefix-caching -tp 1 --port 9"
    )
    assert (
        translate(line.split(), lines.append)
        == (
            "serve --model google/gemma-3-4b-it --steering-modules creativity=/path/to/creativity.json "
            "--steering-modules safety=/path/to/safety.json --steering-api-key primary-key "
            "--steering-api-key rotation-key --capture-consumers filesystem:root=captures "
            "--capture-consumers logging --capture-overload-policy block --capture-spill-max-bytes=0 "
            "--max-context 512 --served-name a --no-prefix-cache --port 9"
        ).split()
    )
    assert [text.split(":")[0].split("=")[0] for text in lines] == [
        "--enable-steering",
        "--max-steering-configs",
        "--steering-config.max_clamp_directions",
        "--sae-spare-slot-sites",
    ]


@pytest.mark.parametrize("flag", [*REPLACED_SWITCHES, *REPLACED_VALUES])
def test_every_replaced_flag_says_what_replaces_it(flag):
    lines: list[str] = []
    words = [flag] if flag in REPLACED_SWITCHES else [flag, "1"]
    assert translate(["serve", *words, "--port", "1"], lines.append) == ["serve", "--port", "1"]
    assert len(lines) == 1 and lines[0].startswith(f"{flag}: ") and "\n" not in lines[0]


def test_other_verbs_and_more_devices():
    assert translate(["generate", "--enable-steering", "x"], print) == ["generate", "--enable-steering", "x"]
    assert translate([], print) == []
    with pytest.raises(OptionError, match="one device"):
        translate(["serve", "--tensor-parallel-size", "2"], print)
    words = ["serve", "M", "--backend", "vllm", "-tp", "2", "--pipeline-parallel-size=4"]
    kept = ["--backend", "vllm", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "4"]
    assert translate(words, print) == ["serve", "--model", "M", *kept]
    with pytest.raises(OptionError, match="expected 1"):
        translate(["serve", "--backend=vllm", "--data-parallel-size", "2"], print)


def test_variables():
    environment = {"VLLM_STEERING_API_KEY": "a", "VLLM_API_KEY": "b", "BIRKHOFF_API_KEY": "c"}
    adopt_environment(environment)
    assert environment["BIRKHOFF_STEERING_API_KEY"] == "a" and environment["BIRKHOFF_API_KEY"] == "c"
