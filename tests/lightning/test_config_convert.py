"""``fabricamp config convert`` writes a configuration for ``fabricamp fit`` that trains as LightningCLI does with the old one."""

from __future__ import annotations

import sys

import pytest
import torch
import yaml

import fabricamp.cli
from fabricamp.cli import LRSchedulerCallable, OptimizerCallable, main
from fabricamp.commands.convert import convert
from fabricamp.config import build_parts, check_config
from fabricamp.errors import ConfigError
from tests.lightning.run import HERE
from tests.lightning.test_cli import Data, Net


class Chosen(Net):
    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}


CHOICE = [
    "--model.optimizer=SGD",
    "--model.optimizer.lr=0.5",
    "--model.scheduler=StepLR",
    "--model.scheduler.step_size=1",
]


def test_the_new_configuration_trains_as_the_old_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    quiet = {"accelerator": "cpu", "max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"auto_configure_optimizers": False, "seed_everything_default": 3, "trainer_defaults": quiet}
    act = "--model.act=torch.nn.Tanh"
    cli = fabricamp.cli.LightningCLI(
        Chosen,
        Data,
        args=["fit", *CHOICE, act, "--trainer.callbacks+=LearningRateMonitor", "--model.width=3"],
        **options,
    )
    old = f"{cli.trainer.log_dir}/config.yaml"
    command = [
        "config",
        "convert",
        old,
        "--module",
        f"{__name__}.Chosen",
        "--data",
        f"{__name__}.Data",
        "--to",
        "new.yaml",
    ]
    assert main(command) == 0
    assert main(["fit", "new.yaml", "trainer.default_root_dir=again"]) == 0
    file = max((tmp_path / "again").rglob("*.ckpt"), key=lambda one: one.name)
    weights = torch.load(file, weights_only=True)["state_dict"]
    assert weights.keys() == cli.model.state_dict().keys()
    assert all(torch.equal(one, weights[name]) for name, one in cli.model.state_dict().items())
    assert main(command) == 2  # new.yaml is there


def test_classes_are_ours_and_defaults_are_left_out():
    text = convert(HERE / "cli_written.yaml", f"{__name__}.Chosen", f"{__name__}.Data")
    written = yaml.safe_load((HERE / "cli_written.yaml").read_text())["trainer"]
    trainer = yaml.safe_load(text)["trainer"]
    assert trainer.keys() == {"callbacks", "logger", "plugins", "profiler", "strategy"}
    assert [one["_target_"] for one in trainer["callbacks"]] == [
        one["class_path"].replace("lightning.pytorch", "fabricamp") for one in written["callbacks"]
    ]
    assert {"_target_": "fabricamp.callbacks.ModelCheckpoint", "dirpath": "x"} in trainer["callbacks"]
    assert trainer["strategy"]["timeout"] == 1800
    functions = [one.get("batch_size_fn") for one in trainer["callbacks"]]
    assert {"_target_": "builtins.len", "_partial_": True} in functions


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "model: {width: 3}",
            "module has no class_path, because the program names the class; add --module package.Class",
        ),
        ("- 1", "holds no mapping"),
        ("a: [", "cannot be read as YAML"),
        ("fit: {}\ntest: {}", "is for fit, test, and a configuration for one"),
        ("model: {class_path: X}", "'X' has no path; write package.X"),
        (
            "model: {class_path: Y.Z}\noptimizer: {class_path: torch.optim.Adam}",
            "optimizer is torch.optim.Adam, and fabricamp's",
        ),
        ("trainer: {callbacks: [ModelPruning]}", "'ModelPruning' has no path"),
        (
            "trainer: {callbacks: {class_path: lightning.pytorch.callbacks.ModelPruning}}",
            "callbacks.ModelPruning is not offered",
        ),
        (
            "trainer: {callbacks: {class_path: lightning.pytorch.callbacks.Nothing}}",
            "'lightning.*Nothing' is not offered by fabricamp",
        ),
        ("stopping: {patience: 3}", "'stopping' is an option of the program itself"),
        ("verbose: false", "verbose=False has no key in a configuration"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path, text, words):
    (tmp_path / "old.yaml").write_text(text.replace("Y.Z", f"{__name__}.Chosen"))
    module = None if "model" in text or text.startswith(("-", "a", "fit")) else f"{__name__}.Chosen"
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path / "old.yaml", module)


def test_a_module_that_is_not_ours_yet_is_said(tmp_path, caplog):
    (tmp_path / "old.yaml").write_text(
        "fit: {seed_everything: true, model: {class_path: torch.nn.ReLU}, ckpt_path: a.ckpt}"
    )
    content = yaml.safe_load(convert(tmp_path / "old.yaml"))
    assert content == {"seed": 0, "trainer": {}, "module": {"_target_": "torch.nn.ReLU"}, "ckpt_path": "a.ckpt"}
    assert "before the new configuration starts a run: module._target_='torch.nn.ReLU' is not a Training" in caplog.text


class Holds(Net):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return Data().train_dataloader()


def test_a_partial_is_called_later_and_checked_now():
    section = {"_target_": f"{__name__}.Holds", "make": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}}
    content = {"trainer": {"accelerator": "cpu", "logger": False}, "module": section}
    check_config(content)
    made = build_parts(content).module.make([torch.nn.Parameter(torch.ones(1))])
    assert type(made) is torch.optim.SGD
    assert made.defaults["lr"] == 0.5
    with pytest.raises(ConfigError, match="module.make.lrr is not known; did you mean 'lr'"):
        check_config({"module": {**section, "make": {**section["make"], "lrr": 1}}})
    with pytest.raises(ConfigError, match="module.make._partial_='yes' is not a flag"):
        check_config({"module": {**section, "make": {**section["make"], "_partial_": "yes"}}})
