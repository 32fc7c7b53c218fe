"""Objects of Lightning's own and of derived classes in fabricamp's Trainer: the objects are not changed."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import fabricamp
from fabricamp import ConfigError, TrainingModule
from fabricamp.lightning.bases import lightnings_base
from tests.inside import session
from tests.lightning.run import LIGHTNINGS_OBJECTS, NAMES, printed
from tests.lightning.test_programs import FOLLOWS_NOISE, differences, expected, torch_computes_the_same
from tests.small import quiet_trainer

pl = pytest.importorskip("lightning.pytorch", reason="needs the package lightning")

NOT_THESE = {
    "boring_model": "reads the module's logger behind the run, which the module has no part in then",
    "by_hand": "is torch alone",
    "ddp_strategy": "gives a strategy of Lightning's, which is refused by name",
    "profiler": "gives a profiler of Lightning's, which is refused by name",
}


# Lightning's own warnings about its users' programs.
@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`")
@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict but not in the checkpoint")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_THESE])
def test_a_program_with_lightnings_objects_prints_what_lightning_printed(name, tmp_path, monkeypatch):
    if name in FOLLOWS_NOISE and not torch_computes_the_same():
        pytest.skip("torch sums in another order here than where this was recorded")
    monkeypatch.chdir(tmp_path)
    different = list(differences(expected(name), printed(name, LIGHTNINGS_OBJECTS)))
    assert not different, "".join(different)


def data():
    return DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), batch_size=4)


class Steps:
    """The methods of a module, for either base class."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=4, sync_dist=True)
        self.log_dict({"sum": loss.detach(), "largest": batch_idx}, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.net(batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"}]


class ByHand(Steps):
    """Toggles, clips and schedules two optimizers itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = self.net(batch).pow(2).mean()
            self.manual_backward(loss)
            frozen = [parameter.grad is None for parameter in self.parameters()]
            assert any(frozen) or batch_idx
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(self.net[place].parameters(), lr=0.5) for place in (0, 2)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in optimizers]


def pair(steps):
    """Returns the same module on Lightning's and on fabricamp's base class."""
    return type(steps.__name__, (steps, pl.LightningModule), {}), type(steps.__name__, (steps, TrainingModule), {})


# The first steps at O1 overflow and are skipped: torch then warns about the schedule, as with its own GradScaler.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("steps", [Steps, ByHand])
def test_training_is_that_of_a_module_of_ours(steps, precision):
    seen = []
    for kind in pair(steps):
        module, trainer = kind(), quiet_trainer(max_epochs=2, precision=precision)
        trainer.fit(module, data(), data())
        seen.append(
            ({**module.state_dict()}, {name: str(float(value)) for name, value in trainer.callback_metrics.items()})
        )
    (weights, metrics), (ours, metrics_of_ours) = seen
    assert metrics == metrics_of_ours
    assert {"loss", "v"} <= metrics.keys()
    for name, value in ours.items():
        assert torch.equal(weights[name].nan_to_num(7), value.nan_to_num(7)), (
            name
        )  # O3 has no masters, and half weights cannot hold a step of Adam


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp", "fsdp"])
def test_two_processes_train_it_too(strategy):
    seen = []
    for kind in pair(Steps):
        module = kind()
        quiet_trainer(max_epochs=1, devices=2, strategy=strategy, start_method="fork").fit(module, data())
        seen.append(module.net[0].weight.detach().clone())
    assert torch.equal(*seen)


LENT = {
    "log",
    "log_dict",
    "print",
    "toggle_optimizer",
    "untoggle_optimizer",
    "_attachment",
    "_call_batch_hook",
    "__getstate__",
}


class Copied(Steps):
    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.kept = [
            vars(one) for one in (copy.deepcopy(self), copy.copy(self), pickle.loads(pickle.dumps(self)))
        ]
        self.trainer.lent = vars(self).keys() & LENT
        if self.hparams.lr == 7:
            raise RuntimeError("from the step")


CopiedModule = Copied  # replaced below by the class that pickle finds under this name


@pytest.mark.parametrize("lr", [0.1, 7])
def test_what_it_was_lent_is_taken_back_and_never_copied(lr, monkeypatch):
    kind = pair(Copied)[0]
    kind.__module__, kind.__qualname__ = __name__, "CopiedModule"
    monkeypatch.setattr(sys.modules[__name__], "CopiedModule", kind)
    module, trainer = kind(lr), quiet_trainer(max_steps=2)
    before = vars(module).keys() | {"_hparams", "_log_hyperparams"}
    if lr == 7:
        with pytest.raises(RuntimeError, match="from the step"):
            trainer.fit(module, data())
    else:
        trainer.fit(module, data())
    assert trainer.lent == LENT
    for kept in trainer.kept:
        assert not kept.keys() & LENT
        assert kept["_trainer"] is None
    assert vars(module).keys() <= before
    assert module._trainer is None
    assert module._fabric is None
    assert "log" in vars(pl.LightningModule)
    assert pl.LightningModule.log.__module__ == "lightning.pytorch.core.module"


def test_a_run_within_a_run_gives_back_what_was_lent_before():
    class Asks(Steps, pl.LightningModule):
        def on_train_epoch_end(self):
            self.found = quiet_trainer().validate(self, data(), verbose=False)
            self.log("behind", self.trainer.max_epochs)

    module, trainer = Asks(), quiet_trainer(max_epochs=2)
    module.trainer = before = pl.Trainer(
        logger=False, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, data())
    assert trainer.callback_metrics["behind"] == 2
    assert module.found[0].keys() == {"v"}
    assert module.trainer is before
    assert not vars(module).keys() & LENT


def test_no_hook_of_the_base_is_taken_for_the_users():
    class Bare(pl.LightningModule):
        def training_step(self, batch, batch_idx):
            return self.net(batch).sum()

        configure_optimizers = Steps.configure_optimizers

    module = Bare()
    module.net, module.hparams["lr"] = torch.nn.Linear(4, 1), 0.1
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, data(), data())
    hooks = session(trainer).hooks
    assert [name for name in dir(pl.LightningModule) if name.startswith("on_") and hooks.module(name)] == []
    assert not trainer.enable_validation
    with pytest.raises(ConfigError, match="Bare has no test_step"):
        trainer.test(module, data())
    with pytest.raises(ConfigError, match="has no configure_optimizers"):
        quiet_trainer().fit(
            type("No", (Bare,), {"configure_optimizers": pl.LightningModule.configure_optimizers})(), data()
        )


def test_a_log_of_its_own_passes_on_through_lightnings():
    class Prefixed(Steps, pl.LightningModule):
        def log(self, name, value, **options):
            super().log(f"mine/{name}", value, **options)

        def on_train_epoch_end(self):
            self.log("end", 3.0)

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Prefixed(), data(), data())
    assert {"mine/loss_step", "mine/loss_epoch", "mine/sum", "mine/v", "mine/end"} <= trainer.callback_metrics.keys()
    plain = quiet_trainer(max_epochs=1)
    plain.fit(pair(Steps)[0](), data(), data())
    assert trainer.callback_metrics["mine/loss_epoch"] == plain.callback_metrics["loss_epoch"]


def test_what_a_step_sees_of_the_run(capsys):
    class Looks(Steps, pl.LightningModule):
        def training_step(self, batch, batch_idx):
            self.seen = (
                self.current_epoch,
                self.global_step,
                self.global_rank,
                self.local_rank,
                str(self.device),
                self.dtype,
            )
            self.gathered = self.all_gather(batch).shape
            self.print("printed", self.trainer.max_steps)
            self.trainer.should_stop = batch_idx == 1
            self.one = self.optimizers()
            self.raw = self.optimizers(use_pl_optimizer=False)
            self.moved = self._apply_batch_transfer_handler(self._on_before_batch_transfer(batch))  # exports call it
            return super().training_step(batch, batch_idx)

    module, trainer = Looks(), quiet_trainer(max_steps=5)
    trainer.fit(module, data())
    assert module.seen == (0, 1, 0, 0, "cpu", torch.float32)
    assert module.gathered == (4, 4)
    assert trainer.global_step == 2
    assert isinstance(module.raw, torch.optim.Adam)
    assert module.moved.shape == (4, 4)
    assert module.one.optimizer is module.raw
    assert "printed 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precision", "within", "behind"),
    [("64-true", torch.float64, torch.float64), ("bf16-true", torch.bfloat16, torch.float32)],
)
def test_the_modules_dtype_is_that_of_its_weights(precision, within, behind):
    class Looks(Steps, pl.LightningModule):
        def configure_optimizers(self):
            self.seen = self.dtype, self.net[0].weight.dtype
            return super().configure_optimizers()

    module = Looks()
    quiet_trainer(max_steps=1, precision=precision).fit(module, data())
    assert module.seen == (within, within)
    assert (module.dtype, module.net[0].weight.dtype) == (behind, behind)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")  # Lightning's own
def test_a_checkpoint_goes_from_one_to_the_other_and_back(tmp_path):
    kind = pair(Steps)[0]
    module, trainer = kind(lr=0.03), quiet_trainer(max_epochs=1)
    trainer.fit(module, data())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    assert torch.load(tmp_path / "ours.ckpt", weights_only=True)["hyper_parameters"] == {"lr": 0.03}
    loaded = kind.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert loaded.hparams.lr == 0.03
    assert torch.equal(loaded.net[0].weight, module.net[0].weight)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    theirs = pl.Trainer(max_epochs=2, enable_checkpointing=False, **quiet)
    theirs.fit(kind(), data(), ckpt_path=tmp_path / "ours.ckpt")
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    further = quiet_trainer(max_epochs=3)
    further.fit(kind(), data(), ckpt_path=tmp_path / "theirs.ckpt")
    assert (theirs.global_step, further.global_step) == (12, 18)


class Data(pl.LightningDataModule):
    def __init__(self, size=24):
        super().__init__()
        self.save_hyperparameters()
        self.called = []

    def prepare_data(self):
        self.called.append("prepare")

    def setup(self, stage):
        self.called.append(f"setup {stage} {self.trainer.max_epochs}")

    def teardown(self, stage):
        self.called.append(f"teardown {stage}")

    def train_dataloader(self):
        return data()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.called.append("moved")
        return batch * 0

    def state_dict(self):
        return {"place": 3}

    def load_state_dict(self, state_dict):
        self.called.append(state_dict)


@pytest.mark.parametrize("base", [pl.LightningModule, TrainingModule])
def test_a_datamodule_of_lightnings(base, tmp_path):
    kind = type("Model", (Steps, base), {})
    given, trainer = Data(size=12), quiet_trainer(max_epochs=1)
    trainer.fit(kind(), given)
    assert given.called == ["prepare", "setup fit 1", *["moved"] * 6, "teardown fit"]
    assert trainer.callback_metrics["sum"] < 1
    assert given.trainer is None
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "file.ckpt").hparams.size == 12
    again = Data()
    quiet_trainer(max_epochs=1).fit(kind(), datamodule=again, ckpt_path=tmp_path / "file.ckpt")
    assert {"place": 3} in again.called


def test_callbacks_on_lightnings_base_run(tmp_path):
    class Mine(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log("mine", 2.0)
            self.seen.append((trainer.global_step, type(pl_module).__name__, float(outputs["loss"])))

        def state_dict(self):
            return {"seen": len(self.seen)}

        def load_state_dict(self, state_dict):
            self.restored = state_dict["seen"]

    lambdas = []
    other = pl.callbacks.LambdaCallback(on_train_end=lambda trainer, pl_module: lambdas.append(trainer.global_step))
    mine, module = Mine(), pair(Steps)[1]()
    trainer = quiet_trainer(max_epochs=1, callbacks=[mine, other])
    trainer.fit(module, data())
    assert mine in trainer.callbacks
    assert [one[:2] for one in mine.seen] == [(step, "Steps") for step in range(1, 7)]
    assert trainer.callback_metrics["mine"] == 2
    assert lambdas == [6]
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    again = Mine()
    quiet_trainer(max_epochs=1, callbacks=again).fit(pair(Steps)[1](), data(), ckpt_path=tmp_path / "file.ckpt")
    assert again.restored == 6


def test_lightnings_own_become_ours_by_name_and_arguments(tmp_path, caplog):
    from lightning.pytorch import callbacks, loggers

    checkpoint = callbacks.ModelCheckpoint(
        tmp_path, "{step}", monitor="v", mode="max", save_top_k=2, every_n_train_steps=2
    )
    stopping = callbacks.EarlyStopping("v", min_delta=0.25, patience=2, mode="min")
    logger = loggers.CSVLogger(tmp_path, name="csv")
    given = [checkpoint, stopping, callbacks.LearningRateMonitor("step"), callbacks.RichProgressBar(refresh_rate=0)]
    trainer = fabricamp.Trainer(max_epochs=1, accelerator="cpu", callbacks=given, logger=logger, val_check_interval=2)
    assert caplog.messages == []
    trainer.fit(pair(Steps)[0](), data(), data())
    shown = caplog.text
    assert json.loads((tmp_path / "csv" / "version_0" / "run.json").read_text())["hyperparameters"] == {"lr": 0.1}
    assert (tmp_path / "csv" / "version_0" / "hparams.yaml").read_text() == "lr: 0.1\n"
    words = "runs as fabricamp.callbacks.EarlyStopping(monitor='v', min_delta=0.25, patience=2"
    assert shown.count(words) == 1
    assert "Lightning's CSVLogger runs as fabricamp.loggers.CSVLogger(" in shown
    ours = trainer.checkpoint_callback
    assert (ours.monitor, ours.mode, ours.save_top_k, ours.every_n_train_steps) == ("v", "max", 2, 2)
    assert (trainer.early_stopping_callback.min_delta, trainer.early_stopping_callback.patience) == (0.25, 2)
    assert not trainer.progress_bar_callback.is_enabled
    assert ours.best_model_path
    assert checkpoint.best_model_path == ours.best_model_path
    assert checkpoint.best_model_score == ours.best_model_score
    assert checkpoint.current_score == ours.current_score is not None
    assert checkpoint.best_k_models.keys() == ours.best_k_models.keys()
    assert logger.log_dir == trainer.logger.log_dir == str(tmp_path / "csv" / "version_0")
    assert stopping.wait_count == trainer.early_stopping_callback.wait_count


@pytest.mark.parametrize(
    "name",
    [
        "BackboneFinetuning",
        "BatchSizeFinder",
        "DeviceStatsMonitor",
        "LearningRateFinder",
        "ModelSummary",
        "RichModelSummary",
        "TQDMProgressBar",
        "RichProgressBar",
    ],
)
def test_each_other_callback_becomes_ours(name):
    callbacks = fabricamp.Trainer(accelerator="cpu", logger=False, callbacks=getattr(pl.callbacks, name)()).callbacks
    assert [type(one) for one in callbacks].count(getattr(fabricamp.callbacks, name)) == 1
    assert not any(isinstance(one, pl.Callback) for one in callbacks)


def test_arguments_that_are_none_or_options_arrive(tmp_path):
    from lightning.pytorch import callbacks, loggers

    logger = loggers.TensorBoardLogger(tmp_path, name="", prefix="mine", flush_secs=7)
    finder = callbacks.LearningRateFinder(early_stop_threshold=None, num_training_steps=30)
    trainer = quiet_trainer(max_epochs=1, logger=logger, callbacks=finder)
    assert (trainer.callbacks[0].early_stop_threshold, trainer.callbacks[0].num_training_steps) == (None, 30)
    trainer.fit(pair(Steps)[0](), data())
    assert finder.optimal_lr.suggestion() == trainer.callbacks[0].optimal_lr.suggestion()
    assert logger.log_dir == trainer.logger.log_dir == str(tmp_path / "version_0")
    with pytest.raises(ConfigError, match="TensorBoardLogger has no argument 'nonsense'"):
        quiet_trainer(logger=loggers.TensorBoardLogger(tmp_path, nonsense=7))


def test_callbacks_of_configure_callbacks_become_ours_too():
    class Model(Steps, pl.LightningModule):
        def configure_callbacks(self):
            return [pl.callbacks.EarlyStopping("v", patience=9)]

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Model(), data(), data())
    assert trainer.early_stopping_callback.patience == 9


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            lambda: type("Mine", (pl.callbacks.EarlyStopping,), {"on_validation_end": print})("v"),
            "derives from Lightning's EarlyStopping; change the import",
        ),
        (lambda: pl.callbacks.ModelPruning("l1_unstructured"), "torch.nn.utils.prune"),
    ],
)
def test_what_cannot_run_is_refused_by_name(callback, words):
    with pytest.raises(ConfigError, match=words):
        quiet_trainer(callbacks=callback())


def test_modules_within_the_module_see_the_run():
    class Outer(Steps, pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = pair(Steps)[0]()

        def training_step(self, batch, batch_idx):
            return self.inner.training_step(batch, batch_idx) + self.net(batch).sum() * self.inner.trainer.max_steps

    module, trainer = Outer(), quiet_trainer(max_steps=2)
    trainer.fit(module, data())
    assert "loss" in trainer.callback_metrics
    assert module.inner._trainer is None
    assert not vars(module.inner).keys() & LENT


def test_pytorch_lightning_is_the_same():
    other = pytest.importorskip("pytorch_lightning", reason="needs the package pytorch_lightning")
    kind = type("Other", (Steps, other.LightningModule), {})
    assert lightnings_base(kind) is other.LightningModule
    module = kind()
    quiet_trainer(max_epochs=1, callbacks=other.callbacks.EarlyStopping("v")).fit(module, data(), data())
    ours = pair(Steps)[1]()
    quiet_trainer(max_epochs=1).fit(ours, data(), data())
    assert torch.equal(module.net[0].weight, ours.net[0].weight)
