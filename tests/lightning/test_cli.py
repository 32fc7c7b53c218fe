"""LightningCLI: what Lightning prints, Lightning's files, lines for what is left out, and modules built again from checkpoints."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import fabricamp
import fabricamp.cli
from fabricamp import CheckpointError, DataModule, Trainer, TrainingModule
from fabricamp.errors import ConfigError, NotInstalledError
from fabricamp.lightning import names
from fabricamp.lightning.cli import left_out
from fabricamp.loggers import CSVLogger
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.lightning.run import HERE, nearly
from tests.lightning.test_door import DOOR
from tests.lightning.test_names import alias as alias  # noqa: PLC0414 - a fixture

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "max_steps": 1,
}


class Net(TrainingModule):
    def __init__(self, width: int = 4, act: nn.Module | None = None, anything=None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.act, self.anything = width, act, anything
        self.net = nn.Linear(2, width)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Deep(Net):
    def __init__(self, depth: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)


class Data(DataModule):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size, self.classes = size, 3

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(self.size, 2), 2)


@pytest.fixture(autouse=True)
def _without_options(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program.py"])


def made(*args, kind=None, model=Net, data=Data, **options):
    """Returns the command line of ``args``; it only builds, unless ``run``."""
    kind = kind or fabricamp.cli.LightningCLI
    defaults = {**QUIET, **options.pop("trainer_defaults", {})}
    options = {"run": False, "save_config_callback": None, "seed_everything_default": False, **options}
    return kind(model, data, args=[*args], trainer_defaults=defaults, **options)


def test_a_short_name_is_the_trainers_logger_beside_fabrics(alias):
    assert alias("lightning.fabric.loggers").CSVLogger is not CSVLogger
    cli = made("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", trainer_defaults={"logger": None})
    assert type(cli.trainer.logger) is CSVLogger


def test_prints_what_lightning_printed(tmp_path, monkeypatch):
    for name in [one for one in sys.modules if one.split(".")[0] in names.PACKAGES]:
        monkeypatch.delitem(sys.modules, name)  # of an installed Lightning, which another test imported
    program = str(HERE / "cli_program.py")
    code, shown, error = finish(
        start_forked(tmp_path, *DOOR, program, CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore")
    )
    assert code == 0, error
    pairs = itertools.zip_longest(
        (HERE / "cli_printed.txt").read_text().splitlines(), shown.splitlines(), fillvalue="(no line)"
    )
    different = [f"\nLightning  {one}\nfabricamp  {two}" for one, two in pairs if not nearly(one, two, 1e-6)]
    assert not different, "".join(different)


def test_a_file_that_lightning_wrote_is_taken_as_it_is(alias, tmp_path):
    command_line = alias("lightning.pytorch.cli").LightningCLI
    parser_only = type("ParserOnly", (command_line,), {"instantiate_classes": lambda self: None})
    written = yaml.safe_load((HERE / "cli_written.yaml").read_text())
    del written["ckpt_path"], written["weights_only"]  # of fit
    (tmp_path / "written.yaml").write_text(yaml.safe_dump(written))
    cli = made("--config", str(tmp_path / "written.yaml"), kind=parser_only)
    init = cli.parser.instantiate(cli.config).trainer
    assert [type(one).__name__ for one in init.callbacks] == [
        one["class_path"].rpartition(".")[2].replace("RichModelSummary", "ModelSummary")
        for one in written["trainer"]["callbacks"]
    ]
    assert [type(one).__name__ for one in init.logger] == [
        one["class_path"].rpartition(".")[2] for one in written["trainer"]["logger"]
    ]
    assert type(init.strategy).__name__ == "DDPStrategy"
    # A copy that is written names Lightning's classes, and starts the run again.
    text = cli.parser.dump(cli.config, skip_unset=False)
    assert "class_path: fabricamp." not in text
    assert "lambda_func: fabricamp.callbacks.finetuning.multiplicative" in text
    (tmp_path / "copy.yaml").write_text(text)
    again = made("--config", str(tmp_path / "copy.yaml"), kind=parser_only)
    assert again.parser.dump(again.config, skip_unset=False) == text


@pytest.fixture
def linked():
    class Linked(fabricamp.cli.LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.size", "model.width")

    return Linked


def _lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_what_is_left_out_is_said_in_a_line(tmp_path, caplog, linked):
    file = tmp_path / "old.yaml"
    file.write_text("model: {width: 50}\n")
    assert made(f"--config={file}", "--data.size=6", kind=linked).model.width == 6
    assert _lines(caplog) == [f"{file}: model.width is left out: it is linked to data.size, whose value counts"]
    caplog.clear()
    made("--config", "{fit: {model: {width: 50}}}", "fit", kind=linked, run=True)
    assert "--config: model.width is left out: it is linked to data.size, whose value counts" in _lines(caplog)
    caplog.clear()
    file.write_text("width: 50\n")
    made(f"--model={file}", kind=linked)
    assert _lines(caplog) == [f"{file}: model.width is left out: it is linked to data.size, whose value counts"]
    caplog.clear()
    file.write_text(f"model: {{class_path: {__name__}.Deep, init_args: {{depth: 3, width: 6}}}}\n")
    cli = made("-c", str(file), "--model.depth=4", "--model=Net", subclass_mode_model=True)
    assert cli.model.width == 6
    said = f"is left out: {__name__}.Net has no argument of this name"
    assert _lines(caplog) == [f"{file}: model.init_args.depth {said}", f"--model.depth: model.init_args.depth {said}"]


def test_nothing_is_said_of_what_counts(tmp_path, caplog, linked):
    file = tmp_path / "all.yaml"
    file.write_text("model: {width: 6}\ntrainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: x}}]}\n")
    made(
        f"--config={file}",
        "--data.size=6",
        "--trainer.callbacks.patience=2",
        "--model.act=torch.nn.ReLU",
        kind=linked,
    )
    made("--model=Deep", "--model.depth=2", "--model.act", "torch.nn.Tanh", subclass_mode_model=True)
    assert _lines(caplog) == []


def test_options_are_split_as_argparse_splits_them(tmp_path):
    given = [
        *left_out.given_by(["--a.b", "1", "--c=[2]", "-c", "{d: x}", "--list+=y", "--flag", "--config", str(tmp_path)])
    ]
    assert given == [
        ("--a.b", {"a": {"b": 1}}),
        ("--c", {"c": [2]}),
        ("--config", {"d": "x"}),
        ("--flag", {"flag": None}),
    ]


def test_a_wrong_class_or_two_optimizers_are_refused(monkeypatch):
    parser = fabricamp.cli.LightningArgumentParser()
    with pytest.raises(ConfigError, match="int.* is no Trainer, LightningModule"):
        parser.add_lightning_class_args(int, "number")
    with pytest.raises(ConfigError, match="optimizer: .*Linear.* is no subclass of torch's Optimizer"):
        parser.add_optimizer_args(nn.Linear)

    class Two(fabricamp.cli.LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(nested_key="one")
            parser.add_optimizer_args(nested_key="two")

    with pytest.raises(ConfigError, match=r"an? optimizer for each of one, two; give link_to="):
        made(kind=Two)
    with pytest.raises(ConfigError, match="save_to_log_dir=False saves nothing; override save_config"):
        fabricamp.cli.SaveConfigCallback(parser, None, save_to_log_dir=False)


def test_without_jsonargparse_the_classes_say_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "fabricamp.lightning.packages.pytorch.cli", raising=False)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delattr(sys.modules["fabricamp.lightning.packages.pytorch"], "cli", raising=False)
    for name in ("LightningCLI", "LightningArgumentParser", "SaveConfigCallback"):
        with pytest.raises(
            NotInstalledError, match=rf"^{name} needs jsonargparse.*pip install 'jsonargparse\[signatures\]'"
        ):
            getattr(fabricamp.cli, name)(Net)
    with pytest.raises(NotInstalledError, match="hyper-parameters of LightningCLI need jsonargparse"):
        Net.load_from_checkpoint(_saved({"width": 3}))
    sys.modules.pop("fabricamp.lightning.packages.pytorch.cli")


def _saved(hparams: dict[str, Any]):
    import io

    file = io.BytesIO()
    hparams = {**hparams, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    torch.save({"state_dict": Net(hparams.get("width", 4)).state_dict(), "hyper_parameters": hparams}, file)
    file.seek(0)
    return file


def test_a_module_with_classes_among_its_arguments_is_built_again(tmp_path):
    act = {"class_path": "torch.nn.LeakyReLU", "init_args": {"negative_slope": 0.25}}
    options = ["--model.act=torch.nn.LeakyReLU", "--model.act.negative_slope=0.25", "--model.depth=2"]
    cli = made(
        "fit", "--model=Deep", *options, f"--trainer.default_root_dir={tmp_path}", run=True, subclass_mode_model=True
    )
    assert cli.model.hparams["act"]["class_path"] == "torch.nn.LeakyReLU"
    cli.trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = TrainingModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert type(loaded) is Deep
    assert (loaded.hparams.depth, loaded.act.negative_slope, loaded.width) == (2, 0.25, 4)
    assert Net.load_from_checkpoint(_saved({"act": act}), width=4).act.negative_slope == 0.25
    assert Data.load_from_checkpoint(tmp_path / "a.ckpt").size == 4


@pytest.mark.parametrize(
    ("hparams", "words"),
    [
        (
            {"anything": {"class_path": "subprocess.Popen", "init_args": {"args": "true"}}},
            "'anything' names the class 'subprocess",
        ),
        ({"act": {"class_path": "subprocess.Popen"}}, "'act' names the class"),
        ({"act": {"class_path": "torch.nn.Nothing"}}, "'act' names the class 'torch.nn.Nothing', which is not there"),
        ({"_class_path": "torch.nn.Linear"}, "'_class_path' names the class 'torch.nn.Linear'"),
        ({"girth": 3}, "Net cannot be built from the BytesIO: "),
    ],
)
def test_a_checkpoint_has_no_other_class_built(hparams, words):
    with pytest.raises(CheckpointError, match=words):
        Net.load_from_checkpoint(_saved(hparams))


def test_hyperparameters_of_a_checkpoint_that_fit_no_argument_end_the_command(tmp_path, capsys):
    (tmp_path / "a.ckpt").write_bytes(_saved({"girth": 3}).read())
    with pytest.raises(SystemExit):
        made("validate", f"--ckpt_path={tmp_path / 'a.ckpt'}", run=True)
    assert "a.ckpt: its hyper-parameters are no arguments of the model: girth" in capsys.readouterr().err


def test_ranks_write_one_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    defaults = {"devices": 2, "strategy": "ddp", "start_method": "fork", "default_root_dir": str(tmp_path)}
    options = {"run": True, "trainer_defaults": defaults, "save_config_callback": fabricamp.cli.SaveConfigCallback}
    made("fit", "--model.width=3", **options)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["width"] == 3
    with pytest.raises(ConfigError, match="config.yaml is there, and would be replaced"):
        made("fit", **options)
    made("fit", "--model.width=5", save_config_kwargs={"overwrite": True}, **options)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["width"] == 5


def test_the_model_keeps_its_optimizer_through_a_copy(recwarn):
    import copy
    import pickle

    cli = made("--optimizer=Adam", "--optimizer.lr=0.5")
    assert any("Net.configure_optimizers is not called" in str(one.message) for one in recwarn)
    for model in (cli.model, copy.deepcopy(cli.model), pickle.loads(pickle.dumps(cli.model))):
        optimizer = model.configure_optimizers()
        assert type(optimizer) is torch.optim.Adam
        assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]


def test_a_parser_takes_the_trainers_options_without_a_prefix(capsys):
    parser = fabricamp.cli.LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, None)
    assert parser.parse_args(["--max_epochs=3", "--callbacks=Timer"]).max_epochs == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--callbacks=1"])
    assert 'error: Parser key "callbacks"' in capsys.readouterr().err


def test_callbacks_among_the_defaults_are_added_to_those_of_the_configuration():
    stopping = {"class_path": "fabricamp.callbacks.EarlyStopping", "init_args": {"monitor": "loss"}}
    cli = made(
        "--trainer.callbacks=LearningRateMonitor", trainer_defaults={"callbacks": [stopping, fabricamp.Callback()]}
    )
    assert [type(one).__name__ for one in cli.trainer.callbacks].count("Callback") == 1
    assert {"EarlyStopping", "LearningRateMonitor"} <= {type(one).__name__ for one in cli.trainer.callbacks}


def test_a_trainer_of_the_user_gets_what_it_takes(recwarn):
    class Mine(Trainer):
        def __init__(self, word: str = "a", **kwargs) -> None:
            super().__init__(**kwargs)
            self.word = word

    cli = made("--trainer.word=b", "--trainer.max_epochs=3", "--trainer.callbacks=Timer", trainer_class=Mine)
    assert (cli.trainer.word, cli.trainer.max_epochs) == ("b", 3)
    assert "Timer" in {type(one).__name__ for one in cli.trainer.callbacks}

    class Bare(Trainer):
        def __init__(self) -> None:
            super().__init__(max_epochs=2)

    options = {"args": [], "run": False, "trainer_class": Bare, "seed_everything_default": False}
    assert fabricamp.cli.LightningCLI(Net, Data, **options).trainer.max_epochs == 2
    assert "Bare has no argument callbacks" in str(recwarn[-1].message)
