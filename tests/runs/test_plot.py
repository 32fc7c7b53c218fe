"""`fabricamp plot`: what a real run logged, in the terminal and in files."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import ConfigError, TrainingModule
from fabricamp.callbacks import AmpState, LearningRateMonitor, ModelCheckpoint
from fabricamp.cli import main
from fabricamp.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from fabricamp.runs import plot
from fabricamp.runs.panels import choose, smoothed
from fabricamp.runs.reading import Curve, Run, find_runs, read_curves, read_runs
from fabricamp.runs.text import Canvas, frame_of, show
from tests.small import quiet_trainer


class Overflows(TrainingModule):
    """Overflows at first: its losses are too large for fp16 gradients at the initial loss scales."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).float().square().mean() * 1000
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("grad_norm", 2 * loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).float().square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, each in TensorBoard's events and as CSV."""
    root = tmp_path_factory.mktemp("logged")
    data = DataLoader(TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(0))), 4)
    for _ in range(2):
        quiet_trainer(
            max_epochs=3,
            precision="O2",
            log_every_n_steps=2,
            num_sanity_val_steps=0,
            logger=[
                TensorBoardLogger(root, name="events"),
                CSVLogger(root, name="tables"),
                JSONLinesLogger(root, name="lines"),
            ],
            callbacks=[AmpState(), LearningRateMonitor()],
        ).fit(Overflows(), data, data)
    return root


def test_one_run_fills_eighty_columns_when_it_is_piped(runs, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["plot", str(runs / "events" / "version_0")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 78 <= max(map(len, lines)) <= 80
    titles = [line.split("  ")[0] for line in lines if line[0] != " "]
    assert titles == ["loss", "validation loss", "learning rate", "loss scale", "gradient norm", "steps/s"]
    skips = next(line for line in lines if line.strip().startswith("skipped"))
    assert skips.count("x") >= 5
    assert any("\u2801" <= sign <= "\u28ff" for line in lines for sign in line)
    assert "·" in "".join(lines), "raw values stand beside the smoothed line"


def test_events_table_and_lines_say_the_same(runs):
    events, table, lines = (read_curves(runs / kind / "version_0") for kind in ("events", "tables", "lines"))
    assert {name: one.values for name, one in table.items()} == {name: one.values for name, one in lines.items()}
    assert len(lines["val_loss"].times) == len(lines["val_loss"].steps)
    for name in ("train_loss_step", "train_loss_epoch", "val_loss", "lr-SGD", "amp/loss_scale", "amp/skipped_steps"):
        assert events[name].steps == table[name].steps
        assert events[name].values == pytest.approx(table[name].values)
        assert len(events[name].times) == len(events[name].steps)
    assert table["val_loss"].times == []


def test_a_table_without_times_has_no_pace(runs, capsys):
    assert main(["plot", str(runs / "tables" / "version_0" / "metrics.csv")]) == 0
    assert "steps/s" not in capsys.readouterr().out


def test_several_runs_have_a_mark_each_where_there_are_no_colours(runs, capsys):
    assert (
        main(["plot", *(str(runs / "events" / f"version_{number}") for number in (0, 1)), "--metric", "val_loss"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["• version_0", "+ version_1"]
    drawn = "".join(line.partition("│")[2] for line in lines)
    assert {"•", "+"} <= set(drawn) <= {"•", "+", "·", " "}


def test_colours_and_dots_on_a_terminal_and_neither_in_ascii(runs):
    panels = choose(read_runs([runs / "events" / "version_0", runs / "events" / "version_1"]))
    terminal = io.StringIO()
    show(panels, Console(file=terminal, force_terminal=True, color_system="standard", width=60, highlight=False))
    dots = {f"\x1b[33m{chr(0x2800 + one)}" for one in range(1, 256)}
    assert any(one in terminal.getvalue() for one in dots)
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(panels, Console(file=plain, width=60))
    plain.seek(0)
    assert max(len(line) for line in plain.read().splitlines()) <= 60


def test_a_falling_line_falls_and_a_gap_stays_one():
    canvas = Canvas(10, 3, frame_of((0, 9), [1.0, 0.0]))
    canvas.draw([(0, 1.0), (4, 0.5), (5, float("nan")), (9, 0.0)], layer=0)
    rows = ["".join(" " if cell is None else "*" for cell in row) for row in canvas.rows()]
    assert rows == ["***       ", "  ***     ", "         *"]


def test_of_a_loss_the_lowest_value_is_told_and_of_an_accuracy_the_first_highest(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text("step,val_loss,val_accuracy\n0,3,0.5\n5,1,0.9\n9,2,0.9\n")
    assert main(["plot", str(tmp_path), "--metric", "val_loss", "--metric", "val_accuracy"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if "last" in line]
    assert titles == [
        "val_loss  last 2, lowest 1 at step 5",
        "val_accuracy  last 0.9, highest 0.9 at step 5",
    ]


def test_a_constant_and_a_single_value_have_a_frame():
    assert frame_of((3, 3), [2.0]) == (3, 4, 1.8, 2.2)
    assert frame_of((0, 1), []) == (0, 1, -1.0, 1.0)


def test_smoothing_passes_over_what_is_not_finite():
    assert smoothed([2.0, float("nan"), 2.0, float("inf")], 0.9) == pytest.approx([2.0] * 4)
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])


def test_skipped_steps_are_where_the_count_grew_or_else_the_scale_fell():
    scale = Curve([1, 3, 5], [8.0, 4.0, 8.0], [])
    counted = {"amp/loss_scale": scale, "amp/skipped_steps": Curve([1, 3, 5], [1.0, 1.0, 2.0], [])}
    (panel,) = choose([Run("a", counted)])
    assert panel.lines[0].skipped == [1, 5]
    (panel,) = choose([Run("a", {"scale": scale})])
    assert panel.lines[0].skipped == [3]


def test_the_step_loss_of_the_whole_is_the_one_that_is_drawn():
    curve = Curve([0], [1.0], [])
    names = [
        "train_loss_epoch",
        "train_loss_of_a_part",
        "train_loss_step",
        "val/loss",
        "loss_scale",
        "lr-Adam/pg1",
        "test_loss",
    ]
    panels = choose([Run("a", dict.fromkeys(names, curve))])
    assert [panel.lines[0].metric for panel in panels] == ["train_loss_step", "val/loss", "lr-Adam/pg1", "loss_scale"]


class Scored(Overflows):
    """Logs what its ModelCheckpoints monitor, per epoch and per step."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_accuracy", batch[0].gt(0).float().mean())


def test_what_a_checkpoint_monitors_is_drawn_after_the_losses(tmp_path, capsys):
    data = DataLoader(TensorDataset(torch.ones(8, 4)), 4)
    monitors = ("val_accuracy", "val_loss", "train_loss", "grad_norm")
    checkpoints = [ModelCheckpoint(monitor=name, filename=name) for name in monitors]
    quiet_trainer(
        max_epochs=2,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path, name="", version="a"),
        callbacks=checkpoints,
    ).fit(Scored(), data, data)
    assert json.loads((tmp_path / "a" / "run.json").read_text())["monitors"] == list(monitors)
    assert main(["plot", str(tmp_path / "a")]) == 0
    titles = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert titles == ["loss", "validation loss", "val_accuracy", "gradient norm"]
    assert main(["plot", str(tmp_path / "a" / "metrics.csv")]) == 0
    assert "\nval_accuracy" in capsys.readouterr().out


def test_an_error_is_drawn_where_nothing_is_called_a_loss(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,accuracy,mse,val_mse\n0,0.5,3,4\n5,0.6,1,2\n")
    panels = choose(read_runs([tmp_path]))
    assert [(panel.title, line.metric) for panel in panels for line in panel.lines] == [
        ("loss", "mse"),
        ("validation loss", "val_mse"),
    ]


def test_what_runs_of_earlier_versions_kept_as_best_is_drawn(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss,f1,other\n0,3,0.5,1\n5,1,0.9,2\n")
    for text, titles in (
        ('{"best": {"f1": 0.9}}', ["loss", "f1"]),
        ('{"monitors": ["other", "gone"], "best": {"f1": 0.9}}', ["loss", "other"]),
        ('{"monitors": null}', ["loss"]),
        ("[", ["loss"]),
    ):
        (tmp_path / "run.json").write_text(text)
        assert [panel.title for panel in choose(read_runs([tmp_path]))] == titles


def test_what_a_restart_took_back_is_not_drawn(tmp_path):
    for steps, purge in ((range(6), None), (range(3, 5), 3)):
        logger = TensorBoardLogger(tmp_path, name="", version="run", purge_step=purge)
        for step in steps:
            logger.log_metrics({"loss": float(step)}, step)
        logger.close()
    assert read_curves(tmp_path / "run")["loss"].steps == [0, 1, 2, 3, 4]


def test_pictures_in_files(runs, capsys):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    folders = [str(runs / "events" / f"version_{number}") for number in (0, 1)]
    assert main(["plot", *folders, "--out", "both.png"]) == 0
    assert "picture: both.png" in capsys.readouterr().out
    assert Path("both.png").read_bytes().startswith(b"\x89PNG")
    plot(folders, out="both.svg", metrics=["val_loss"], smooth=0)
    assert "<!-- version_1 -->" in Path("both.svg").read_text()
    plot(folders[:1], out="one.svg")
    assert "<!-- version_0 -->" in Path("one.svg").read_text()
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        plot(folders, out="nowhere/both.svg")


def test_without_matplotlib_the_extra_is_named(runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(runs / "events" / "version_0"), "--out", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is not there; give the folder of a run"),
        (["empty"], "empty holds no log: TensorBoard's events, metrics.csv or metrics.jsonl; give the folder of a run"),
        (["damaged/metrics.csv"], "damaged/metrics.csv cannot be read as a log"),
        (["damaged/events.out.tfevents.1"], "cannot be read as a log: an event in it is damaged"),
        (["good", "--metric", "los"], "no run logged 'los'; did you mean 'loss'? (logged: loss)"),
        (["good", "--smooth", "1"], "smooth=1: choose 0"),
        (["good", "--out", "x.jpg"], "out='x.jpg': give a file that ends in .png"),
        (["other"], "choose by --metric (logged: accuracy)"),
    ],
)
def test_a_mistake_says_what_to_change(words, message, capsys):
    for folder in ("damaged", "good", "other", "empty"):
        Path(folder).mkdir()
    Path("good/metrics.csv").write_text("step,loss\n0,1.0\n")
    Path("other/metrics.csv").write_text("step,accuracy\n0,1.0\n")
    Path("damaged/metrics.csv").write_text("step,loss\nx,1.0\n")
    Path("damaged/events.out.tfevents.1").write_bytes((4).to_bytes(8, "little") + b"\xff" * 12)
    assert main(["plot", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("every", [0, 50])
def test_a_run_that_logged_nothing_says_why(every, capsys):
    class Silent(Overflows):
        def validation_step(self, batch, batch_idx):
            """Logs nothing."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("only", loss, on_step=True)
            return loss

        def log(self, name, *arguments, **options):
            if name == "only":
                super().log(name, *arguments, **options)

    data = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
    trainer = quiet_trainer(logger=True, max_epochs=1, log_every_n_steps=every)
    trainer.fit(Silent(), data)
    assert main(["plot", trainer.log_dir]) == 2
    said = f"holds no log: its run of 8 steps logged no value, with log_every_n_steps={every}\n"
    assert said in capsys.readouterr().err


def test_a_run_that_still_runs_is_not_named_as_one_below_itself(capsys):
    Path("alone").mkdir()
    Path("alone/run.json").write_text('{"status": "running"}')
    assert main(["plot", "alone"]) == 2
    assert "alone holds no log: TensorBoard's events, metrics.csv or metrics.jsonl; give" in capsys.readouterr().err


def test_the_folder_above_names_the_runs_in_it(runs, capsys):
    assert main(["plot", str(runs / "events")]) == 2
    assert f"runs below it: {runs}/events/version_0, {runs}/events/version_1" in capsys.readouterr().err
    assert [one.name for one in find_runs(runs)] == ["version_0"] * 3 + ["version_1"] * 3


def test_a_pause_before_a_resume_is_no_time_of_training(tmp_path):
    """Ten steps a second; the run was stopped after step 49, and went on from step 40 an hour later."""
    rows = [{"step": step, "time": step / 10 + (3600 if step >= 40 else 0), "loss": 1.0} for step in range(0, 100, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "run-1.json").write_text('{"first_step": 0}')
    (tmp_path / "run.json").write_text('{"first_step": 40}')
    pace = choose(read_runs([tmp_path]))[-1]
    assert pace.title == "steps/s"
    assert pace.lines[0].curve.values == pytest.approx([10.0] * len(pace.lines[0].curve.values))
    assert set(range(45, 100, 5)) <= set(pace.lines[0].curve.steps)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1,1e308\n2,-1e308\n3,1e308\n", 0),
        ("1,1.7976931348623157e308\n2,1.7976931348623157e308\n", 0),
        ("1,5e-324\n2,0\n", 0),
        ("".join(f"{step},{(-1) ** step * 1.7e308}\n" for step in range(20)), 0),
        ("9000000000000000000,1\n0,2\n", 0),
        (f"{'9' * 400},1\n2,1\n", 2),
        ("nan,1\n", 2),
        ("1e300,1\n", 2),
    ],
)
def test_huge_numbers_are_drawn_or_refused_in_one_line(text, code, capsys):
    Path("metrics.csv").write_text(f"step,loss\n{text}")
    Path("scale").mkdir()
    Path("scale/metrics.csv").write_text(f"step,loss_scale\n{text}")
    assert main(["plot", "."]) == code
    assert main(["plot", "scale"]) == code
    captured = capsys.readouterr()
    assert ("a step in it is too large" in captured.err) == (code == 2)
    assert len(captured.err.splitlines()) == code
    assert "inf" not in captured.out
    if importlib.util.find_spec("matplotlib"):
        assert main(["plot", ".", "--out", "x.png"]) == code


@pytest.mark.parametrize("row", ["[1]", "null", "3", '{"step": null}', '{"loss": 1}', '{"step": 1, "loss": []}', "["])
def test_a_row_of_another_kind_is_refused_in_one_line(row, capsys):
    Path("metrics.jsonl").write_text(f"{row}\n")
    assert main(["plot", "."]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("matplotlib", [True, False])
def test_a_notebook_gets_one_output(matplotlib, runs, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs the package nbclient")
    nbformat = pytest.importorskip("nbformat", reason="needs the package nbformat")
    for package in ("ipykernel", *(["matplotlib"] if matplotlib else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    hide = "" if matplotlib else "import sys; sys.modules['matplotlib'] = None\n"
    code = f"{hide}from fabricamp.runs import plot\nplot([{str(runs / 'events' / 'version_0')!r}])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "display_data"
    assert ("image/png" in output.data) == matplotlib
    assert ("<pre" in output.data.get("text/html", "")) == (not matplotlib)


@pytest.mark.parametrize("columns", [60, 100])
def test_a_title_keeps_its_values_in_a_narrow_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    Path("metrics.csv").write_text("step,validation_loss_of_all\n0,0.123456\n1000,0.0654321\n2000,0.07\n")
    assert main(["plot", "."]) == 0
    out = capsys.readouterr().out
    assert "last 0.07, lowest 0.06543 at step 1000" in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= columns
