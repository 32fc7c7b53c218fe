"""The forecasting example: its forecasts of days that come after training are better than those of the last week."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "forecasting" / "train.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process and folder; returns the numbers in its last line that match ``pattern``."""

    def run(pattern, *arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--folder", "runs", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found = re.fullmatch(pattern, capsys.readouterr().out.splitlines()[-1])
        assert found
        return [float(number) for number in found.groups()]

    return run


PATTERN = r"mean error of (\d+) forecasts: ([\d.]+), last week repeated: ([\d.]+)"


def test_the_short_form_has_a_quarter_of_the_naive_error(run):
    count, error, naive = run(PATTERN, "--quick")
    assert count == 20
    assert error < naive / 4
    assert list(Path("runs").rglob("*.ckpt"))


def test_training_sees_no_day_that_a_forecast_is_measured_on():
    example = runpy.run_path(str(SCRIPT))
    data, horizon, context = example["ShopData"](count=2, days=200), example["HORIZON"], example["CONTEXT"]
    for shop in range(2):
        data.series[shop] = data.series[shop].new_tensor(range(200))  # each value is its day
    last = {
        part: max(float(window[1].max()) for window in getattr(data, f"{part}_dataloader")().dataset)
        for part in ("train", "val", "test")
    }
    assert last == {"train": 199 - 2 * horizon, "val": 199 - horizon, "test": 199}
    (context_of_forecast,) = data.predict_dataloader().dataset[0]
    assert (context_of_forecast[0], context_of_forecast[-1]) == (200 - horizon - context, 199 - horizon)


@pytest.mark.slow
def test_the_long_form_reaches_its_figure(run):
    _, error, naive = run(PATTERN)
    assert error < 0.25
    assert naive > 1.4


def test_it_draws_its_picture(run):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    run(PATTERN, "--quick", "--picture", "picture.png")
    assert 5_000 < Path("picture.png").stat().st_size < 60_000
