"""What is shown while a preparation runs."""

import io
import os
import pty
from contextlib import suppress

import pytest

from data_prep import progress
from data_prep.progress import Progress


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with Progress(work=200.0, done=100.0, stream=stream) as shown:
        shown.advance(50.0, 1_500_000)
        shown.advance(50.0, 1_500_000)
    first, second = stream.getvalue().splitlines()
    assert first.startswith(" 75.0% 1.50M tokens, ")
    assert "tokens/s" in first
    assert second.startswith("100.0% 3.00M tokens, ")
    assert second.endswith("00:00 left")
    assert "\r" not in stream.getvalue()


def test_lines_come_at_intervals() -> None:
    stream = io.StringIO()
    with Progress(work=1000.0, done=0.0, stream=stream) as shown:
        for _ in range(1000):
            shown.advance(1.0, 1)
    assert stream.getvalue() == ""


def test_a_bar_on_a_terminal() -> None:
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream, Progress(work=2.0, done=0.0, stream=stream) as shown:
        shown.advance(1.0, 5000)
        shown.advance(1.0, 5000)
    shown_text = ""
    with suppress(OSError):  # which says that there is no more
        while data := os.read(reader, 1 << 16):
            shown_text += data.decode()
    os.close(reader)
    assert "100%" in shown_text
    assert "10.0k tokens" in shown_text
    assert "left" in shown_text
