"""Runs LightningCLI in the ways of its documentation and prints what comes of it.

cli_printed.txt has what Lightning 2.6.0 prints with jsonargparse 4.53: ``python -W ignore cli_program.py > cli_printed.txt``.
"""

import contextlib
import functools
import io
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import (
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
    SaveConfigCallback,
    instantiate_class,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

for name in ("lightning.pytorch", "lightning.fabric", "fabricamp"):
    logging.getLogger(name).setLevel(logging.ERROR)
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
    "max_epochs": 2,
}


class Net(LightningModule):
    """A small network.

    Args:
        width: the inner size.
        lr: the rate.
    """

    def __init__(self, width: int = 4, lr: float = 0.1, act: nn.Module | None = None, classes: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.width, self.lr, self.classes = width, lr, classes
        self.net = nn.Sequential(nn.Linear(3, width), act or nn.ReLU(), nn.Linear(width, classes))

    def loss(self, batch):
        return (self.net(batch[0]).sum(1) - batch[0].sum(1)).square().mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, index):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Deep(Net):
    def __init__(self, depth: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth


class Injected(Net):
    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class Data(LightningDataModule):
    def __init__(self, size: int = 32, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.size, self.batch_size, self.classes = size, batch_size, 3

    def setup(self, stage):
        self.set = TensorDataset(torch.randn(self.size, 3, generator=torch.Generator().manual_seed(1)))

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.set, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def model_of(width: int) -> Net:
    return Net(width)


def section(title):
    print(f"-- {title}")


def kinds(trainer):
    return sorted(type(one).__name__ for one in trainer.callbacks)


def numbers(cli):
    metrics = {name: f"{value.item():.6f}" for name, value in sorted(cli.trainer.callback_metrics.items())}
    print(metrics, *(f"{weights.double().sum():.8f}" for weights in cli.model.parameters()))


def command(kind, *args, argv=(), **options):
    """Runs the command line of the options ``args``; prints the exit, and how the last line of an error begins."""
    out, error = io.StringIO(), io.StringIO()
    sys.argv = ["program.py", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            return kind(args=[*args] if args else None, **options)
    except SystemExit as exit_:
        lines = [line for line in error.getvalue().splitlines() if "rror: " in line]
        print("exit", exit_.code, lines[-1][:120] if lines else "")
        return out.getvalue()


plain = functools.partial(LightningCLI, Net, Data, trainer_defaults=QUIET, save_config_callback=None)
"""A command line that writes nothing."""


class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.width")
        parser.link_arguments("data.classes", "model.classes", apply_on="instantiate")


class LinkedSubclass(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.init_args.width", compute_fn=lambda size: size * 2)
        parser.add_lightning_class_args(EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 5})
        parser.add_argument("--address", default="nobody")


class Own(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)

    def before_fit(self):
        print("before_fit", self.config.fit.optimizer.lr)

    def after_fit(self):
        print("after_fit", self.trainer.global_step)
        numbers(self)


class TwoNet(Net):
    def __init__(self, first: dict, second: dict):
        super().__init__()
        self.first = instantiate_class(self.parameters(), first)
        self.second = instantiate_class((self.first,), second)


class Two(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args((torch.optim.SGD, torch.optim.Adam), nested_key="opt", link_to="model.first")
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR, nested_key="sch", link_to="model.second")


class Announce(Callback):
    def __init__(self, word: str = "hello"):
        self.word = word


class Elsewhere(SaveConfigCallback):
    def save_config(self, trainer, pl_module, stage):
        text = self.parser.dump(self.config)
        print("saved", str(stage).rpartition(".")[2], yaml.safe_load(text)["model"])


def main():
    section("fit, validate, test, predict")
    for name in ("fit", "validate", "test", "predict"):
        more = ["--verbose=false"] * (name in ("validate", "test"))
        numbers(command(plain, name, *more, "--seed_everything=3", "--model.width=5", "--data.batch_size=16"))

    section("files: several, groups, text, and options around them")
    Path("one.yaml").write_text(
        "model: {width: 3, lr: 0.2}\ntrainer: {max_epochs: 4, callbacks: [LearningRateMonitor]}\n"
    )
    Path("two.yaml").write_text(
        "model: {lr: 0.3}\ntrainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: x}}]}\n"
    )
    Path("group.yaml").write_text("width: 9\n")
    cli = command(plain, "--model.width=1", "--config=one.yaml", "-c", "two.yaml", "--trainer.max_epochs=1", run=False)
    print(
        cli.config.model.as_dict(),
        cli.config.trainer.max_epochs,
        [one.class_path for one in cli.config.trainer.callbacks],
    )
    cli = command(plain, "fit", "--model=group.yaml", "--model.lr=1", "--trainer.fast_dev_run=1")
    print(cli.config.fit.model.width, cli.config.fit.model.lr, cli.subcommand)
    cli = command(
        plain, "--config", "{fit: {model: {width: 2}}, test: {model: {width: 6}}}", "fit", "--trainer.max_epochs=0"
    )
    print(cli.model.width)
    cli = command(plain, run=False, parser_kwargs={"default_config_files": ["one.yaml"]}, argv=["--model.lr=5"])
    print(cli.config.model.as_dict())

    section("callbacks and loggers by options")
    cli = command(
        plain, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=loss", "--trainer.callbacks+=Announce",
        "--trainer.callbacks.word=bye", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", run=False,
    )  # fmt: skip
    print(*kinds(cli.trainer), next(one.word for one in cli.trainer.callbacks if isinstance(one, Announce)))
    print(
        cli.config.trainer.logger.class_path,
        cli.config.trainer.logger.init_args.name,
        type(cli.trainer.logger).__name__,
    )
    defaults = {**QUIET, "callbacks": [Announce()]}
    cli = command(plain, "--trainer.callbacks=LearningRateMonitor", run=False, trainer_defaults=defaults)
    print(*kinds(cli.trainer))
    again = cli.instantiate_trainer(max_epochs=7, callbacks=[EarlyStopping("loss")])
    print(again.max_epochs, *kinds(again), cli.config_init.trainer.max_epochs)

    section("print_config")
    text = command(
        LightningCLI,
        "fit",
        "--model=Deep",
        "--model.depth=2",
        "--print_config",
        subclass_mode_model=True,
        model_class=Net,
    )
    content = yaml.safe_load(text)
    print(content["model"], content["seed_everything"], content["ckpt_path"])
    config = {"model": content["model"]}
    cli = command(plain, f"--config={json.dumps(config)}", run=False, subclass_mode_model=True)
    print(type(cli.model).__name__, cli.model.depth, cli.model.width)

    section("a class by short name after another")
    Path("deep.yaml").write_text("model: {class_path: __main__.Deep, init_args: {depth: 3, width: 6}}\n")
    cli = command(plain, "--config=deep.yaml", "--model=Net", run=False, subclass_mode_model=True)
    print(cli.config.model.as_dict())

    section("links")
    cli = command(
        Linked, "--data.batch_size=6", run=False, model_class=Net, datamodule_class=Data, trainer_defaults=QUIET
    )
    print(cli.model.width, cli.model.classes, sorted(cli.model.hparams.items(), key=str))
    command(Linked, "--model.width=6", run=False, model_class=Net, datamodule_class=Data)
    Path("linked.yaml").write_text("model: {width: 50, lr: 0.5}\n")
    cli = command(
        Linked, "--config=linked.yaml", run=False, model_class=Net, datamodule_class=Data, trainer_defaults=QUIET
    )
    print(cli.model.width, cli.model.lr)
    options = {
        "model_class": Net,
        "datamodule_class": Data,
        "subclass_mode_model": True,
        "trainer_defaults": QUIET,
        "run": False,
    }
    cli = command(LinkedSubclass, "--model=Deep", "--data.batch_size=3", "--stopping.patience=2", **options)
    stopping = next(one for one in cli.trainer.callbacks if isinstance(one, EarlyStopping))
    print(cli.model.width, cli.model.depth, stopping.monitor, stopping.patience, cli.config.address)

    section("optimizers")
    choice = ["--optimizer=Adam", "--optimizer.lr=0.01", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    cli = command(plain, "fit", *choice, "--seed_everything=1")
    numbers(cli)
    print(type(cli.trainer.optimizers[0]).__name__, f"{cli.trainer.optimizers[0].param_groups[0]['lr']:.6f}")
    choice = [
        "--optimizer=SGD",
        "--optimizer.lr=0.01",
        "--lr_scheduler=ReduceLROnPlateau",
        "--lr_scheduler.monitor=val_loss",
    ]
    numbers(command(plain, "fit", *choice, "--lr_scheduler.patience=0", "--seed_everything=1"))
    options = {"model_class": Net, "datamodule_class": Data, "trainer_defaults": QUIET, "save_config_callback": None}
    sys.argv = ["program.py"]
    Own(args=["fit", "--optimizer.lr=0.02", "--lr_scheduler.gamma=0.5"], **options)
    cli = command(
        Two, "--opt=Adam", "--opt.lr=0.5", "--sch.step_size=3", run=False, **{**options, "model_class": TwoNet}
    )
    print(type(cli.model.first).__name__, cli.model.first.defaults["lr"], cli.model.second.step_size)
    choice = [
        "--model.optimizer=SGD",
        "--model.optimizer.lr=0.03",
        "--model.scheduler=ExponentialLR",
        "--model.scheduler.gamma=0.9",
    ]
    cli = command(LightningCLI, "fit", *choice, auto_configure_optimizers=False, **{**options, "model_class": Injected})
    numbers(cli)
    print(cli.model.hparams["optimizer"]["class_path"], cli.model.hparams["scheduler"]["init_args"]["gamma"])

    section("environment, args, functions, seeds")
    os.environ |= {"PL_FIT__MODEL__WIDTH": "7", "PL_FIT__TRAINER__FAST_DEV_RUN": "1"}
    cli = command(plain, argv=["fit"], parser_kwargs={"default_env": True})
    print(cli.model.width, bool(cli.trainer.fast_dev_run))
    sys.argv = ["program.py"]
    cli = plain(args={"model": {"width": 8}, "trainer": {"max_epochs": 3}}, run=False)
    print(cli.model.width, cli.trainer.max_epochs)
    cli = command(LightningCLI, "--model.width=2", model_class=model_of, trainer_defaults=QUIET, run=False)
    print(type(cli.model).__name__, cli.model.width)
    for value in ("true", "false", "12"):
        print(command(plain, f"--seed_everything={value}", run=False).config.seed_everything)

    section("mistakes")
    command(plain, "fit", "--model.girth=3")
    command(plain, "fit", "--model.width=wide")
    command(plain, "--trainer.callbacks=Nothing.There", run=False)
    command(LightningCLI, "fit", datamodule_class=Data)

    section("the written configuration")
    written = functools.partial(
        LightningCLI, Net, Data, trainer_defaults={**QUIET, "logger": True, "enable_checkpointing": True}
    )
    cli = command(written, "fit", "--model.act=Tanh", "--model.width=3")
    numbers(cli)
    config = Path(cli.trainer.log_dir, "config.yaml")
    numbers(command(written, "fit", f"--config={config}"))
    path = cli.trainer.checkpoint_callback.best_model_path
    cli = command(written, "validate", f"--ckpt_path={path}", "--verbose=false")
    numbers(cli)
    print(cli.model.width)
    loaded = Net.load_from_checkpoint(path)
    print(type(loaded.net[1]).__name__, loaded.width)
    elsewhere = functools.partial(LightningCLI, Net, Data, trainer_defaults=QUIET, save_config_callback=Elsewhere)
    command(elsewhere, "fit", save_config_kwargs={"save_to_log_dir": False})
    command(elsewhere, "validate", "--verbose=false")
    try:
        command(elsewhere, "validate", "--verbose=false")
    except RuntimeError:
        print("a file is there")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        main()
