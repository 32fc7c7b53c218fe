"""Callbacks and loggers of Lightning's own classes, and users' subclasses of them: fabricamp's replace them during a run."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricamp
from fabricamp import ConfigError
from fabricamp.lightning.given import lines_of
from tests.small import quiet_trainer

pl = pytest.importorskip("lightning.pytorch", reason="needs the package lightning")


def loader():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4)


class Steps:
    """The methods of a module, for either base class; its two layers have biases with equal initial values."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.lr = lr
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        for one in (self.encoder[0], self.head[0]):
            nn.init.zeros_(one.bias)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.encoder(x)), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Module(Steps, pl.LightningModule):
    """On Lightning's base class."""


class OwnModule(Steps, fabricamp.TrainingModule):
    """On fabricamp's base class."""


class Answers:
    """A user's finetuning callback, for either base class."""

    def __init__(self, at=1):
        super().__init__()
        self.at = at
        self.ends = []

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.encoder, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.at:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer, lr=0.05)

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append((trainer.current_epoch, len(trainer.optimizers[0].param_groups)))


class Finetuning(Answers, pl.callbacks.BaseFinetuning):
    """On Lightning's base class."""


class OwnFinetuning(Answers, fabricamp.callbacks.BaseFinetuning):
    """On fabricamp's base class."""


def weights(module):
    return torch.cat([value.detach().float().flatten() for value in module.parameters()])


@pytest.mark.parametrize(("precision", "at"), [("O0", 0), ("O2", 0), ("O5", 1), ("bf16-mixed", 1)])
def test_a_users_finetuning_trains_as_one_on_our_base(precision, at, tmp_path):
    """Also resumed within the second phase; equal biases of two layers are two parameters, and masters are found."""
    seen = []
    for kind, callback in ((Module, Finetuning), (OwnModule, OwnFinetuning)):
        file = tmp_path / f"{kind.__name__}.ckpt"
        first = quiet_trainer(max_epochs=2, precision=precision, callbacks=callback(at))
        first.fit(kind(), loader())
        first.save_checkpoint(file)
        module, own = kind(), callback(at)
        quiet_trainer(max_epochs=3, precision=precision, callbacks=own).fit(module, loader(), ckpt_path=file)
        seen.append((weights(module), own.ends))
        straight = kind()
        quiet_trainer(max_epochs=3, precision=precision, callbacks=callback(at)).fit(straight, loader())
        assert torch.equal(weights(straight), weights(module))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1] == [(2, 2)]


def test_its_class_and_its_state_have_the_users_name(tmp_path, caplog):
    given = Finetuning(at=0)
    trainer = quiet_trainer(max_epochs=1, callbacks=given)
    (ours,) = trainer.callbacks
    assert isinstance(ours, fabricamp.callbacks.BaseFinetuning)
    assert (type(ours).__name__, ours.state_key) == ("Finetuning", "Finetuning")
    again = pickle.loads(pickle.dumps(ours))
    assert type(again) is type(ours)
    assert isinstance(again.finetune_function.args[0], Finetuning)
    trainer.fit(Module(), loader())
    assert "Finetuning, of Lightning's BaseFinetuning, runs as fabricamp.callbacks.BaseFinetuning()" in caplog.text
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert "Finetuning" in torch.load(tmp_path / "file.ckpt", weights_only=True)["callbacks"]
    assert vars(given).keys() == {"at", "ends", "_internal_optimizer_metadata", "_restarting"}
    second = type("Second", (pl.callbacks.BaseFinetuning,), {name: vars(Answers)[name] for name in ASKED})()
    second.at = 0
    keys = [one.state_key for one in quiet_trainer(callbacks=[Finetuning(), second]).callbacks]
    assert keys == ["Finetuning", "Second"]


ASKED = ("freeze_before_training", "finetune_function")


def test_a_file_of_lightnings_goes_on_in_a_users_finetuning(tmp_path):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    theirs = pl.Trainer(max_epochs=2, enable_checkpointing=False, callbacks=Finetuning(), **quiet)
    theirs.fit(Module(), loader())
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    own, module = Finetuning(), Module()
    quiet_trainer(max_epochs=3, callbacks=own).fit(module, loader(), ckpt_path=tmp_path / "theirs.ckpt")
    assert own.ends == [(2, 2)]


def test_the_throughput_is_asked_by_the_users_functions():
    given = pl.callbacks.ThroughputMonitor(len, length_fn=max, window_size=7, separator=".")
    (found,) = quiet_trainer(callbacks=given).callbacks
    assert type(found) is fabricamp.callbacks.ThroughputMonitor
    assert (found.batch_size_fn, found.length_fn, found.window_size, found.separator) == (len, max, 7, ".")


def test_a_timer_ends_the_run_and_tells_its_times():
    given = pl.callbacks.Timer({"hours": 1}, interval="epoch")
    trainer = quiet_trainer(max_epochs=1, callbacks=given)
    trainer.fit(Module(), loader())
    assert trainer.callbacks[0]._interval == "epoch"
    assert 0 < given.time_elapsed("train") < given.end_time() < given.start_time() + 60
    assert given.time_remaining() == 3600 - given.time_elapsed()
    late = quiet_trainer(max_epochs=1, callbacks=pl.callbacks.Timer("00:00:00:00"))
    late.fit(Module(), loader())
    assert late.global_step < 6


class EveryThird(pl.callbacks.WeightAveraging):
    """A subclass like the one in Lightning's documentation."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx % 3 == 0


def test_averages_become_ours_with_their_arguments():
    ours = fabricamp.callbacks
    found = quiet_trainer(
        callbacks=pl.callbacks.EMAWeightAveraging(
            decay=0.75, use_buffers=False, update_every_n_steps=2, update_starting_at_step=4
        )
    ).callbacks[0]
    assert type(found) is ours.EMAWeightAveraging
    assert vars(found)["_rule"].share(1) == 0.25
    assert (found._use_buffers, found.update_every_n_steps, found.update_starting_at_step) == (False, 2, 4)
    for default in (pl.callbacks.EMAWeightAveraging(), pl.callbacks.WeightAveraging(), EveryThird()):
        assert quiet_trainer(callbacks=default).callbacks[0]._use_buffers is None  # Lightning's True averages masks too
    own_mean = pl.callbacks.StochasticWeightAveraging(0.5, 2, annealing_epochs=3, annealing_strategy="linear")
    found = quiet_trainer(max_epochs=4, callbacks=own_mean).callbacks[0]
    assert type(found) is ours.StochasticWeightAveraging
    known = (found._swa_lrs, found._swa_epoch_start, found._annealing_epochs, found._annealing_strategy)
    assert known == (0.5, 2, 3, "linear")
    assert found._rule.one is None
    given = pl.callbacks.StochasticWeightAveraging(0.5, avg_fn=torch.add)
    assert quiet_trainer(max_epochs=4, callbacks=given).callbacks[0]._rule.one is torch.add


def test_a_users_average_says_when():
    class OwnEveryThird(fabricamp.callbacks.WeightAveraging):
        should_update = EveryThird.should_update

    module, own = Module(), OwnModule()
    quiet_trainer(max_epochs=2, callbacks=EveryThird()).fit(module, loader())
    quiet_trainer(max_epochs=2, callbacks=OwnEveryThird()).fit(own, loader())
    plain = Module()
    quiet_trainer(max_epochs=2, callbacks=pl.callbacks.WeightAveraging()).fit(plain, loader())
    assert torch.equal(weights(module), weights(own))
    assert not torch.equal(weights(module), weights(plain))


class Bar(pl.callbacks.TQDMProgressBar):
    """Overrides get_metrics as in Lightning's documentation."""

    def get_metrics(self, trainer, pl_module):
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return {**items, "mine": trainer.global_step}


def test_a_users_bar_is_asked_for_its_values(caplog):
    trainer = quiet_trainer(max_epochs=1, callbacks=Bar(), enable_progress_bar=True)
    assert [type(one).__name__ for one in trainer.callbacks] == ["Bar"]
    trainer.fit(Module(), loader())
    assert "mine 6" in caplog.text.replace("=", " ")


def test_a_subclass_with_arguments_of_its_own_is_known():
    class Patient(pl.callbacks.EarlyStopping):
        def __init__(self):
            super().__init__("loss", patience=7)

    assert quiet_trainer(callbacks=Patient()).early_stopping_callback.patience == 7


def test_what_ours_would_not_ask_is_refused():
    class Loads(Finetuning):
        def state_dict(self):
            return {}

    with pytest.raises(ConfigError, match="Loads derives from Lightning's BaseFinetuning; change the import"):
        quiet_trainer(callbacks=Loads())


def test_a_bar_that_draws_by_itself_is_refused_with_the_import_to_change():
    """fabricamp's bar lacks the overridden method."""

    class Bar(pl.callbacks.TQDMProgressBar):
        def init_train_tqdm(self):
            return super().init_train_tqdm()

    with pytest.raises(ConfigError, match="Bar derives from Lightning's TQDMProgressBar; change the import"):
        quiet_trainer(callbacks=[Bar()])


def test_lightnings_tuner_searches_in_our_trainer():
    """It also restores the callbacks, so it can search again, and the fit makes no search."""
    module, trainer = Module(lr=1e-4), quiet_trainer(max_epochs=1)
    tuner = pl.tuner.Tuner(trainer)
    for _ in range(2):
        finder = tuner.lr_find(module, loader(), min_lr=1e-3, max_lr=0.5, num_training=30)
        assert module.lr == finder.suggestion()
        assert trainer.callbacks == []
        assert trainer.global_step == 0
    own = OwnModule(lr=1e-4)
    expected = fabricamp.tuner.Tuner(quiet_trainer(max_epochs=1)).lr_find(
        own, loader(), min_lr=1e-3, max_lr=0.5, num_training=30
    )
    assert expected.results == finder.results
    trainer.fit(module, loader())
    assert trainer.global_step == 6


def test_mlflow_and_wandb_become_ours_by_what_they_were_made_with(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking", reason="needs the package mlflow")
    pytest.importorskip("wandb", reason="needs the package wandb")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    mlflow = MLFlowLogger("digits", "first", tracking_uri=tmp_path.as_uri(), prefix="p", tags={"who": "me"})
    trainer = quiet_trainer(max_epochs=1, logger=mlflow, log_every_n_steps=2)
    trainer.fit(Module(), loader())
    run = mlflow.experiment.get_run(mlflow.run_id)  # Lightning's object has the run's id
    assert run.data.tags["who"] == "me"
    assert run.data.tags["mlflow.runName"] == "first"
    assert run.data.metrics["p-loss"] == pytest.approx(float(trainer.callback_metrics["loss"]))
    wandb = WandbLogger("name", tmp_path, id="theid", offline=True, project="digits", prefix="p", tags=["a"])
    (ours,) = quiet_trainer(logger=wandb).loggers
    assert type(ours) is fabricamp.loggers.WandbLogger
    assert ours.log_dir == os.fspath(tmp_path / "digits" / "theid")
    wanted = {"name": "name", "project": "digits", "dir": os.fspath(tmp_path), "resume": "allow", "mode": "offline"}
    assert ours._options == {**wanted, "tags": ["a"]}
    assert (ours.version, ours._prefix) == ("theid", "p")
    assert pickle.loads(pickle.dumps(ours)).version == "theid"
    assert wandb._experiment is None  # a copy for another process opens no run
    addressed = MLFlowLogger(tracking_uri="https://me:secret@nowhere.invalid")
    (line,) = lines_of(quiet_trainer(logger=addressed).loggers)
    assert "MLFlowLogger(tracking_uri=...)" in line
    (uploads,) = quiet_trainer(logger=WandbLogger(log_model="all", checkpoint_name="mine")).loggers
    assert (uploads._uploads.when, uploads._checkpoint_name) == ("all", "mine")


@pytest.mark.parametrize("says_so", [True, False])
def test_comets_experiment_is_gone_on_in(tmp_path, monkeypatch, says_so):
    """Offline; if the object itself is set to offline, Lightning's logger would write nothing."""
    monkeypatch.setenv("COMET_INTERNAL_SENTRY_DSN", "")
    monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    for name in ("COMET_API_KEY", "COMET_EXPERIMENT_KEY", "COMET_PROJECT_NAME", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("comet_ml", reason="needs the package comet_ml")
    from lightning.pytorch.loggers import CometLogger

    options = {"log_env_details": False, "log_code": False, "log_git_metadata": False, "display_summary_level": 0}
    options |= {"online": False} if says_so else {"mode": "create"}
    comet = CometLogger(offline_directory=os.fspath(tmp_path), project="digits", prefix="p", **options)
    key = comet.version
    trainer = quiet_trainer(max_epochs=1, logger=comet, log_every_n_steps=2)
    assert type(trainer.logger) is fabricamp.loggers.CometLogger
    trainer.fit(Module(), loader())
    assert trainer.logger.version == comet.version == key
    comet.experiment.end()  # Lightning's object has the experiment
    (file,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        lines = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [one["payload"]["metric"] for one in lines if one["type"] == "metric_msg"]
    assert [one["step"] for one in metrics if one["metricName"] == "p-loss"] == [1, 3, 5]
