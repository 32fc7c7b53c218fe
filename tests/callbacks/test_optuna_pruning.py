"""OptunaPruning, with Optuna's own studies, pruners and storages."""

from __future__ import annotations

import json
import warnings

import pytest

from fabricamp import Callback, ConfigError
from fabricamp.callbacks import OptunaPruning
from fabricamp.loggers import CSVLogger
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

optuna = pytest.importorskip("optuna", reason="needs the package optuna")

PRUNED, COMPLETE = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.COMPLETE


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


class Given(Classifier):
    """Logs given values as validation results; trial 0 improves, later trials are bad from the third epoch on."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def validation_step(self, batch, batch_idx):
        bad = self.number and self.current_epoch >= 2
        self.log("val_loss", 10.0 if bad else 1.0 / (1 + self.current_epoch))


def study(**options):
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    return optuna.create_study(pruner=pruner, **options)


def objective_of(**options):
    def objective(trial):
        callbacks = [OptunaPruning(trial, "val_loss")]
        trainer = quiet_trainer(max_epochs=5, callbacks=callbacks, num_sanity_val_steps=2, **options)
        trainer.fit(Given(trial.number), loader(8), loader(8))
        return float(trainer.callback_metrics["val_loss"])

    return objective


def check(found):
    assert [one.state for one in found.trials] == [COMPLETE, PRUNED]
    assert list(found.trials[0].intermediate_values) == [0, 1, 2, 3, 4]
    assert found.trials[1].intermediate_values == {0: 1.0, 1: 0.5, 2: 10.0}
    assert found.best_value == pytest.approx(0.2)


def test_a_pruned_trial_ends_as_any_other_run(tmp_path):
    found = study()
    found.optimize(objective_of(), n_trials=2)
    check(found)
    ended = []

    class Ends(Callback):
        def on_fit_end(self, trainer, pl_module):
            ended.append(trainer.current_epoch)

        def on_exception(self, trainer, pl_module, exception):
            ended.append(exception)

    logger = CSVLogger(tmp_path, name="", version="run")
    trial = found.ask()
    trainer = quiet_trainer(max_epochs=5, callbacks=[Ends(), OptunaPruning(trial, "val_loss")], logger=logger)
    with pytest.raises(optuna.TrialPruned, match="val_loss=10 at 2"):
        trainer.fit(Given(1), loader(8), loader(8))
    assert ended == [3]
    assert (trainer.state.status, trainer.global_step) == ("finished", 6)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["status"], run["reason"]) == ("finished", "Optuna's pruner ended the trial: val_loss=10 at 2")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Given(0), loader(8), loader(8))  # the pruner's decision on the previous fit does not end this one
    assert trainer.current_epoch == 4


@pytest.mark.parametrize("storage", ["memory", "sqlite"])
def test_processes_that_the_trainer_starts_report_home(tmp_path, storage):
    options = {} if storage == "memory" else {"storage": f"sqlite:///{tmp_path}/trials.db"}
    found = study(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Optuna warns about values that are reported twice
        found.optimize(objective_of(devices=2, strategy="ddp", start_method="fork", precision="O1"), n_trials=2)
    check(found)


def on_a_rank(rank_of):
    found = study()
    trials = []

    def objective(trial):
        trials.append(trial.number)
        given = trial if rank_of() == 0 else None
        trainer = quiet_trainer(
            max_epochs=5, devices="auto", strategy="delayed_ddp", callbacks=[OptunaPruning(given, "val_loss")]
        )
        trainer.fit(Given(trial.number), loader(8), loader(8))
        return float(trainer.callback_metrics["val_loss"])

    found.optimize(objective, n_trials=2)
    return [one.state.name for one in found.trials], [one.intermediate_values for one in found.trials]


def rank():
    import os

    return int(os.environ["RANK"])


def test_ranks_end_together_by_rank_zeros_word():
    (states, values), (other, nothing) = run_ranks(on_a_rank, 2, rank)
    assert states == other == ["COMPLETE", "PRUNED"]
    assert list(values[1]) == [0, 1, 2]
    assert nothing == [{}, {}]


def test_other_cadences_report_by_step():
    trial = study().ask()
    options = {"max_epochs": 1, "val_check_interval": 2, "callbacks": [OptunaPruning(trial, "val_loss")]}
    quiet_trainer(**options).fit(Given(0), loader(32), loader(8))
    assert list(trial.study.trials[0].intermediate_values) == [2, 4, 6, 8]


def test_without_validation_the_epoch_counts():
    trial = study().ask()
    quiet_trainer(max_epochs=2, callbacks=[OptunaPruning(trial, "loss_epoch")]).fit(Epochs(), loader(8))
    assert list(trial.study.trials[0].intermediate_values) == [0, 1]


class Epochs(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True)
        return loss


def test_a_trial_that_goes_on_has_its_values(tmp_path):
    first = quiet_trainer(max_epochs=2, callbacks=[OptunaPruning(study().ask(), "val_loss")])
    first.fit(Given(0), loader(8), loader(8))
    first.save_checkpoint(tmp_path / "file.ckpt")
    trial = study().ask()
    trainer = quiet_trainer(max_epochs=3, callbacks=[OptunaPruning(trial, "val_loss")])
    trainer.fit(Given(0), loader(8), loader(8), ckpt_path=tmp_path / "file.ckpt")
    assert list(trial.study.trials[0].intermediate_values) == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OptunaPruning("val_loss", "val_loss"), "give the trial"),
        (lambda: OptunaPruning(optuna.create_study(directions=["minimize"] * 2).ask(), "x"), "several directions"),
        (lambda: fit_for("val_los"), "did you mean 'val_loss'"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def fit_for(monitor):
    trainer = quiet_trainer(max_epochs=1, callbacks=[OptunaPruning(study().ask(), monitor)])
    trainer.fit(Given(0), loader(8), loader(8))
