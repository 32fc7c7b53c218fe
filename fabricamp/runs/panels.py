"""Chooses the panels of a plot and their metrics, and smooths the lines."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from fabricamp.errors import ConfigError, nearest
from fabricamp.messages import printable
from fabricamp.runs.reading import Curve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fabricamp.runs.reading import Run

_FEWEST_TO_SMOOTH = 8
_EVALUATION = re.compile(r"(^|[/_.])(val|valid|validation|eval|test)([/_.]|$)")
_PACE = re.compile(r"throughput|(samples|steps|batches|items|tokens|it)(/s|_per_s)", re.IGNORECASE)


class Line(NamedTuple):
    """One metric of one run; ``smoothed`` is empty if only the raw values are drawn."""

    run: str
    metric: str
    curve: Curve
    smoothed: list[float]
    skipped: list[int]
    """Logged steps at which more skipped steps were counted than before."""


class Panel(NamedTuple):
    """Lines on one pair of axes; a ``logarithmic`` y axis shows powers of two."""

    title: str
    lines: list[Line]
    logarithmic: bool = False


def choose(runs: Sequence[Run], metrics: Sequence[str] = (), smooth: float = 0.6) -> list[Panel]:
    """Returns the panels of a plot; raises :class:`ConfigError` if there is nothing to draw."""
    if not 0 <= smooth < 1:
        raise ConfigError(f"smooth={smooth:g}: choose 0 (raw values alone) to below 1")
    known = list(dict.fromkeys(name for run in runs for name in run.curves))
    metrics = [printable(name) for name in metrics]
    for name in metrics:
        if name not in known:
            raise ConfigError(f"no run logged {name!r}{nearest(name, known)} (logged: {', '.join(known) or 'nothing'})")
    if metrics:
        return [_panel(name, [(run, name) for run in runs if name in run.curves], smooth) for name in metrics]
    losses = [
        _panel("loss", _each(runs, training_loss), smooth),
        _panel("validation loss", _each(runs, validation_loss), 0.0),
    ]
    others = [
        _panel("learning rate", _each(runs, _rate), 0.0),
        _panel("loss scale", _each(runs, _scale), 0.0, logarithmic=True),
        _panel("gradient norm", _each(runs, _gradient_norm), smooth),
        _throughput(runs, smooth),
    ]
    panels = [*losses, *_monitored(runs, [*losses, *others]), *others]
    panels = [one for one in panels if one.lines]
    if not panels:
        raise ConfigError(
            "no run logged a loss, a learning rate, what its ModelCheckpoint monitors or anything else that is drawn by default; "
            "choose by --metric (logged: "
            f"{', '.join(known)})"
        )
    return panels


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Returns running means, in which each value counts ``weight`` times as much as the next one; skips inf and nan.

    >>> smoothed([1.0, 1.0, 4.0], 0.5)
    [1.0, 1.0, 2.7142857142857144]
    """
    mean = norm = 0.0
    means = []
    for value in values:
        if abs(value) < float("inf"):
            norm = norm * weight + 1
            mean = mean * (1 - 1 / norm) + value / norm
        means.append(mean if norm else value)
    return means


# -- which metric is what ----------------------------------------------------------------------------------------------------------


def training_loss(names: Sequence[str]) -> str | None:
    """Returns the name of the training loss among the logged names, or None."""
    return _main(_losses([one for one in names if not _EVALUATION.search(one)]))


def validation_loss(names: Sequence[str]) -> str | None:
    """Returns the name of the validation loss among the logged names, or None."""
    return _main(_losses([one for one in names if _EVALUATION.search(one)]))


def is_better_low(name: str) -> bool:
    """Returns whether lower values of a metric are better; for an accuracy, a rate or a throughput the highest value is shown."""
    return re.search(r"loss|error|perplexity|mse|mae", name.lower()) is not None and "scale" not in name.lower()


def _losses(names: Sequence[str]) -> list[str]:
    """Returns the names of losses: those that say so, or else those of errors (``mse``)."""
    low = [one for one in names if is_better_low(one)]
    return [one for one in low if "loss" in one.lower()] or low


def _rate(names: Sequence[str]) -> str | None:
    rates = [one for one in names if re.search(r"(^|[/_.])(lr|learning_rate)([-/]|$)", one)]
    return _main([one for one in rates if not one.endswith(("-momentum", "-weight_decay"))], first=True)


def _scale(names: Sequence[str]) -> str | None:
    return _main([one for one in names if re.search(r"(^|[/_.])(loss_)?scale$", one)])


def _gradient_norm(names: Sequence[str]) -> str | None:
    norms = [one for one in names if "grad" in one.lower() and "norm" in one.lower()]
    return _main([one for one in norms if "total" in one] or norms)


def _pace(names: Sequence[str]) -> str | None:
    return _main([one for one in names if _PACE.search(one)])


def _main(names: Sequence[str], *, first: bool = False) -> str | None:
    """Returns the name to show: ``loss_step`` rather than ``loss_epoch``, ``loss`` rather than ``loss_of_a_part``."""
    if first or not names:
        return next(iter(names), None)
    return min(names, key=lambda one: (len(_base(one)), one.endswith("_epoch")))


# -- lines -------------------------------------------------------------------------------------------------------------------------


def _each(runs: Sequence[Run], find: Callable[[Sequence[str]], str | None]) -> list[tuple[Run, str]]:
    """Returns the runs that logged such a metric, with its name in each of them."""
    names = [(run, find(list(run.curves))) for run in runs]
    return [(run, name) for run, name in names if name is not None]


def _monitored(runs: Sequence[Run], drawn: Sequence[Panel]) -> list[Panel]:
    """Returns a panel for each name that ModelCheckpoints of the runs monitored, unless it is drawn already."""
    names = list(dict.fromkeys(name for run in runs for name in run.monitors))
    shown = {(line.run, _base(line.metric)) for panel in drawn for line in panel.lines}
    panels = []
    for name in names:
        logged = [(run, next((one for one in (name, f"{name}_epoch") if one in run.curves), None)) for run in runs]
        lines = [(run, one) for run, one in logged if one is not None and (run.name, _base(one)) not in shown]
        panels.append(_panel(name, lines, 0.0))
    return panels


def _base(name: str) -> str:
    """Returns the name without the suffix with which ``self.log`` distinguishes values of steps and of epochs."""
    return re.sub(r"_(step|epoch)$", "", name)


def _panel(title: str, logged: Sequence[tuple[Run, str]], smooth: float, *, logarithmic: bool = False) -> Panel:
    lines = [_line(run.name, name, run.curves[name], smooth) for run, name in logged]
    if logarithmic:
        skipped = [_skipped_steps(run, name) for run, name in logged]
        lines = [line._replace(skipped=steps) for line, steps in zip(lines, skipped, strict=True)]
        logarithmic = all(value > 0 for line in lines for value in line.curve.values)
    return Panel(title, lines, logarithmic)


def _line(run: str, name: str, curve: Curve, smooth: float) -> Line:
    is_smoothed = smooth > 0 and len(curve.values) >= _FEWEST_TO_SMOOTH
    return Line(run, name, curve, smoothed(curve.values, smooth) if is_smoothed else [], [])


def _skipped_steps(run: Run, scale: str) -> list[int]:
    """Returns the steps where the count of skipped steps grew; without that metric, where the scale fell."""
    counted = next((curve for name, curve in run.curves.items() if name.endswith("skipped_steps")), None)
    if counted is None:
        curve = run.curves[scale]
        return [
            step
            for step, (before, value) in zip(curve.steps[1:], pairwise(curve.values), strict=True)
            if value < before
        ]
    counts = zip(counted.steps, pairwise([0.0, *counted.values]), strict=True)
    return [step for step, (before, value) in counts if value > before]


def _throughput(runs: Sequence[Run], smooth: float) -> Panel:
    logged = _each(runs, _pace)
    if logged:
        return _panel("throughput", logged, smooth)
    measured = [(run.name, _joined(map(_by_the_clock, _between_pauses(run)))) for run in runs]
    return Panel("steps/s", [_line(name, "steps/s", curve, smooth) for name, curve in measured if curve.steps])


def _between_pauses(run: Run) -> Iterator[Curve]:
    """Yields the parts of the metric that was logged most often: what each fit in the run's folder logged."""
    # "epoch" is left out: a later test logs it too, without training.
    timed = [curve for name, curve in run.curves.items() if curve.times and name != "epoch"]
    longest = max(timed, key=lambda one: len(one.steps), default=Curve([], [], []))
    cuts = [bisect_left(longest.steps, first) for first in run.resumes]
    for begin, end in pairwise([0, *cuts, len(longest.steps)]):
        yield Curve(longest.steps[begin:end], longest.values[begin:end], longest.times[begin:end])


def _joined(parts: Iterable[Curve]) -> Curve:
    steps, values, times = zip(*parts, strict=True)
    return Curve(list(chain(*steps)), list(chain(*values)), list(chain(*times)))


def _by_the_clock(logged: Curve) -> Curve:
    """Returns the steps per second between the points of a metric.

    Points that were written at nearly the same time count as one: the last values of a run are all written at its end.
    """
    pace = Curve([], [], [])
    if len(logged.steps) < 3:
        return pace
    least = (logged.times[-1] - logged.times[0]) / len(logged.times) / 2
    step = logged.steps[0]
    time = logged.times[0]
    for next_step, next_time in zip(logged.steps, logged.times, strict=True):
        if next_time - time <= max(least, 0.0):
            continue
        if next_step > step:
            pace.steps.append(next_step)
            pace.values.append((next_step - step) / (next_time - time))
        step = next_step
        time = next_time
    return pace
