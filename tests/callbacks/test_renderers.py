"""The live bar: its layout at each width, and how often it is refreshed."""

from io import StringIO

import pytest
import rich
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fabricamp.callbacks import _renderers
from fabricamp.callbacks._renderers import Task, _LiveRenderer


@pytest.fixture
def live(monkeypatch, tmp_path):
    """Returns a function that builds a live screen of a given width over a file that reports to be a terminal."""
    screens, files = [], []

    def build(width, **options):
        file = (tmp_path / "screen").open("w", encoding="utf-8")
        files.append(file)
        console = Console(file=file, force_terminal=True, width=width, color_system="truecolor", **options)
        monkeypatch.setattr(rich, "_console", console)
        screens.append(_LiveRenderer(0.25))
        return screens[-1]

    yield build
    for screen in screens:
        screen.close(keep=False)
    for file in files:
        file.close()


def track(label="epoch 3/10", done=120, total=450, seconds=3.5):
    one = Task(label)
    one.total = total
    one._mark -= seconds
    one.advance(done)
    return one


def test_metrics_stand_beside_the_bar_while_they_fit_and_below_it_from_then_on(live):
    screen = live(100)
    few, many = [("loss", "0.1230")], [(f"metric_{index}", "0.1230") for index in range(9)]
    assert screen._picture([track()], few).plain.count("\n") == 0
    below = screen._picture([track()], many).plain
    assert below.count("\n") == 2
    assert all(f"metric_{index} 0.1230" in below for index in range(9))
    assert screen._picture([track()], few).plain.count("\n") == 1, "it would jump up and down"


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 240),
    total=st.one_of(st.none(), st.integers(1, 10**7)),
    count=st.integers(0, 12),
    data=st.data(),
)
def test_no_line_is_wider_than_the_terminal(width, total, count, data):
    screen = _LiveRenderer.__new__(_LiveRenderer)
    screen._console = Console(file=StringIO(), force_terminal=True, width=width, color_system="truecolor")
    screen._metrics_below = False
    done = data.draw(st.integers(0, total or 1000))
    metrics = [(f"m{index}" * data.draw(st.integers(1, 8)), "0.1230") for index in range(count)]
    picture = screen._picture([track(done=done, total=total), track("validation 1/2", 1, 2)], metrics)
    lines = ["".join(part.text for part in line) for line in screen._console.render_lines(picture, pad=False)]
    assert all(len(line) <= width for line in lines)
    assert len(lines) == picture.plain.count("\n") + 1, "a line was broken"


def test_drawing_never_takes_more_than_one_percent_of_the_time(live, monkeypatch):
    screen = live(80)
    ticks = iter([10.0, 10.02])
    monkeypatch.setattr(_renderers, "monotonic", lambda: next(ticks))
    one = Task.__new__(Task)
    monkeypatch.setattr(screen, "_picture", lambda tracks, metrics: "picture")
    screen.draw([one], [])
    assert screen.interval == pytest.approx(2.0)
