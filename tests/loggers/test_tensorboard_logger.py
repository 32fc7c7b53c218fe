"""TensorBoardLogger; its files are read with TensorBoard's own reader."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from fabricamp.callbacks import ModelCheckpoint
from fabricamp.errors import ConfigError
from fabricamp.loggers import TensorBoardLogger
from tests.small import Classifier, loader, quiet_trainer


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_scalars_come_back(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for step in (50, 100):
        logger.log_metrics({"loss": 1 / step, "val/acc": 0.5}, step)
    logger.log_metrics({}, 150)
    logger.save()
    events = read(tmp_path / "fabricamp_logs" / "version_0")
    assert events.Tags()["scalars"] == ["loss", "val/acc"]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [
        (50, pytest.approx(0.02)),
        (100, pytest.approx(0.01)),
    ]
    logger.close()


def test_prefix_name_and_options(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="digits", version="first", prefix="p", filename_suffix=".mine")
    logger.log_metrics({"loss": 1.0}, 1)
    logger.close()
    assert read(tmp_path / "digits" / "first").Tags()["scalars"] == ["p-loss"]
    assert [path.suffix for path in (tmp_path / "digits" / "first").iterdir()] == [".mine"]


def test_what_is_logged_after_close_is_read_too(tmp_path):
    logger = TensorBoardLogger(tmp_path, version=3)
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0}, step)
        logger.close()
    assert len(read(logger.folder).Scalars("loss")) == 2


def test_hyperparameters_are_written_once(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    params = {"lr": 0.1, "net": {"sizes": [1, 2], "act": torch.nn.ReLU}, "on": True, "none": None}
    for _ in range(2):
        logger.log_hyperparams(params)
    logger.close()
    written = yaml.safe_load((logger.folder / "hparams.yaml").read_text())
    assert written["net"]["sizes"] == [1, 2]
    assert (written["lr"], written["on"], written["none"]) == (0.1, True, None)
    events = read(logger.folder)
    assert [one.value for one in events.Scalars("hp_metric")] == [-1]
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert b"net/sizes" in plugin.content


def test_hyperparameters_without_the_default_metric(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1})
    logger.close()
    assert read(logger.folder).Tags()["scalars"] == []


def test_metrics_of_hyperparameters_that_a_fit_has_logged_already(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1})  # as a fit does
    logger.log_hyperparams({"lr": 0.1}, {"hp/loss": 0.5})  # as on_train_start of a program does
    logger.close()
    assert [one.value for one in read(logger.folder).Scalars("hp/loss")] == [0.5]


def test_images_and_texts(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_image("digit", torch.rand(1, 8, 8), 5)
    logger.log_image("gray", torch.rand(8, 8), 5, dataformats="HW")
    logger.log_text("note", "**hello**", 5)
    logger.close()
    events = read(logger.folder)
    assert events.Tags()["images"] == ["digit", "gray"]
    assert events.Images("digit")[0].width == 8
    assert events.Tags()["tensors"] == ["note/text_summary"]


def test_figures(tmp_path):
    figures = pytest.importorskip("matplotlib.figure", reason="needs the package matplotlib")
    logger = TensorBoardLogger(tmp_path)
    logger.log_figure("plot", figures.Figure(), 5)
    logger.close()
    assert read(logger.folder).Tags()["images"] == ["plot"]


def test_other_ranks_write_nothing_and_are_told_the_version(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(ValueError, match="decided by rank 0"):
        _ = logger.log_dir
    logger.version = 4
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_hyperparams({"lr": 1})
    logger.log_image("a", torch.rand(1, 2, 2), 1)
    logger.experiment.add_histogram("weights", torch.rand(3))
    logger.save()
    logger.close()
    assert logger.folder == tmp_path / "fabricamp_logs" / "version_4"
    assert list(tmp_path.iterdir()) == []


def test_it_travels_to_workers_without_its_writer(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    for twin in (pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger)):
        twin.log_metrics({"loss": 2.0}, 2)
        twin.close()
        assert twin.log_dir == logger.log_dir
    logger.close()


def test_runs_that_look_at_the_same_moment_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Path, "iterdir", lambda self: iter(())
    )  # each logger sees the folder before the others have created theirs
    assert [TensorBoardLogger(tmp_path).version for _ in range(3)] == [0, 1, 2]


def test_versions_go_on_from_the_highest(tmp_path):
    for name in ("version_2", "version_10", "version_x", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert TensorBoardLogger(tmp_path, name="runs").version == 11
    assert TensorBoardLogger(tmp_path, name=None).folder == Path(tmp_path, "version_0")
    with pytest.raises(ValueError, match="version=-1"):
        TensorBoardLogger(tmp_path, version=-1)


def test_a_misspelt_option_gets_the_nearest_name_and_those_of_the_writer_are_all_known(tmp_path):
    with pytest.raises(ConfigError, match="no argument 'prefixes'; did you mean 'prefix'"):
        TensorBoardLogger(tmp_path, prefixes="runs")
    with pytest.raises(ConfigError, match="no argument 'flush_sec'; did you mean 'flush_secs'"):
        TensorBoardLogger(tmp_path, flush_sec=1)
    taken = list(inspect.signature(SummaryWriter.__init__).parameters)[2:]  # without self and log_dir
    assert [*inspect.signature(TensorBoardLogger).parameters][-len(taken) :] == taken


def test_making_one_makes_no_folder(tmp_path):
    TensorBoardLogger(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_sub_dir_is_below_the_version(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="n", sub_dir=Path("s"))
    assert logger.sub_dir == "s"
    assert logger.log_dir == str(logger.folder) == str(tmp_path / "n" / "version_0" / "s")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"a": 1.0}, 0)
    logger.close()
    assert len(list((tmp_path / "n" / "version_0" / "s").glob("*"))) == 2  # events and hyper-parameters
    later = TensorBoardLogger(tmp_path, name="n", sub_dir="s")
    assert later.run_folders() == [later.folder, logger.folder]
    later.give_back()
    assert not (tmp_path / "n" / "version_1").exists()
    with pytest.raises(ConfigError, match="sub_dir=3"):
        TensorBoardLogger(tmp_path, sub_dir=3)


def test_defaults_of_lightnings_options_ask_for_nothing(tmp_path):
    TensorBoardLogger(tmp_path, log_graph=False, sub_dir=None)


class Drawn(Classifier):
    def __init__(self, example=None):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.example_input_array = example
        self.net[0].eval()

    def forward(self, x):
        return self.drop(self.net(x))


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "64-true"])
def test_the_graph_of_the_module_is_drawn_before_the_first_step(tmp_path, precision):
    def fit(logger, **options):
        torch.manual_seed(0)
        module = Drawn(torch.ones(2, 8))
        saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_last=True)
        limits = {"max_steps": 3 if options else 2, "precision": precision, "enable_checkpointing": True}
        limits["log_every_n_steps"] = 1
        quiet_trainer(logger=logger, callbacks=saves, **limits).fit(module, loader(), **options)
        return module

    logger = TensorBoardLogger(tmp_path, version="drawn", log_graph=True)
    module, plain = fit(logger), fit(False)
    names = {node.name for node in read(logger.folder).Graph().node}
    assert any("Linear[0]" in name for name in names)
    assert any("Dropout[drop]" in name for name in names)
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), plain.parameters(), strict=True))
    fit(TensorBoardLogger(tmp_path, version="drawn", log_graph=True), ckpt_path=tmp_path / "saved" / "last.ckpt")
    files = [file.read_bytes() for file in logger.folder.glob("*tfevents*")]
    assert [b"Dropout[drop]" in one for one in files].count(True) == 1 < len(files)


def test_a_graph_needs_an_example(tmp_path):
    trainer = quiet_trainer(logger=TensorBoardLogger(tmp_path, log_graph=True))
    with pytest.raises(ConfigError, match="Drawn has none: set self.example_input_array"):
        trainer.fit(Drawn(), loader())
    trainer = quiet_trainer(logger=TensorBoardLogger(tmp_path, log_graph=True))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        trainer.fit(Drawn(torch.ones(1, 3)), loader())
    assert "could not trace Drawn.forward" in error.value.__notes__[0]
