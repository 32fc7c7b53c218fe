"""Timer: the duration of a run, and its end after a given time; LambdaCallback: functions as hooks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from fabricamp import ConfigError
from fabricamp.callbacks import LambdaCallback, Timer
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


def slow(seconds=0.02):
    return LambdaCallback(on_train_batch_end=lambda *_: time.sleep(seconds))


def test_it_notes_the_time_of_each_stage():
    timer = Timer()
    assert (timer.start_time(), timer.end_time(), timer.time_elapsed(), timer.time_remaining()) == (
        None,
        None,
        0.0,
        None,
    )
    trainer = quiet_trainer(max_steps=2, callbacks=[slow(), timer])
    began = time.monotonic()
    trainer.fit(Classifier(), loader())
    assert 0.04 <= timer.time_elapsed() == timer.end_time() - timer.start_time() <= time.monotonic() - began
    began = time.monotonic()
    trainer.validate(Classifier(), loader(), verbose=False)
    assert 0 < timer.time_elapsed("validate") <= time.monotonic() - began
    assert timer.time_elapsed("test") == 0
    with pytest.raises(ValueError, match="no stage|is not a valid"):
        timer.time_elapsed("no stage")


@pytest.mark.parametrize(("interval", "ends"), [("step", range(1, 8)), ("epoch", [8])])
def test_it_ends_the_training_in_time(interval, ends):
    timer = Timer(timedelta(milliseconds=60), interval=interval)
    trainer = quiet_trainer(max_epochs=5, callbacks=[slow(), timer])
    trainer.fit(Classifier(), loader())
    assert trainer.global_step in ends
    assert trainer.state.stop_reason == "Timer: 0.06 s are over"
    assert timer.time_remaining() <= 0


def test_a_resumed_run_counts_the_time_before(tmp_path):
    first = quiet_trainer(max_steps=2, callbacks=[slow(0.1), Timer("00:01:00:00")])
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "file.ckpt")
    timer = Timer({"milliseconds": 200})
    trainer = quiet_trainer(max_steps=8, callbacks=[timer])
    trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / "file.ckpt")
    assert timer.time_elapsed() >= 0.2
    assert trainer.global_step == 2  # no time is left


def on_two_ranks():
    trainer = quiet_trainer(devices="auto", strategy="ddp", max_epochs=50, callbacks=[])
    trainer.callbacks += [slow(0.01 * (trainer.global_rank + 1)), Timer({"milliseconds": 100})]
    trainer.fit(Classifier(), loader(16))
    return trainer.global_step


def test_all_ranks_end_behind_one_step():
    first, second = run_ranks(on_two_ranks, 2)
    assert first == second < 100


@pytest.mark.parametrize("options", [{"duration": "1:2"}, {"duration": 3}, {"interval": "batch"}])
def test_what_is_no_time_is_refused(options):
    with pytest.raises(ConfigError, match="|".join(options)):
        Timer(**options)


def test_functions_are_called_as_hooks_are():
    calls = []
    callback = LambdaCallback(
        setup=lambda trainer, pl_module, stage: calls.append(stage),
        on_train_batch_start=lambda trainer, pl_module, batch, batch_idx: calls.append(batch_idx),
        on_fit_end=None,
    )
    quiet_trainer(max_steps=2, callbacks=[callback]).fit(Classifier(), loader())
    assert calls == ["fit", 0, 1]


def test_what_is_no_hook_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'on_train_end'"):
        LambdaCallback(on_trian_end=print)
    with pytest.raises(ConfigError, match="is not a function"):
        LambdaCallback(on_train_end=3)


def test_max_time_has_a_timer_among_the_callbacks_which_ends_no_run():
    trainer = quiet_trainer(max_epochs=1, max_time={"hours": 1})
    trainer.fit(Classifier(), loader(8))
    (timer,) = trainer.callbacks
    assert type(timer) is Timer
    assert 0 < timer.time_elapsed("train") < 3600
    assert timer.time_remaining() == pytest.approx(3600 - timer.time_elapsed())
    timer.load_state_dict(
        {"time_elapsed": {"train": 7200.0}}
    )  # the time of the resumed run does not count: max_time limits each run separately
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Classifier(), loader(8))
    assert trainer.current_epoch == 2


def test_a_timer_that_is_given_takes_the_place_of_max_time_s():
    timer = Timer()
    assert quiet_trainer(max_time={"hours": 1}, callbacks=[timer]).callbacks == [timer]
