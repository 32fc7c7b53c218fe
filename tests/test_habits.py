"""Each habit alone, without the import hook for Lightning's names; docs/from-lightning.md has a row for each."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import fabricamp
from fabricamp import ConfigError, habits
from fabricamp._utils.say_once import say_once
from fabricamp.callbacks import BasePredictionWriter, Checkpoint, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.lightning.names import LightningFinder
from fabricamp.rng import global_seed
from fabricamp.tuner import Tuner
from tests.small import Classifier, data, loader, quiet_trainer

NAMES = [one.name for one in fields(habits.Habits)]
PAGE = (Path(__file__).parents[1] / "docs" / "from-lightning.md").read_text()


def docstrings():
    """Returns the text below each field."""
    (kind,) = ast.parse(textwrap.dedent(inspect.getsource(habits.Habits))).body
    found = {}
    for one, text in itertools.pairwise(kind.body):
        if isinstance(one, ast.AnnAssign):
            found[one.target.id] = inspect.cleandoc(text.value.value)
    return found


def test_each_habit_is_a_row_of_the_page_and_each_row_a_habit():
    rows = [line.removeprefix("| **L** ").split(" | ") for line in PAGE.splitlines() if line.startswith("| **L** ")]
    assert sorted(f"{what}: {lightnings}" for what, lightnings, *_ in rows) == sorted(
        text.replace("``", "`") for text in docstrings().values()
    )
    assert docstrings().keys() == set(NAMES)


def test_a_program_has_all_or_none():
    assert {getattr(habits.NATIVE, name) for name in NAMES} == {False}
    assert {getattr(habits.LIGHTNING, name) for name in NAMES} == {True}
    assert habits.habits() is habits.NATIVE


def test_no_other_question_is_asked_of_the_import_hook():
    root = Path(fabricamp.__file__).parent
    for file in root.rglob("*.py"):
        if not file.is_relative_to(root / "lightning"):
            assert not re.search("lightning_alias|is_installed|habits.LIGHTNING", file.read_text()), file


class Rates(Classifier):
    """Steps its schedule after each step; ``rates`` has the learning rate after each batch."""

    def __init__(self, schedule, **config):
        super().__init__()
        self.schedule, self.config, self.rates = schedule, config, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step", **self.config}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def fit(module, size=16, **options):
    trainer = quiet_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **options})
    trainer.fit(module, loader(size))  # batches of 4
    return trainer


def says_differences(tmp_path, monkeypatch, caplog):
    say_once.cache_clear()
    habits.say_difference("another result")
    return [line for line in caplog.messages if "another result" in line] == [
        "another result (fabricamp help from-lightning)"
    ]


def schedules_move_with_each_step(tmp_path, monkeypatch, caplog):
    module = Rates(halving)
    fit(module, nan_policy="skip")
    assert module.rates in ([0.5, 0.25, 0.125, 0.0625], [1.0, 1.0, 0.5, 0.25])
    return module.rates[0] == 0.5


def schedules_count_batches(tmp_path, monkeypatch, caplog):
    module = Rates(halving, frequency=3)
    fit(module, max_epochs=2)
    assert module.rates in ([1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25], [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25])
    return module.rates[5] == 0.5


def one_cycle_passes_its_end(tmp_path, monkeypatch, caplog):
    module = Rates(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=4))
    fit(module)
    return module.rates[-1] > module.rates[-2]


def stop_validates(tmp_path, monkeypatch, caplog):
    class Stops(Classifier):
        validated = 0

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = True

        def on_validation_end(self):
            self.validated += 1

    module = Stops()
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(module, loader(16), loader(8))
    return module.validated == 1


def private_names_are_lightnings(tmp_path, monkeypatch, caplog):
    methods = {"_extract_lr": lambda self: 1, "rate": lambda self: self._extract_lr()}
    mine = type("Mine", (LearningRateMonitor,), methods)
    try:
        mine()
    except ConfigError as error:
        assert "overrides a private method of Lightning's" in str(error)  # noqa: PT017 - one of two outcomes
        return True
    return False


def trainer_by_private_name(tmp_path, monkeypatch, caplog):
    module = Classifier()
    module._trainer = "a value"
    return module._attachment.trainer == "a value"


def fp16_is_bf16_on_a_cpu(tmp_path, monkeypatch, caplog):
    return quiet_trainer(precision="16-mixed", accelerator="cpu").precision_plugin.name == "O4"


def outputs_are_shares(tmp_path, monkeypatch, caplog):
    class Notes(Classifier):
        shares = ()

        def training_step(self, batch, batch_idx):
            self.loss = super().training_step(batch, batch_idx)
            return self.loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.shares = (*self.shares, float(outputs["loss"] / self.loss.detach()))

    module = Notes()
    fit(module, accumulate_grad_batches=2)
    assert len({*module.shares}) == 1
    return module.shares[0] == 0.5


def steps_may_train_nothing(tmp_path, monkeypatch, caplog):
    class Forgets(Classifier):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)

    try:
        fit(Forgets())
    except ConfigError as error:
        assert "returns no value, so nothing would be trained" in str(error)  # noqa: PT017 - one of two outcomes
        return False
    return True


def cut_epochs_count(tmp_path, monkeypatch, caplog):
    trainer = fit(Classifier(), max_steps=6, max_epochs=2)  # within the second epoch
    assert (trainer.global_step, trainer.state.epoch) == (6, 1)
    assert fit(Classifier(), max_epochs=2).current_epoch == 2
    return trainer.current_epoch == 2


def results_are_of_the_epoch(tmp_path, monkeypatch, caplog):
    class Logs(Classifier):
        def test_step(self, batch, batch_idx):
            self.log("both", 1.0, on_step=True, on_epoch=True)
            self.log("alone", 1.0, on_step=True, on_epoch=False)

    (found,) = quiet_trainer().test(Logs(), loader(8), verbose=False)
    assert "both_epoch" in found
    return found.keys() == {"both_epoch"}


def unknown_indices_are_empty(tmp_path, monkeypatch, caplog):
    class Writes(BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, *_):
            seen.append(batch_indices)

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            seen.append(batch_indices)

    seen = []
    quiet_trainer(callbacks=[Writes("batch_and_epoch")]).predict(Classifier(), list(loader(4)))
    assert seen in ([None, [None]], [[], [[]]])
    return seen[0] == []


def summaries_read_example_inputs(tmp_path, monkeypatch, caplog):
    class Draws(Classifier):
        read = 0

        @property
        def example_input_array(self):
            self.read += 1
            return torch.randn(2)

    module = Draws()
    quiet_trainer(max_steps=1, enable_model_summary=True).fit(module, loader(4))
    assert module.read in (0, 3)
    return module.read == 3


def first_checkpoint_callback_counts(tmp_path, monkeypatch, caplog):
    class Own(Checkpoint):
        pass

    own, models = Own(), ModelCheckpoint(tmp_path)
    assert quiet_trainer(enable_checkpointing=True, callbacks=[own]).checkpoint_callback is own
    return quiet_trainer(enable_checkpointing=True, callbacks=[own, models]).checkpoint_callback is own


def loaders_end_at_their_last_batch(tmp_path, monkeypatch, caplog):
    generator = torch.Generator().manual_seed(1)
    loop = torch.Generator().manual_seed(1)
    torch.empty((), dtype=torch.int64).random_(generator=loop)
    torch.randperm(8, generator=loop)
    last = loop.get_state()
    torch.randperm(8, generator=loop)
    shuffled = DataLoader(data(8), batch_size=4, shuffle=True, generator=generator)
    quiet_trainer(max_epochs=1).fit(Classifier(), shuffled)
    assert any(torch.equal(generator.get_state(), one) for one in (last, loop.get_state()))
    return torch.equal(generator.get_state(), last)


def loaders_are_tried(tmp_path, monkeypatch, caplog):
    class Batches:
        begun = 0

        def __iter__(self):
            self.begun += 1
            return iter(loader(8))

    train, val = Batches(), Batches()
    quiet_trainer(max_epochs=2, limit_val_batches=1).fit(Classifier(), train, val)
    assert (train.begun, val.begun) in ((2, 3), (3, 4))
    return train.begun == 3


def manual_steps_keep_the_first_rate(tmp_path, monkeypatch, caplog):
    class Steps(Classifier):
        automatic_optimization = False
        lr = 0.5

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

    rates = []
    options = {"num_training": 4, "min_lr": 0.001, "max_lr": 1.0, "update_attr": False}
    finder = Tuner(quiet_trainer()).lr_find(Steps(), loader(16), **options)
    assert finder.results["lr"] == rates
    assert len(rates) == 4
    return len({*rates}) == 1


def state_key_without_filename(tmp_path, monkeypatch, caplog):
    keys = {ModelCheckpoint(filename=name).state_key for name in ("a", "b")}
    return len(keys) == 1


def best_models_are_shared(tmp_path, monkeypatch, caplog):
    checkpoint = ModelCheckpoint(tmp_path, monitor="loss")
    checkpoint.best_k_models["a.ckpt"] = torch.tensor(1.0)
    return "a.ckpt" in checkpoint.best_k_models


class Mark:
    """An object among the hyper-parameters."""


class Marked(Classifier):
    def __init__(self, mark):
        super().__init__()
        self.save_hyperparameters()


def saved(tmp_path, mark, **options):
    trainer = fit(Marked(mark), **options)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def checkpoints_hold_objects(tmp_path, monkeypatch, caplog):
    content = read_checkpoint(saved(tmp_path, Mark()), weights_only=False)
    return isinstance(content["hyper_parameters"]["mark"], Mark)


def files_have_lightnings_names(tmp_path, monkeypatch, caplog):
    file = saved(tmp_path, [Mark(), EarlyStopping], checkpoint_objects=True).read_bytes()
    ours, theirs = b"cfabricamp.callbacks.early_stopping\n", b"clightning.pytorch.callbacks.early_stopping\n"
    assert (ours in file) != (theirs in file)
    return theirs in file


def packages_add_callbacks(tmp_path, monkeypatch, caplog):
    (tmp_path / "adds.py").write_text("import fabricamp\n\ndef make():\n    return fabricamp.callbacks.Timer()\n")
    (tmp_path / "adds-1.0.dist-info").mkdir()
    (tmp_path / "adds-1.0.dist-info" / "METADATA").write_text("Name: adds\nVersion: 1.0\n")
    text = "[lightning.pytorch.callbacks_factory]\nadds = adds:make\n"
    (tmp_path / "adds-1.0.dist-info" / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    added = any(isinstance(one, fabricamp.callbacks.Timer) for one in quiet_trainer().callbacks)
    sys.modules.pop("adds", None)
    return added


def lightnings_seed_first(tmp_path, monkeypatch, caplog):
    for name in ("FABRICAMP_GLOBAL_SEED", "PL_GLOBAL_SEED", "FABRICAMP_SEED_WORKERS", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    fabricamp.seed_everything(1)
    os.environ["PL_GLOBAL_SEED"] = "5"
    assert global_seed() in (1, 5)
    return global_seed() == 5


def last_closure_call_counts(tmp_path, monkeypatch, caplog):
    class Closes(Classifier):
        losses = ()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("logged", loss)
            self.losses = (*self.losses, float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.shown = float(outputs["loss"])

    module = Closes()
    trainer = fit(module, size=4)
    assert len({*module.losses}) == len(module.losses) == 3
    logged = float(trainer.callback_metrics["logged"])
    assert module.shown == logged
    assert logged in (module.losses[0], module.losses[-1])
    return logged == module.losses[-1]


def runs_are_in_lightning_logs(tmp_path, monkeypatch, caplog):
    named = fabricamp.loggers.CSVLogger(".", name="fabricamp_logs")  # a name that a program gives is its own
    trainer = quiet_trainer(logger=[fabricamp.loggers.TensorBoardLogger("."), named], max_steps=1, log_every_n_steps=1)
    trainer.fit(Classifier(), loader())
    (of_csv,) = tmp_path.glob("*/version_*/metrics.csv")
    assert of_csv.parts[-3] == "fabricamp_logs"
    (events,) = tmp_path.glob("*/version_*/events.*")
    assert trainer.log_dir == str(events.parent.relative_to(tmp_path))
    assert events.parts[-3] in ("fabricamp_logs", "lightning_logs")
    return events.parts[-3] == "lightning_logs"


def one_process_gathers_nothing(tmp_path, monkeypatch, caplog):
    class Gathers(Classifier):
        def on_train_start(self):
            self.shape = self.all_gather(torch.ones(2)).shape

    module = Gathers()
    fit(module)
    assert module.shape in ((2,), (1, 2))
    return module.shape == (2,)


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside all others"])
@pytest.mark.parametrize("name", NAMES)
def test_a_habit_is_what_its_name_says(name, others, tmp_path, monkeypatch, caplog):
    is_as_in_lightning = globals()[name]
    rest = habits.LIGHTNING if others else habits.NATIVE
    monkeypatch.setattr(habits, "_present", replace(rest, **{name: not others}))
    assert is_as_in_lightning(tmp_path, monkeypatch, caplog) == (not others)
    assert LightningFinder not in sys.meta_path
