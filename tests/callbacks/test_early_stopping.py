"""EarlyStopping: when it checks, what it decides, and its messages."""

from __future__ import annotations

import pytest
import torch

from fabricamp.callbacks import EarlyStopping, EarlyStoppingReason
from fabricamp.errors import ConfigError
from fabricamp.state import RunningStage, TrainerFn


def run(trainer, values, name="x"):
    """Runs epochs with these values until training stops; returns their number."""
    for count, value in enumerate(values, 1):
        trainer.epoch(**{name: value})
        if trainer.state.should_stop:
            return count
    return None


@pytest.mark.parametrize(
    ("options", "values", "epochs", "reason"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 1], 4, "PATIENCE_EXHAUSTED"),
        ({"patience": 2}, [3, 2, 2, 1, 1, 0.5], None, "NOT_STOPPED"),
        ({"patience": 0}, [3, 2, 2], 3, "PATIENCE_EXHAUSTED"),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1], 4, "PATIENCE_EXHAUSTED"),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.6], 2, "PATIENCE_EXHAUSTED"),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 1.8], None, "NOT_STOPPED"),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1, 1.4], 2, "PATIENCE_EXHAUSTED"),
        ({}, [3, float("nan")], 2, "NON_FINITE_METRIC"),
        ({}, [3, float("inf")], 2, "NON_FINITE_METRIC"),
        ({"check_finite": False, "patience": 2}, [3, float("nan"), float("nan")], 3, "PATIENCE_EXHAUSTED"),
        ({"stopping_threshold": 1.0}, [3, 1.0, 0.9], 3, "STOPPING_THRESHOLD"),
        ({"stopping_threshold": 1.0, "mode": "max"}, [0.5, 1.0, 1.1], 3, "STOPPING_THRESHOLD"),
        ({"divergence_threshold": 5.0}, [3, 5.0, 5.1], 3, "DIVERGENCE_THRESHOLD"),
        ({"divergence_threshold": 0.5, "mode": "max"}, [1, 0.5, 0.4], 3, "DIVERGENCE_THRESHOLD"),
    ],
)
def test_decisions(make_trainer, options, values, epochs, reason):
    stopping = EarlyStopping("x", **options)
    trainer = make_trainer(stopping).start()
    assert run(trainer, [float(value) for value in values]) == epochs
    assert stopping.stopping_reason is EarlyStoppingReason[reason]
    if epochs is not None:
        assert stopping.stopped_epoch == epochs - 1
        assert trainer.state.stop_reason == stopping.stopping_reason_message
        assert "x" in stopping.stopping_reason_message


@pytest.mark.parametrize(
    ("settings", "val_batches", "given", "looks_at"),
    [
        ((1.0, 1), [4], None, "epoch"),
        ((0.5, 1), [4], None, "validation"),
        ((1.0, 2), [4], None, "validation"),
        ((1.0, 2), [], None, "epoch"),
        ((1.0, 1), [4], False, "validation"),
        ((0.5, 1), [4], True, "epoch"),
    ],
)
def test_when_it_looks(make_trainer, settings, val_batches, given, looks_at):
    stopping = EarlyStopping("x", check_on_train_epoch_end=given)
    trainer = make_trainer(stopping).start()
    trainer.val_check_interval, trainer.check_val_every_n_epoch = settings
    trainer.num_val_batches = val_batches
    trainer.callback_metrics["x"] = torch.tensor(float("nan"))
    stopping.on_validation_end(trainer, None)
    assert trainer.state.should_stop is (looks_at == "validation")
    stopping.on_train_epoch_end(trainer, None)
    assert trainer.state.should_stop


@pytest.mark.parametrize(
    ("fn", "stage"),
    [(TrainerFn.FITTING, RunningStage.SANITY_CHECKING), (TrainerFn.VALIDATING, RunningStage.VALIDATING)],
)
def test_it_looks_only_while_training(make_trainer, fn, stage):
    trainer = make_trainer(EarlyStopping("x", check_on_train_epoch_end=False)).start()
    trainer.state.fn, trainer.state.stage = fn, stage
    trainer.validate(x=float("nan"))
    assert not trainer.state.should_stop


def test_a_missing_metric_is_an_error_that_lists_the_others(make_trainer):
    trainer = make_trainer(EarlyStopping("val_los")).start()
    with pytest.raises(ConfigError, match=r"did you mean 'val_loss'.*acc, val_loss.*strict=False"):
        trainer.epoch(val_loss=1.0, acc=0.1)


def test_a_missing_metric_is_said_once_where_it_is_allowed(make_trainer, caplog):
    trainer = make_trainer(EarlyStopping("later", strict=False, patience=1)).start()
    assert run(trainer, [1.0, 1.0]) is None
    assert len(caplog.messages) == 1
    assert run(trainer, [1.0, 1.0], "later") == 2


def test_it_goes_on_counting_after_a_resume(make_trainer):
    first = EarlyStopping("x", patience=3)
    run(make_trainer(first).start(), [1.0, 2.0, 2.0])
    second = EarlyStopping("x", patience=3)
    trainer = make_trainer(second).start()
    second.load_state_dict(first.state_dict())
    assert run(trainer, [2.0]) == 1
    assert second.state_key == first.state_key


def test_the_same_value_decides_on_every_rank(make_trainer, monkeypatch):
    stopping = EarlyStopping("x")
    trainer = make_trainer(stopping).start()
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda value, source=0: float("nan"))  # rank 0's value
    trainer.epoch(x=1.0)
    assert trainer.state.should_stop


def test_verbose_says_it_once_or_on_every_rank(make_trainer, caplog):
    for first in (True, False):
        trainer = make_trainer(EarlyStopping("x", verbose=True)).start()
        trainer.is_global_zero = first
        trainer.epoch(x=1.0)
    assert caplog.messages == ["EarlyStopping: x=1 is better than inf"]
    caplog.clear()
    trainer = make_trainer(EarlyStopping("x", verbose=True, log_rank_zero_only=False)).start()
    trainer.is_global_zero, trainer.global_rank = False, 1
    trainer.epoch(x=1.0)
    assert caplog.messages == ["[rank 1] EarlyStopping: x=1 is better than inf"]


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [
        ({"patience": 2}, [3, 2, 2, 2], "x has not improved on 2 in 2 checks"),
        ({"patience": 1}, [3, 3], "x has not improved on 3 in 1 check"),
        ({"patience": 0}, [3, 4], "x has not improved on 3 in 1 check"),
        (
            {"patience": 2, "min_delta": 0.01},
            [0.152312, 0.1454, 0.1433],
            "x has not improved on 0.152312 by more than min_delta=0.01 in 2 checks",
        ),
        (
            {"patience": 1, "min_delta": 0.5, "mode": "max"},
            [1, 1.4],
            "x has not improved on 1 by more than min_delta=0.5 in 1 check",
        ),
    ],
)
def test_its_words_are_true(make_trainer, options, values, words):
    trainer = make_trainer(EarlyStopping("x", **options)).start()
    assert run(trainer, [float(value) for value in values]) == len(values)
    assert trainer.state.stop_reason == words


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "up"},
        {"patience": -1},
        {"patience": "3"},
        {"patience": True},
        {"min_delta": -0.1},
        {"min_delta": float("nan")},
        {"min_delta": "small"},
        {"stopping_threshold": "0.1"},
        {"divergence_threshold": [1]},
        {"monitor": None},
        {"strict": "no"},
        {"check_finite": 0.5},
        {"check_on_train_epoch_end": "no"},
    ],
)
def test_wrong_arguments(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EarlyStopping(**{"monitor": "x", **options})


def test_the_best_score_is_shown_in_fp32_and_kept_as_it_is():
    stopping = EarlyStopping(monitor="loss")
    stopping.load_state_dict({**stopping.state_dict(), "best_score": torch.tensor(0.1, dtype=torch.float64)})
    assert stopping.best_score.dtype == torch.float32
    assert stopping.state_dict()["best_score"].item() == 0.1
