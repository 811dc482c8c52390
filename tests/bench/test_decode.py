"""Cache sizes in rows of the decode benchmark, and parsing of context lengths."""

from __future__ import annotations

import pytest
import torch

from birkhoff.bench.decode import cache_facts
from birkhoff.bench.synthetic import filled_state
from birkhoff.cli.parsers import parse_token_count
from birkhoff.errors import OptionError
from tests.models import TINY


def test_the_cache_size_matches_the_computed_size():
    facts = cache_facts(filled_state(TINY, 2, 700, torch.device("cpu")), 2, 700)
    assert facts["cache_bytes"] == facts["cache_bytes_computed"] and set(facts["cache_bytes"]) == {
        "swa",
        "csa",
        "hca",
    }
    assert 0 < facts["cache_bytes_read_per_step"]["csa"] < facts["cache_bytes"]["csa"]


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("128k", 131_072), ("1M", 2**20), ("1K", 1024)])
def test_contexts_may_have_a_suffix(text, tokens):
    assert parse_token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-5", "0", "1.5k", "99999M", "four", "²k"])
def test_invalid_contexts_are_refused(text):
    with pytest.raises(OptionError, match="expected a number of tokens such as 4096, 128k or 1M"):
        parse_token_count(text)
