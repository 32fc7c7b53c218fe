"""Programs for Lightning, to compare fabricamp with Lightning: each function runs one case under either package.

python tests/lightning/lightning_repros.py [NAME ...]                         # Lightning
python -m fabricamp.lightning tests/lightning/lightning_repros.py [NAME ...]  # fabricamp in its place

Rows d and c are from Lightning's own test suite; rows t are those of the table "What stays different on purpose" in
docs/from-lightning.md that follow Lightning in such a program.  ``--into FILE`` also writes each outcome as a line of JSON.
"""

import argparse
import csv
import json
import logging
import os
import signal
import tempfile
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
ROWS = {}
LONGEST = 240
"""Seconds until a row counts as hanging; on an idle machine a row takes two, one that starts processes twenty."""


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("v", self.layer(batch).sum())

    def test_step(self, batch, batch_idx):
        self.log("t", self.layer(batch).sum())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


class Lr(Model):
    lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.layer(batch).sum())
        self.optimizers().step()


def loader(n=4, shuffle=False):
    return DataLoader(torch.arange(4.0 * n).reshape(n, 4), batch_size=2, shuffle=shuffle)


def trainer(**more):
    given = {
        "default_root_dir": tempfile.mkdtemp(),
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**given, **more})


def saved(module=None):
    t = trainer()
    t.fit(module or Model(), loader())
    path = tempfile.mkdtemp() + "/x.ckpt"
    t.save_checkpoint(path)
    return path


def row(function):
    ROWS[function.__name__] = function
    return function


# -- defects


@row
def d1_a_step_set_to_none():
    m = Model()
    m.validation_step = None  # no validation
    trainer().fit(m, loader(), loader())
    return "ok"


@row
def d1_a_loader_set_to_none():
    class Own(Model):
        def train_dataloader(self):
            return loader()

    m = Own()
    m.val_dataloader = None
    trainer().fit(m)
    return "ok"


@row
def d1_a_hook_set_to_none():
    m = Model()
    m.on_validation_model_train = None
    trainer().fit(m, loader(), loader())
    return "ok"


@row
def d2_numpy_learning_rate():
    import numpy as np

    m = Lr()
    m.lr = np.logspace(-3, -1, 3)[1]
    trainer(enable_checkpointing=True).fit(m, loader())
    return "ok"


@row
def d3_overfit_batches_validates_on_other_batches():
    seen = {"train": [], "val": []}

    class Own(Model):
        def training_step(self, batch, batch_idx):
            seen["train"].append(batch[:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen["val"].append(batch[:, 0].tolist())

    trainer(overfit_batches=1, max_epochs=3, num_sanity_val_steps=0).fit(Own(), loader(32, shuffle=True), loader(32))
    return seen


@row
def d4_lr_find_hangs_where_a_step_returns_none():
    class Own(Lr):
        def training_step(self, batch, batch_idx):
            return None if self.trainer.global_step == 5 else super().training_step(batch, batch_idx)

    return len(
        Tuner(trainer(max_epochs=2))
        .lr_find(Own(), loader(80), num_training=20, early_stop_threshold=None)
        .results["lr"]
    )


@row
def d4_fit_hangs_where_a_step_returns_none():
    class Own(Model):
        def training_step(self, batch, batch_idx):
            return None if self.global_step == 1 else super().training_step(batch, batch_idx)

    t = trainer(max_epochs=-1, max_steps=4)
    t.fit(Own(), loader())
    return t.global_step


@row
def d5_nested_max_size():
    combined = pl.utilities.CombinedLoader({"a": [range(2), range(1)], "b": [range(1), range(1)]}, "max_size")
    return [batch for batch, _, _ in iter(combined)]


@row
def d6_profiler_and_spawn():
    from lightning.pytorch.profilers import SimpleProfiler

    t = trainer(profiler=SimpleProfiler(dirpath=tempfile.mkdtemp(), filename="p"), strategy="ddp_spawn", devices=2)
    t.fit(Model(), loader(8), loader(8))
    ForkingPickler.dumps(t)  # as another start of processes pickles it
    return "ok"


@row
def d7_limit_zero():
    return trainer(limit_test_batches=0).test(Model(), loader(), verbose=False)


@row
def d8_torchscript_of_a_module_that_steps_by_hand():
    class Own(Manual):
        def forward(self, x):
            return self.layer(x)

    return type(Own().to_torchscript()).__name__


@row
def d9_torchscript_of_a_module_within_a_module():
    class Own(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Plain()

        def forward(self, x):
            return self.net(x)

    return type(Own().to_torchscript()).__name__


# -- gaps


@row
def c00_test_without_a_module_tests_the_best_weights():
    class Own(Model):
        def on_train_epoch_end(self):
            self.log("m", [1.0, 2.0, 3.0][self.current_epoch])

        def test_step(self, batch, batch_idx):
            self.log("t", self.layer.weight.sum())

    t = trainer(max_epochs=3, enable_checkpointing=True, callbacks=[ModelCheckpoint(monitor="m", mode="min")])
    t.fit(Own(), loader())
    tested = t.test(dataloaders=loader(), verbose=False)[0]["t"]
    best = torch.load(t.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]["layer.weight"].sum()
    return "the best" if abs(tested - float(best)) < 1e-3 else "the last"


@row
def c01_compiled_module():
    trainer().fit(torch.compile(Model(), backend="eager"), loader())
    return "ok"


@row
def c02_log_dir_before_fit():
    return trainer(logger=CSVLogger("somewhere")).log_dir is not None


@row
def c03_set_the_trainer():
    m = Model()
    m.trainer = trainer()
    return m.trainer is not None


@row
def c04_checkpoint_callback_in_a_fast_dev_run():
    t = trainer(fast_dev_run=True, enable_checkpointing=True, callbacks=[ModelCheckpoint(monitor="v")])
    t.fit(Model(), loader(), loader())
    return t.checkpoint_callback.best_model_path


@row
def c05_plateau_by_hand():
    class Own(Manual):
        def on_train_epoch_end(self):
            self.lr_schedulers().step(1.0)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    trainer().fit(Own(), loader())
    return "ok"


@row
def c06_strategy_is_a():
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    one, two = trainer().strategy, trainer(strategy="ddp", devices=2).strategy
    return isinstance(one, SingleDeviceStrategy), isinstance(two, DDPStrategy)


@row
def c07_no_such_checkpoint():
    try:
        trainer().fit(Model(), loader(), ckpt_path="no/such.ckpt")
    except FileNotFoundError:
        return "FileNotFoundError"


@row
def c08_no_trainer_is_a_runtime_error():
    try:
        return Model().trainer
    except RuntimeError:
        return "RuntimeError"


@row
def c09_test_without_a_module_is_a_type_error():
    try:
        trainer().test()
    except TypeError:
        return "TypeError"


@row
def c10_early_stopping_without_its_metric_is_a_runtime_error():
    try:
        trainer(callbacks=[EarlyStopping("zz")]).fit(Model(), loader(), loader())
    except RuntimeError:
        return "RuntimeError"


@row
def c11_lrs_of_the_monitor():
    monitor = LearningRateMonitor()
    trainer(logger=CSVLogger(tempfile.mkdtemp()), callbacks=[monitor]).fit(Model(), loader())
    return monitor.lrs


@row
def c12_ignore_in_a_subclass():
    class Own(Model):
        def __init__(self, a, b):
            super().__init__()
            self.save_hyperparameters()

    class Derived(Own):
        def __init__(self, a, b):
            super().__init__(a, b)
            self.save_hyperparameters(ignore="b")

    return dict(Derived(1, 2).hparams)


@row
def c13_stage_of_setup():
    seen = []

    class Own(Model):
        def setup(self, stage):
            seen.append(stage.value)

    trainer().fit(Own(), loader())
    return seen


@row
def c14_val_check_interval_without_validation():
    trainer(val_check_interval=10, limit_val_batches=0).fit(Model(), loader(), loader())
    return "ok"


@row
def c15_steps_checkpoint_and_a_metric_of_validation():
    class Own(Model):
        def validation_step(self, batch, batch_idx):
            pass

        def on_validation_epoch_end(self):
            self.log("auroc", torch.tensor([0.1, 0.9, 0.5][self.current_epoch]))

    c = ModelCheckpoint(
        tempfile.mkdtemp(), "{step}", monitor="auroc", mode="max", every_n_train_steps=2, save_on_train_epoch_end=False
    )
    trainer(max_epochs=3, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=[c]).fit(
        Own(), loader(), loader()
    )
    return Path(c.best_model_path).name, round(float(c.best_model_score), 1)


@row
def c16_logger_with_a_name_of_its_own():
    class L(TensorBoardLogger):
        @property
        def name(self):
            return "mine"

    return L(tempfile.mkdtemp()).log_dir.endswith("mine/version_0")


@row
def c17_train_dataloader_before_fit():
    return trainer().train_dataloader


@row
def c18_trainer_of_the_module_after_lr_find():
    m, t = Lr(), trainer()
    Tuner(t).lr_find(m, loader(40), num_training=5)
    return m.trainer is t


@row
def c19_reduce_fx_by_name():
    class Own(Model):
        def training_step(self, batch, batch_idx):
            self.log("x", 1.0, on_epoch=True, reduce_fx="SUM")
            return super().training_step(batch, batch_idx)

    trainer().fit(Own(), loader())
    return "ok"


@row
def c20_bar_of_a_subclass():
    class B(TQDMProgressBar):
        def on_train_epoch_start(self, trainer, module):
            super().on_train_epoch_start(trainer, module)
            self.train_progress_bar.set_description("x")

    trainer(enable_progress_bar=True, callbacks=[B(refresh_rate=0)]).fit(Model(), loader())
    return "ok"


@row
def c21_timer_of_max_time():
    t = trainer(max_time="00:01:00:00")
    t.fit(Model(), loader())
    return [type(c).__name__ for c in t.callbacks if isinstance(c, Timer)]


@row
def c22_constants():
    return Model.CHECKPOINT_HYPER_PARAMS_KEY, TensorBoardLogger.NAME_HPARAMS_FILE


@row
def c23_state_of_a_data_module_in_the_file():
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

        def state_dict(self):
            return {"a": 1}

    t, path = trainer(), tempfile.mkdtemp() + "/x.ckpt"
    t.fit(Model(), datamodule=Data())
    t.save_checkpoint(path)
    return any("Data" in key for key in torch.load(path, weights_only=False))


@row
def c24_csv_experiment():
    logger = CSVLogger(tempfile.mkdtemp())
    logger.log_metrics({"x": 1.0}, 0)
    return logger.experiment.metrics


@row
def c25_folder_after_log_hyperparams():
    logger = CSVLogger(tempfile.mkdtemp(), version="v9")
    logger.log_hyperparams({"a": 1})
    return Path(logger.log_dir).exists()


@row
def c26_max_epochs_by_default():
    return trainer(max_epochs=None).max_epochs


@row
def c27_freeze_returns_the_module():
    return Model().freeze() is not None


@row
def c28_bar_metrics_after_fit():
    class Own(Model):
        def training_step(self, batch, batch_idx):
            self.log("x", 100.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("x", 111.0, prog_bar=True)

    t = trainer(enable_progress_bar=True)
    t.fit(Own(), loader())
    return float(t.progress_bar_metrics["x"])


@row
def c29_best_model_path_can_be_set():
    c = ModelCheckpoint()
    c.best_model_path = "x"
    return c.best_model_path


@row
def c30_swa_without_max_epochs():
    c = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    trainer(max_epochs=-1, max_steps=8, callbacks=[c]).fit(Model(), loader())
    return "ok"


@row
def c31_time_and_epochs_of_validation():
    trainer(val_check_interval="00:00:00:06", check_val_every_n_epoch=2).fit(Model(), loader(), loader())
    return "ok"


@row
def c32_lbfgs_with_accumulation():
    class Own(Model):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    trainer(accumulate_grad_batches=2).fit(Own(), loader())
    return "ok"


@row
def c33_a_step_without_return():
    class Own(Model):
        def training_step(self, batch, batch_idx):
            self.layer(batch)

    trainer().fit(Own(), loader())
    return "ok"


@row
def c34_dataloader_iter():
    class Own(Model):
        def training_step(self, dataloader_iter):
            return self.layer(next(dataloader_iter)[0]).sum()

    trainer().fit(Own(), loader())
    return "ok"


@row
def c35_set_epoch_of_a_validation_sampler():
    seen = []

    class S(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            seen.append(epoch)

    data = torch.ones(4, 4)
    trainer(max_epochs=2, num_sanity_val_steps=0).fit(
        Model(), loader(), DataLoader(data, batch_size=2, sampler=S(data))
    )
    return seen


@row
def c36_print_of_a_data_module():
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

    return str(Data()).splitlines()[0]


@row
def c37_predictions_after_predict():
    t = trainer()
    t.predict(Model(), loader())
    return len(t.predict_loop.predictions)


@row
def c38_seed_in_the_environment():
    pl.seed_everything(7, workers=True)
    return os.environ.get("PL_GLOBAL_SEED"), os.environ.get("PL_SEED_WORKERS")


@row
def c39_loop_attributes():
    t = trainer()
    t.fit(Model(), loader())
    return t.fit_loop.restarting, t.fit_loop.epoch_loop.automatic_optimization is not None


@row
def c40_hparams_file_that_is_not_there():
    return type(Model.load_from_checkpoint(saved(), hparams_file="no/hparams.yaml")).__name__


@row
def c41_resume_beyond_max_epochs():
    path = saved()
    try:
        trainer(max_epochs=0).fit(Model(), loader(), ckpt_path=path)
    except pl.utilities.exceptions.MisconfigurationException:
        return "MisconfigurationException"


@row
def c42_state_key():
    return ModelCheckpoint(monitor="x").state_key


@row
def c43_same_hyperparameter_in_both():
    class Own(Model):
        def __init__(self, lr=1):
            super().__init__()
            self.save_hyperparameters()

    class D(pl.LightningDataModule):
        def __init__(self, lr=2):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader()

    try:
        trainer(logger=CSVLogger(tempfile.mkdtemp())).fit(Own(), datamodule=D())
    except RuntimeError:
        return "RuntimeError"


@row
def c44_sub_dir():
    return TensorBoardLogger(tempfile.mkdtemp(), sub_dir="s").log_dir.endswith("/s")


@row
def c45_methods_of_the_wandb_logger():
    from lightning.pytorch.loggers import WandbLogger

    return [
        name
        for name in ("use_artifact", "download_artifact", "log_audio", "log_video")
        if not hasattr(WandbLogger, name)
    ]


@row
def c46_sigterm_exception():
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    return SIGTERMException.__name__


@row
def c47_print_of_the_bar():
    class Own(Model):
        def on_train_epoch_start(self):
            self.trainer.progress_bar_callback.print("")

    trainer(enable_progress_bar=True).fit(Own(), loader())
    return "ok"


@row
def c48_any_scheduler_by_hand():
    class Schedule:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class Own(Manual):
        def configure_optimizers(self):
            schedule = Schedule()
            schedule.optimizer = super().configure_optimizers()
            return [schedule.optimizer], [schedule]

    trainer().fit(Own(), loader())
    return "ok"


# -- rows of the table "What stays different on purpose"


@row
def t01_the_frequency_of_a_schedule_by_steps():
    rates = []

    class Own(Model):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]

        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])

    trainer(max_epochs=2).fit(Own(), loader(16))
    trainer(accumulate_grad_batches=2).fit(Own(), loader(26))
    return rates


@row
def t02_values_that_an_lbfgs_closure_logs():
    class Own(Model):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            self.log("x", float(self.calls), on_step=True, on_epoch=True)
            return self.layer(batch).square().sum()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            steps.append(float(self.trainer.callback_metrics["x_step"]))

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.001, max_iter=3)

    steps = []
    t = trainer()
    t.fit(Own(), loader(6))
    return steps, float(t.callback_metrics["x_epoch"])


@row
def t03_what_hooks_get_after_a_batch():
    seen = []

    class Own(Model):
        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).sum() * 0.0 + 4.0
            return [loss, {"loss": loss, "more": torch.tensor(1.0)}, None, loss][batch_idx]

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append({key: value.item() for key, value in outputs.items()})

    class ByHand(Manual):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs)

    trainer(accumulate_grad_batches=2).fit(Own(), loader(8))
    trainer().fit(ByHand(), loader(2))
    return seen


@row
def t04_all_gather_of_one_process():
    shapes = []

    class Own(Model):
        def on_train_end(self):
            gathered = self.all_gather({"a": torch.ones(2), "b": 3.0})
            shapes.extend((list(gathered["a"].shape), list(gathered["b"].shape)))

    trainer().fit(Own(), loader())
    return shapes


@row
def t05_a_seed_set_in_the_environment_after_another():
    pl.seed_everything(1)
    os.environ["PL_GLOBAL_SEED"] = "5"
    return pl.seed_everything()


@row
def t06_a_stop_within_an_epoch():
    seen = []

    class Own(Model):
        def training_step(self, batch, batch_idx):
            self.log("x", float(batch_idx))
            if self.global_step == 1:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append((self.trainer.current_epoch, self.trainer.global_step))

    logger = CSVLogger(tempfile.mkdtemp())
    trainer(max_epochs=2, logger=logger, num_sanity_val_steps=0).fit(Own(), loader(16), loader(2))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return seen, [sorted(values.items()) for values in csv.DictReader(file)]


# -- what libraries met: rows r


class Seen(Model):
    """Notes what each training step gets."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        whole = batch if isinstance(batch, dict) else {"": batch}
        self.seen += [part.tolist() for part in whole.values()]
        return self.layer.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.seen.append(("v", batch.tolist()))

    test_step = predict_step = validation_step


class Drawn:
    """Draws an order in ``__iter__``, which returns the loader itself, as loaders of tensors that are written by hand do."""

    sized = True
    shuffles = True

    def __init__(self, n=6):
        self.n, self.begun = n, 0

    def __iter__(self):
        self.begun += 1
        self.order = torch.randperm(self.n) if self.shuffles else torch.arange(self.n)
        self.at = 0
        return self

    def __next__(self):
        if self.at >= self.n:
            raise StopIteration
        self.at += 2
        return self.order[self.at - 2 : self.at]


class SizedDrawn(Drawn):
    def __len__(self):
        return self.n // 2


class InOrder(SizedDrawn):
    shuffles = False


class Yields(SizedDrawn):
    def __iter__(self):
        self.begun += 1
        order = torch.randperm(self.n)
        for at in range(0, self.n, 2):
            yield order[at : at + 2]


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def shuffled(seeded=None, **more):
    return DataLoader(torch.arange(6.0), 2, shuffle=True, generator=seeded, **more)


def orders(train, val=None, fits=1, **more):
    """Returns what the steps get, how often ``iter()`` was called, and the random number after it."""
    pl.seed_everything(7)
    module = Seen()
    t = trainer(**{"max_epochs": 2, **more})
    for number in range(fits):
        t.fit_loop.max_epochs = 2 + number
        t.fit(module, train, val)
    parts = [*(train.values() if isinstance(train, dict) else [train]), val]
    return module.seen, [getattr(one, "begun", None) for one in parts], round(torch.rand(1).item(), 5)


@row
def r1_the_generator_of_a_loader():
    both = generator()
    sampler = torch.utils.data.RandomSampler(range(6), replacement=True, num_samples=6, generator=generator())
    return [
        orders(shuffled(generator()), max_epochs=3),
        orders(shuffled(generator()), limit_train_batches=2),
        orders(shuffled(both), DataLoader(torch.arange(4.0), 2, generator=both)),
        orders(shuffled(generator()), shuffled(generator(4))),
        orders(DataLoader(torch.arange(6.0), 2, sampler=sampler)),
        orders(
            {"a": shuffled(generator()), "b": DataLoader(torch.arange(4.0), 2, shuffle=True, generator=generator(5))}
        ),
        orders(shuffled(generator()), fits=2),
    ]


@row
def r2_a_loader_that_draws_in_iter_and_returns_itself():
    return [
        orders(SizedDrawn()),
        orders(Drawn()),
        orders(SizedDrawn(), InOrder()),
        orders(SizedDrawn(), SizedDrawn(4)),
        orders(Drawn(), Drawn(4)),
        orders(SizedDrawn(), limit_train_batches=2),
        orders(Drawn(), limit_train_batches=2),
        orders({"a": SizedDrawn(), "b": SizedDrawn(4)}),
        orders(Yields(), Yields(4)),
        orders(SizedDrawn(), InOrder(), fits=2),
        orders(SizedDrawn(), InOrder(), num_sanity_val_steps=0),
    ]


@row
def r2_such_a_loader_in_an_evaluation():
    pl.seed_everything(7)
    found = []
    for name in ("validate", "test", "predict"):
        module, own = Seen(), SizedDrawn()
        getattr(trainer(), name)(module, own)
        found.append((module.seen, own.begun))
    return found, round(torch.rand(1).item(), 5)


@row
def r2_such_a_loader_that_is_made_anew():
    made = []

    class Own(Seen):
        def train_dataloader(self):
            made.append(SizedDrawn())
            return made[-1]

    pl.seed_everything(7)
    trainer(max_epochs=3, reload_dataloaders_every_n_epochs=2).fit(Own())
    return [one.begun for one in made]


@row
def r3_a_leftover_hook_of_another_run():
    class Own(Model):
        def test_epoch_end(self, outputs):
            pass

    module = Own()
    trainer().fit(module, loader())
    trainer().validate(module, loader(), verbose=False)
    try:
        trainer().test(module, loader(), verbose=False)
    except Exception:
        return "only test is refused"


@row
def r4_arrays_among_hyper_parameters_twice():
    import numpy as np

    class Own(Model):
        def __init__(self, weights, names):
            super().__init__()
            self.save_hyperparameters()

    place = tempfile.mkdtemp()
    t = trainer(logger=[CSVLogger(place), TensorBoardLogger(place)])
    values = {"a": np.ones(3), "b": [torch.ones(2), {"c": np.float32(1)}]}
    module = Own(np.arange(4.0), values)
    t.fit(module, loader())
    t.test(module, loader(), verbose=False)
    for logger in t.loggers:
        logger.log_hyperparams({"weights": np.arange(4.0), "more": np.zeros((2, 2))})
    return "ok"


@row
def r5_the_checkpoint_callback_of_another_class():
    class Compound(pl.callbacks.Checkpoint):
        pass

    own, models = Compound(), ModelCheckpoint(tempfile.mkdtemp())
    both = trainer(enable_checkpointing=True, callbacks=[own, models])
    return trainer(
        enable_checkpointing=True, callbacks=[own]
    ).checkpoint_callback is own, both.checkpoint_callback is own


@row
def r6_a_loop_that_prints_results_in_its_own_way():
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn

    printed = []

    class Loop(_EvaluationLoop):
        @staticmethod
        def _print_results(results, stage):
            printed.append(
                (
                    stage,
                    [
                        [(name, type(value.item()).__name__, value.shape) for name, value in one.items()]
                        for one in results
                    ],
                )
            )

    class Own(pl.Trainer):
        def __init__(self, **more):
            super().__init__(**more)
            self.test_loop = Loop(self, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=True)
            self.validate_loop = Loop(self, TrainerFn.VALIDATING, RunningStage.VALIDATING, inference_mode=False)

    t = Own(accelerator="cpu", logger=False, enable_progress_bar=False)
    t.test(Model(), loader())
    t.validate(Model(), loader())
    t.test(Model(), loader(), verbose=False)
    return printed


@row
def r7_the_order_of_logged_keys():
    class Keeps(pl.loggers.logger.Logger):
        name, version = "keeps", 0

        def log_metrics(self, metrics, step=None):
            logged.append((list(metrics), step))

        def log_hyperparams(self, *_, **__):
            pass

    class Own(Model):
        def training_step(self, batch, batch_idx):
            self.log("z", 1.0, on_step=True, on_epoch=True)
            self.log("a", 1.0)
            return super().training_step(batch, batch_idx)

    logged = []
    trainer(logger=Keeps(), log_every_n_steps=1).fit(Own(), loader(), loader())
    return logged


class ManualLr(Manual):
    returns = True

    def __init__(self):
        super().__init__()
        self.lr = 0.1

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss if self.returns else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@row
def r8_lr_find_with_steps_by_hand():
    found = []
    for returns in (True, False):
        pl.seed_everything(1)
        module = ManualLr()
        module.returns = returns
        options = {"num_training": 16, "min_lr": 1e-9, "max_lr": 1e-3, "early_stop_threshold": None}
        finder = Tuner(trainer()).lr_find(module, loader(64), **options)
        losses = [round(one, 4) for one in finder.results["loss"]]
        found.append((finder.results["lr"], losses, finder.suggestion(), module.lr))
    return found


# -- what Lightning's own suite asks: rows s


@row
def s01_counters_after_a_fit():
    found = []

    class Own(Model):
        def on_train_epoch_start(self):
            found.append(
                (
                    "start",
                    self.trainer.fit_loop.batch_idx,
                    self.trainer.fit_loop.epoch_loop.batch_progress.current.ready,
                )
            )

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = self.stops and self.trainer.global_step >= 5

    for stops, options in ((False, {}), (True, {}), (False, {"max_steps": 5}), (True, {"min_steps": 7})):
        m = Own()
        m.stops = stops
        t = trainer(**{"max_epochs": 3, **options})
        t.fit(m, loader(8))
        found.append((t.current_epoch, t.global_step, t.fit_loop.batch_idx))
    return found


@row
def s02_names_of_learning_rates():
    def names(optimizers, schedulers=()):
        class Own(Model):
            def configure_optimizers(self):
                return optimizers(self), [
                    torch.optim.lr_scheduler.StepLR(o, 1) for o in schedulers(self)
                ] if schedulers else []

        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        trainer(logger=CSVLogger(tempfile.mkdtemp()), log_every_n_steps=1, callbacks=[monitor]).fit(Own(), loader())
        return list(monitor.lrs), list(monitor.last_momentum_values), list(monitor.last_weight_decay_values)

    def group(m, *names):
        parts = [[m.layer.weight], [m.layer.bias]] if len(names) == 2 else [list(m.layer.parameters())]
        groups = [{"params": part, **({"name": name} if name else {})} for part, name in zip(parts, names, strict=True)]
        return [torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=0.1)]

    return [
        names(lambda m, given=given: group(m, *given)) for given in (("linear",), (None,), ("a", None), (None, None))
    ]


@row
def s03_names_after_another_group():
    class Own(Model):
        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            return self.layer(self.backbone(batch)).sum()

        def configure_optimizers(self):
            o = torch.optim.Adam(self.layer.parameters(), 0.1)
            return [o], [torch.optim.lr_scheduler.StepLR(o, 1, 0.5)]

    class Later(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)

    monitor = LearningRateMonitor()
    options = {"logger": CSVLogger(tempfile.mkdtemp()), "log_every_n_steps": 1, "callbacks": [monitor, Later()]}
    trainer(max_epochs=3, **options).fit(Own(), loader())
    return {name: len(values) for name, values in monitor.lrs.items()}


@row
def s04_arguments_of_a_step_by_hand():
    seen = []

    class Takes(torch.optim.SGD):
        def step(self, closure=None, scale=1, **more):
            seen.append((scale, more))
            return super().step(closure)

    class Own(Manual):
        def training_step(self, batch, batch_idx):
            o = self.optimizers()
            o.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            o.step(scale=batch_idx + 2, mine="x")
            o.step()

        def configure_optimizers(self):
            return Takes(self.parameters(), 0.01)

    trainer().fit(Own(), loader())
    return seen


@row
def s05_best_score_of_nothing_finite():
    found = []
    for mode in ("min", "max"):

        class Own(Model):
            def training_step(self, batch, batch_idx):
                self.log("x", float("nan"))
                return super().training_step(batch, batch_idx)

        callback = ModelCheckpoint(tempfile.mkdtemp(), monitor="x", mode=mode)
        trainer(enable_checkpointing=True, callbacks=[callback]).fit(Own(), loader())
        found.append((float(callback.best_model_score), [float(one) for one in callback.best_k_models.values()]))
    return found


@row
def s06_results_of_values_by_step():
    class Own(Model):
        def test_step(self, batch, batch_idx):
            self.log("both", 1.0, on_step=True, on_epoch=True)
            self.log("step", 2.0, on_step=True, on_epoch=False)
            self.log("epoch", 3.0)

        validation_step = test_step

    t = trainer()
    return [sorted(getattr(t, run)(Own(), loader(), verbose=False)[0].items()) for run in ("test", "validate")]


@row
def s07_indices_of_a_stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(16.0).reshape(4, 4))

    class Writes(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, indices, *_):
            seen.append(indices)

        def write_on_epoch_end(self, trainer, module, predictions, indices):
            seen.append(indices)

    seen = []
    for loaders in (DataLoader(Stream(), 2), [DataLoader(Stream(), 2), loader()]):
        trainer(callbacks=[Writes("batch_and_epoch")]).predict(Several(), loaders)
    return seen


class Several(Model):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layer(batch)


@row
def s08_names_of_csv_files():
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter

    place = Path(tempfile.mkdtemp())
    logger = CSVLogger(place, name="n", version="v")
    logger.log_hyperparams({"a": 1})
    logger.log_hyperparams()
    logger.log_metrics({"x": 1.0}, 0)
    logger.save()
    paths = sorted(path.name for path in (place / "n" / "v").iterdir())
    names = ExperimentWriter.NAME_METRICS_FILE, ExperimentWriter.NAME_HPARAMS_FILE
    file = Path(logger.experiment.metrics_file_path).relative_to(place).parts
    return paths, names, file, isinstance(logger.experiment, ExperimentWriter)


@row
def s09_no_thread_of_a_logger_is_left():
    import threading

    before = {*threading.enumerate()}
    loggers = [CSVLogger(tempfile.mkdtemp()), TensorBoardLogger(tempfile.mkdtemp())]
    for logger in loggers:
        logger.log_hyperparams({"a": 1})
        logger.log_metrics({"x": 1.0}, 0)
        logger.save()
        logger.finalize("success")
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
    return len({*threading.enumerate()} - before)


@row
def s10_profilers_by_name():
    from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

    found = []
    for kind, name in ((SimpleProfiler, "simple"), (AdvancedProfiler, "advanced"), (PyTorchProfiler, "pytorch")):
        place = Path(tempfile.mkdtemp())
        t = trainer(profiler=kind(dirpath=place, filename="profile"))
        t.fit(Model(), loader())
        found.append((name, (place / "fit-profile.txt").is_file(), type(trainer(profiler=name).profiler) is kind))
    return found


@row
def s11_a_class_that_is_only_defined():
    class Own(pl.callbacks.WeightAveraging):
        def _copy_average_to_current(self, pl_module):
            raise NotImplementedError

    class Loop(pl.callbacks.LearningRateMonitor):
        def _extract_lr(self, param_group, name):
            raise NotImplementedError

    return Own.__name__, Loop.__name__


@row
def s12_an_optimizer_around_an_optimizer():
    from lightning.pytorch.core.optimizer import LightningOptimizer

    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.5)
    outer = LightningOptimizer(inner)
    return outer.optimizer is inner, isinstance(outer, torch.optim.SGD), outer.param_groups is inner.param_groups


@row
def s13_modes_of_a_combined_loader_in_an_evaluation():
    from lightning.pytorch.utilities import CombinedLoader

    found = []
    for mode in ("max_size_cycle", "max_size", "min_size", "sequential"):
        for limit in (1.0, 2, 0.5):
            seen = []

            class Own(Model):
                def validation_step(self, batch, batch_idx, dataloader_idx=0):
                    seen.append((batch, batch_idx, dataloader_idx))

            loaders = CombinedLoader({"a": range(4), "b": range(2)}, mode)
            trainer(limit_val_batches=limit).validate(Own(), loaders, verbose=False)
            found.append((mode, limit, seen))
    return found


@row
def s14_methods_of_a_module():
    own = {"of_program"}

    class Own(Model):
        def of_program(self):
            pass

    names = {name for name in dir(Own) if not name.startswith("_") and callable(getattr(Own, name))}
    return "attach" in names, own <= names


@row
def s15_an_example_that_draws():
    class Own(Model):
        read = 0

        @property
        def example_input_array(self):
            self.read += 1
            return torch.randn(1, 4)

        def forward(self, x):
            return self.layer(x)

    found = []
    for options in (
        {},
        {"enable_model_summary": True},
        {"enable_model_summary": True, "callbacks": [pl.callbacks.ModelSummary(0)]},
    ):
        pl.seed_everything(3)
        module = Own()
        trainer(**options).fit(module, loader())
        found.append((module.read, round(torch.rand(1).item(), 5)))
    return found


@row
def s16_the_device_of_arguments():
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    connector = _AcceleratorConnector(accelerator="cpu", devices=1)
    return str(connector.strategy.root_device), connector.is_distributed


@row
def s17_kinds_of_devices_that_are_not_there():
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator

    return [kind.is_available() for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator)]


@row
def s18_a_stage_by_name_alone():
    found = []

    class Own(Model):
        def setup(self, *, stage):
            found.append(("module", stage == "fit"))

        def teardown(self, **options):
            found.append(("module", sorted(options)))

    class Watch(pl.Callback):
        def setup(self, trainer, pl_module, *, stage):
            found.append(("callback", stage == "fit"))

    class Data(pl.LightningDataModule):
        def setup(self, stage=None, more=3):
            found.append(("data", stage == "fit", more))

        def train_dataloader(self):
            return loader()

    trainer(callbacks=[Watch()]).fit(Own(), datamodule=Data())
    Data().setup("fit")
    return found


class Bars(TQDMProgressBar):
    """Notes its numbers at the ends of epochs and evaluations, and what the module prints."""

    def __init__(self, *args):
        super().__init__(*args)
        self.found = []

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        bar = self.train_progress_bar
        self.found.append(("train", bar.n, bar.total, self.total_train_batches, self.total_val_batches))

    def on_validation_end(self, trainer, pl_module):
        super().on_validation_end(trainer, pl_module)
        self.found.append(("validation", self.val_progress_bar.total, trainer.sanity_checking))

    def on_test_end(self, trainer, pl_module):
        super().on_test_end(trainer, pl_module)
        self.found.append(("test", self.test_progress_bar.n, self.test_progress_bar.total))

    def on_predict_end(self, trainer, pl_module):
        super().on_predict_end(trainer, pl_module)
        self.found.append(("predict", self.predict_progress_bar.n, self.predict_progress_bar.total))

    def print(self, *args, **options):
        self.found.append(("print", args, options))


class Prints(Model):
    def on_train_start(self):
        self.print("begins", end="")

    def test_step(self, batch, batch_idx):
        self.print("test", batch_idx, sep="-")


@row
def s19_the_numbers_of_bars_stay_and_they_print():
    found = []
    for limits in (
        {"max_epochs": 2},
        {"max_epochs": -1, "max_steps": 3},
        {"val_check_interval": 1},
        {"limit_val_batches": 0},
        {"fast_dev_run": True},
    ):
        bar = Bars()
        t = trainer(enable_progress_bar=True, callbacks=[bar], **limits)
        t.fit(Prints(), loader(), loader(6))
        t.validate(Prints(), loader(6), verbose=False)
        t.test(Prints(), loader(), verbose=False)
        t.predict(Prints(), loader(8))
        found.append((bar.found, bar.train_progress_bar.n, bar.train_progress_bar.total))
    return found


@row
def s20_a_bar_with_rate_0_stays_hidden():
    found = []
    for kind in (TQDMProgressBar, pl.callbacks.RichProgressBar):
        bar = kind(refresh_rate=0)
        found.append(bar.is_enabled)
        bar.enable()
        found.append(bar.is_enabled)
        bar = kind()
        bar.disable()
        found.append(bar.is_enabled)
        bar.enable()
        found.append(bar.is_enabled)
    return found, type(pl.callbacks.RichProgressBar().theme).__name__


@row
def s21_two_bars():
    try:
        trainer(enable_progress_bar=True, callbacks=[TQDMProgressBar(), pl.callbacks.RichProgressBar()])
    except Exception:
        return "refused"
    return "taken"


@row
def s22_backward_by_the_strategy():
    found = []

    class Own(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.trainer.strategy.backward(self.layer(batch).sum(), optimizer)
            found.append(self.layer.bias.grad.tolist())
            optimizer.step()

    t = trainer()
    t.fit(Own(), loader())
    return found, t.strategy.launcher


@row
def s23_how_many_weights_are_averaged():
    found = []
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)

    class Watch(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            count = averaging.n_averaged
            found.append((averaging.swa_start, averaging.swa_end, None if count is None else count.item()))

    trainer(max_epochs=4, callbacks=[averaging, Watch()]).fit(Model(), loader())
    return found


def late(*_):
    raise TimeoutError("hangs")


def outcome(name):
    """Returns the outcome of a row: its result, or the class of its error."""
    signal.alarm(LONGEST)
    try:
        return str(ROWS[name]())
    except BaseException as error:
        print(name, "raised", type(error).__name__, str(error)[:150], flush=True)
        return f"raises {type(error).__name__}"
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="how the names of rows begin; all rows where none is given")
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, late)
    if arguments.into is not None:
        arguments.into.write_text("")
    for name in ROWS:
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        found = outcome(name)
        print(name, "->", found, flush=True)
        if arguments.into is not None:
            with arguments.into.open("a") as lines:
                lines.write(json.dumps([name, found]) + "\n")
