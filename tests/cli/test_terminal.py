"""Terminal output: error lines, escaped control characters, progress bars only on terminals."""

import io
import sys

from hypothesis import given
from hypothesis import strategies as st

from birkhoff.cli.terminal import escape_control, print_error, progress_bar


def test_an_error_is_its_code_and_its_message(capsys):
    print_error("weights", "first\nsecond")
    assert capsys.readouterr().err == "weights  first\n         second\n"


@given(st.text())
def test_text_for_a_terminal_moves_no_cursor(text):
    shown = escape_control(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    if not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in text):
        assert shown == text


def test_on_a_pipe_a_progress_bar_prints_nothing(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("working") as advance:
        advance(1, 2)
    assert stream.getvalue() == ""
