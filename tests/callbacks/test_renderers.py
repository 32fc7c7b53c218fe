"""The live bar: its layout at each width, and how often it is refreshed."""

import sys
from io import StringIO

import pytest
import rich
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fabricamp.callbacks import _renderers
from fabricamp.callbacks._renderers import NotebookRenderer, Renderer, Task, TerminalRenderer, open_renderer


@pytest.fixture
def live(monkeypatch, tmp_path):
    """Returns a function that builds a live screen of a given width over a file that reports to be a terminal."""
    screens, files = [], []

    def build(width, **options):
        file = (tmp_path / "screen").open("w", encoding="utf-8")
        files.append(file)
        console = Console(file=file, force_terminal=True, width=width, color_system="truecolor", **options)
        monkeypatch.setattr(rich, "_console", console)
        screens.append(TerminalRenderer(0.25))
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
    screen = TerminalRenderer.__new__(TerminalRenderer)
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


@pytest.fixture
def cell(monkeypatch):
    """What a cell of a notebook displays, in order: (the output's name, whether it is replaced, its content by MIME type)."""
    pytest.importorskip("IPython", reason="needs the package IPython")
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    shown = []

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, *, transient=None, update=False, **options):
            shown.append((transient["display_id"], update, data))

    monkeypatch.setattr(rich, "_console", Console(force_jupyter=True, width=100))
    prompts = {name for name in ("ps1", "ps2", "ps3") if hasattr(sys, name)}
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "display_pub", Publisher())
    yield shown
    InteractiveShell.clear_instance()
    # A shell sets prompts, by which fabricamp takes later tests of this process for interactive ones: Ctrl-C would not end them.
    for name in {"ps1", "ps2", "ps3"} - prompts:
        delattr(sys, name)


def final(shown):
    """The text of each output of the cell as it is in the end."""
    return list({name: data["text/plain"] for name, _, data in shown}.values())


def test_in_a_notebook_one_output_is_replaced_until_its_line_stays(cell):
    screen = open_renderer(0.25)
    assert type(screen) is NotebookRenderer
    screen.draw([track(done=1)], [("loss", "0.5000")])
    screen.draw([track(done=2)], [("loss", "0.4000")])
    assert [update for _, update, _ in cell] == [False, True]
    assert "2/450" in cell[1][2]["text/plain"]
    assert "loss 0.4000" in cell[1][2]["text/plain"]
    assert "color: #" in cell[1][2]["text/html"]
    screen.write([("epoch 1", ""), ("loss", "0.3000")])
    screen.draw([track(done=3)], [])
    assert final(cell)[0] == "epoch 1  loss 0.3000"
    assert "3/450" in final(cell)[1]
    screen.write([("epoch 2", "")])
    screen.close(keep=False)
    assert final(cell) == ["epoch 1  loss 0.3000", "epoch 2"]


@pytest.mark.parametrize("keep", [True, False])
def test_the_bars_of_a_notebook_stay_where_a_run_failed(cell, keep):
    screen = NotebookRenderer(0.25)
    screen.draw([track()], [])
    screen.close(keep=keep)
    assert ("120/450" in final(cell)[0]) == keep


def test_text_in_a_notebook_is_not_read_as_html(cell):
    NotebookRenderer(0.25).write([("a<b", "1")])
    assert "a&lt;b" in cell[0][2]["text/html"]


def test_workers_of_a_notebook_write_plain_lines(cell, monkeypatch):
    monkeypatch.setattr(_renderers.multiprocessing, "parent_process", object)
    assert type(open_renderer(0.25)) is Renderer
