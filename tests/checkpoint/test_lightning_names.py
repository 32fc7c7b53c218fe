"""Pickles in files of programs written for Lightning: Lightning's names, and a round trip each way."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from functools import partial

import pytest
import torch

import fabricamp
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.callbacks.early_stopping import EarlyStoppingReason
from fabricamp.checkpoint import lightning_names, read_checkpoint
from fabricamp.checkpoint.hyperparameters import Hyperparameters
from fabricamp.checkpoint.lightning_names import Unpickler, refuse_unnamed, renamed
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.state import RunningStage, TrainerFn, TrainerStatus
from tests.lightning.forked_door import run_forked

VALUES = {
    "hparams": Hyperparameters(lr=0.1, net=Hyperparameters(width=3), fn=torch.relu),
    "enums": [*TrainerFn, *RunningStage, *TrainerStatus, *EarlyStoppingReason],
    "error": ConfigError("no"),
    "types": [fabricamp.LightningModule, fabricamp.Trainer, ModelCheckpoint, fabricamp.seed_everything],
    "within": partial(dict, kind=fabricamp.Callback),
}


class Pickler(pickle.Pickler):
    """Pickles for a file that may go to Lightning."""

    def __init__(self):
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=2)

    def reducer_override(self, value):
        refuse_unnamed(value)
        return NotImplemented

    def dumped(self, value):
        self.dump(value)
        return renamed(self.buffer.getvalue())


# Both programs run with the names of an installed Lightning, or of the alias, and have to print equal values.
READS = """
import pickle, sys
import lightning.pytorch as pl
from lightning.pytorch.utilities.parsing import AttributeDict
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
with open(sys.argv[1], "rb") as file:
    values = pickle.load(file)
assert type(values["hparams"]) is AttributeDict and values["hparams"].net.width == 3, values
assert values["enums"] == [*TrainerFn, *RunningStage, *TrainerStatus, *EarlyStoppingReason]
assert [type(one) for one in values["enums"][:2]] == [TrainerFn] * 2
assert values["types"] == [pl.LightningModule, pl.Trainer, pl.callbacks.ModelCheckpoint, pl.seed_everything]
assert values["within"].keywords == {"kind": pl.Callback}
with open(sys.argv[2], "wb") as file:
    pickle.dump(values, file, protocol=2)
"""


def shown(value):
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shown(part) for part in value]
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return (type(value), value.args) if isinstance(value, Exception) else value


def names_in(data):
    return {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}


def test_names_are_lightnings():
    data = Pickler().dumped(VALUES)
    found = names_in(data)
    assert not [name for name in found if name.startswith("fabricamp")]
    assert {"lightning.pytorch.utilities.parsing AttributeDict", "lightning.pytorch.trainer.states TrainerFn"} <= found
    assert shown(Unpickler(io.BytesIO(data)).load()) == shown(VALUES)
    assert type(Unpickler(io.BytesIO(data)).load()["hparams"]) is Hyperparameters


def test_a_pickle_without_such_names_stays_as_it_is():
    values = {
        "a": [1, 2.0, "fabricamp.state\nTrainerFn\n", "cfabricamp.state\nTrainerFn\n"],
        "b": {3, 4},
        "c": partial(int, 3),
    }
    data = Pickler().dumped(values)
    assert data == pickle.dumps(values, protocol=2)


def test_the_names_of_classes_do_not_change():
    assert Hyperparameters.__module__ == "fabricamp.checkpoint.hyperparameters"
    assert b"fabricamp.checkpoint.hyperparameters" in pickle.dumps(VALUES)
    # Pickles of earlier versions name fabricamp's modules.
    assert Unpickler(io.BytesIO(pickle.dumps(VALUES, protocol=2))).load()["hparams"] == VALUES["hparams"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (ModelCheckpoint(), r"an object of fabricamp\.callbacks\.model_checkpoint\.ModelCheckpoint"),
        ({"a": [Hyperparameters(b=ModelCheckpoint())]}, r"an object of fabricamp\.callbacks\.model_checkpoint"),
        (fabricamp.OptLevel("O2"), r"an object of fabricamp\.precision"),
        (fabricamp.OptLevel, r"fabricamp\.precision\..*OptLevel is a name of fabricamp alone"),
        (Hyperparameters(a=fabricamp.checkpoint.read_header), r"fabricamp\.checkpoint\.search\.read_header is a name"),
    ],
)
def test_what_lightning_could_not_rebuild_is_refused_by_name(value, words):
    with pytest.raises(CheckpointError, match=words):
        Pickler().dumped(value)


def test_an_object_of_a_users_class_is_as_it_was():
    class Plain(fabricamp.Callback):
        pass

    refuse_unnamed(Plain())
    refuse_unnamed(Plain)


def test_types_that_the_program_allows_are_known_by_both_names():
    data = Pickler().dumped(Hyperparameters(lr=0.1))
    from torch._weights_only_unpickler import Unpickler as WeightsOnly

    with torch.serialization.safe_globals([Hyperparameters]):
        with pytest.raises(pickle.UnpicklingError):
            WeightsOnly(io.BytesIO(data)).load()
        with lightning_names.allowed_under_both_names():
            assert WeightsOnly(io.BytesIO(data)).load() == {"lr": 0.1}
    with lightning_names.allowed_under_both_names(), pytest.raises(pickle.UnpicklingError):
        WeightsOnly(io.BytesIO(data)).load()


def test_what_the_program_allows_under_lightnings_name_stays_allowed():
    name = lightning_names.lightnings_names()["fabricamp.checkpoint.hyperparameters.Hyperparameters"]
    with torch.serialization.safe_globals([(Hyperparameters, name)]):
        for _ in range(2):
            with lightning_names.allowed_under_both_names():
                pass
            assert (Hyperparameters, name) in torch.serialization.get_safe_globals()


def test_each_name_leads_to_the_same_under_the_alias(tmp_path):
    (tmp_path / "code.py").write_text(
        "import importlib\n"
        "from fabricamp.checkpoint.lightning_names import find_named, lightnings_names\n"
        "for ours, theirs in lightnings_names().items():\n"
        "    module, _, name = theirs.rpartition('.')\n"
        "    found = getattr(importlib.import_module(module), name)\n"
        "    assert found is find_named(module, name), theirs\n"
        "    assert f'{found.__module__}.{found.__qualname__}' == ours, (ours, theirs)\n"
    )
    run_forked(tmp_path, "code.py")


def write_pickle(folder):
    """Writes READS and its input; returns the command."""
    (folder / "reads.py").write_text(READS)
    (folder / "there").write_bytes(Pickler().dumped(VALUES))
    return [folder / name for name in ("reads.py", "there", "back")]


def check_that_it_came_back(folder):
    with (folder / "back").open("rb") as file:
        back = Unpickler(file).load()
    assert shown(back) == shown(VALUES)
    assert [type(one) for one in back["enums"]] == [type(one) for one in VALUES["enums"]]


def test_a_round_trip(tmp_path):
    """test_objects_elsewhere.py makes it with Lightning itself."""
    run_forked(tmp_path, *write_pickle(tmp_path))
    check_that_it_came_back(tmp_path)


WRITES = """
import sys
import torch
import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import AttributeDict

class Options:
    def __init__(self):
        self.stage, self.kind, self.more = TrainerFn.FITTING, pl.LightningModule, AttributeDict(width=3)

class Net(pl.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Holds:
    def __init__(self, inside):
        self.inside = {"a": [inside]}

stopping = pl.callbacks.EarlyStopping("v")
options = {"named": Options(), "unnamed": stopping, "unnamed within": Holds(stopping)}[sys.argv[2]]
trainer = pl.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Net(options), [torch.ones(2, 2)])
trainer.save_checkpoint(sys.argv[1])
"""


def test_a_file_of_a_program_for_lightning_has_lightnings_names(tmp_path, monkeypatch):
    (tmp_path / "writes.py").write_text(WRITES)
    run_forked(tmp_path, "writes.py", "a.ckpt", "named")
    closed = read_checkpoint(tmp_path / "a.ckpt", verify=False)["hyper_parameters"]["options"]
    found = names_in(closed.objects.data.numpy().tobytes() + pickle.STOP)
    assert found >= {"lightning.pytorch.trainer.states TrainerFn", "lightning.pytorch.core.module LightningModule"}
    assert not [name for name in found if name.startswith("fabricamp")]
    monkeypatch.setattr(
        sys.modules["__main__"], "Options", type("Options", (), {"__module__": "__main__"}), raising=False
    )
    options = read_checkpoint(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"]["options"]
    assert (options.stage, options.kind) == (TrainerFn.FITTING, fabricamp.LightningModule)
    assert type(options.more) is Hyperparameters


@pytest.mark.parametrize("options", ["unnamed", "unnamed within"])
def test_a_file_of_a_program_for_lightning_refuses_other_objects_of_ours(options, tmp_path):
    (tmp_path / "writes.py").write_text(WRITES)
    said = run_forked(tmp_path, "writes.py", "a.ckpt", options, code=1)
    assert "checkpoint['hyper_parameters']['options'] is a" in said
    assert "an object of fabricamp.callbacks.early_stopping.EarlyStopping has another state than Lightning's" in said
    assert not (tmp_path / "a.ckpt").exists()
