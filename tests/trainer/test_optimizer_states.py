"""Optimizers whose state is not plain tensors: what torch reads is saved and resumed, the rest is told before much is lost."""

from __future__ import annotations

import collections
import enum
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import TrainingModule
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint.packing import pack_objects, unpack_objects
from fabricamp.commands.export import export
from fabricamp.errors import CheckpointError, CheckpointObjectsError
from tests.small import data, quiet_trainer
from tests.trainer.quantised import Codes, Quantised


class Norm(enum.Enum):
    SIGN = 1


class Told:
    """An object in a state."""


class WithState(torch.optim.Optimizer):
    """SGD that puts ``value()`` into its state at step ``at``, and ``option`` into its group."""

    def __init__(self, params, value=None, at=1, option=None):
        super().__init__(params, {"lr": 0.1, "option": option})
        self.value, self.at, self.made = value, at, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
                self.state[parameter].setdefault("nothing", None)
                if self.made == self.at and self.value is not None:
                    self.state[parameter]["kept"] = self.value(parameter)


class Net(TrainingModule):
    def __init__(self, make=Quantised):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.make, self.steps = make, 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return self.make(self.parameters())


def batches():
    x, y = data(48).tensors
    return [*zip(x.split(4), y.split(4), strict=True)]


def flat(module):
    return torch.cat([one.detach().flatten().float() for one in module.parameters()])


def states(path):
    """The optimizer's states in a file, as torch alone reads them without running code."""
    content = torch.load(path, weights_only=True)
    return content["optimizer_states"][0]["state"].values()


def saved(folder, make=Quantised, callback=ModelCheckpoint, **options):
    """Trains five steps by default, and returns the module and the file that its callback has written."""
    module = Net(make)
    checkpoint = callback(dirpath=folder, every_n_train_steps=5)
    quiet_trainer(max_steps=5, callbacks=[checkpoint], enable_checkpointing=True, **options).fit(module, batches())
    return module, checkpoint.best_model_path


def at_ten(make=Quantised, level="O0", **options):
    module = Net(make)
    quiet_trainer(max_steps=10, precision=level).fit(module, batches(), **options)
    return flat(module)


@pytest.mark.parametrize("callback", [ModelCheckpoint, AsyncCheckpoint])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_tensors_of_a_class_that_torch_knows_are_saved_and_resumed(level, callback, tmp_path):
    _, path = saved(tmp_path, callback=callback, precision=level)
    assert torch.equal(at_ten(level=level), at_ten(level=level, ckpt_path=path))
    momenta = [state["momentum"] for state in states(path)]
    assert {type(one) for one in momenta} == {Codes}
    assert {one.codes.dtype for one in momenta} == {torch.int8}


@pytest.mark.parametrize("to", ["again.ckpt", "folder/"])
def test_an_export_keeps_them(to, tmp_path):
    _, path = saved(tmp_path)
    export(path, f"{tmp_path}/{to}")
    assert torch.equal(at_ten(), at_ten(ckpt_path=tmp_path / to.rstrip("/")))


def test_a_file_of_weights_has_none(tmp_path):
    """And an object in a state is no reason to refuse a run that saves no states."""
    module = Net(lambda parameters: WithState(parameters, lambda _: Told()))
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_weights_only=True)
    quiet_trainer(max_epochs=1, callbacks=[checkpoint], enable_checkpointing=True).fit(module, batches())
    assert "optimizer_states" not in torch.load(checkpoint.best_model_path, weights_only=True)


class Tagged(torch.Tensor):
    """A tensor of another class over memory of its own."""


def test_a_tensor_class_without_parts_is_saved_and_resumed(tmp_path):
    with torch.serialization.safe_globals([Tagged]):
        _, path = saved(tmp_path, lambda all_: WithState(all_, lambda one: one.clone().detach().as_subclass(Tagged)))
        kept = [state["kept"] for state in states(path)]
        assert {type(one) for one in kept} == {Tagged}
        trainer = quiet_trainer(max_steps=6)
        trainer.fit(Net(WithState), batches(), ckpt_path=path)
        assert torch.equal(next(iter(trainer.optimizers[0].state.values()))["kept"], kept[0])


def test_a_tensor_of_others_is_where_they_were_read():
    """A save on a GPU writes its device into the pickle of such a tensor, and its parts are read into host memory."""
    there = torch.Tensor._make_wrapper_subclass(Codes, (2,), dtype=torch.float32, device="cuda:0")
    there.codes, there.scale = torch.ones(2, dtype=torch.int8), torch.ones(())
    state = pack_objects({"momentum": there}, allowed_alone=True)
    unpack_objects(state, "file.ckpt", weights_only=None)
    assert type(state["momentum"]) is Codes
    assert state["momentum"].device == state["momentum"].codes.device == torch.device("cpu")


def test_lists_of_tensors_and_none_are_plain(tmp_path):
    make = lambda all_: WithState(all_, lambda one: [one.detach().clone(), None, (torch.zeros(2), 3)], at=3)  # noqa: E731
    _, path = saved(tmp_path, make)
    assert torch.equal(at_ten(make), at_ten(make, ckpt_path=path))


# -- a library that is not here ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import quantised
from fabricamp import Trainer, TrainingModule

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return quantised.Quantised(self.parameters())

trainer = Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Net(), [torch.ones(4, 8)] * 3)
trainer.save_checkpoint(sys.argv[1])
"""


class One(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return Quantised(self.parameters())


@pytest.fixture(scope="module")
def of_elsewhere(tmp_path_factory):
    """A file of a process that has a package which is not here."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "quantised.py").write_text((Path(__file__).parent / "quantised.py").read_text())
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}"}
    subprocess.run([sys.executable, "-c", SCRIPT, folder / "file.ckpt"], env=environment, check=True, timeout=300)
    return folder / "file.ckpt"


@pytest.mark.parametrize("weights_only", [None, False])
def test_a_missing_package_is_named_in_a_resume(of_elsewhere, weights_only):
    with pytest.raises(
        CheckpointObjectsError, match=r"quantised\.Codes.*of the package quantised, which is not installed"
    ):
        quiet_trainer(max_steps=6).fit(One(), [torch.ones(4, 8)] * 6, ckpt_path=of_elsewhere, weights_only=weights_only)


def test_all_else_of_the_file_loads_without_the_package(of_elsewhere, tmp_path):
    module = One.load_from_checkpoint(of_elsewhere)
    assert not torch.equal(module.net.weight, One().net.weight)
    export(of_elsewhere, f"{tmp_path}/weights.safetensors")
    export(of_elsewhere, f"{tmp_path}/again.ckpt")
    assert torch.equal(One.load_from_checkpoint(tmp_path / "again.ckpt").net.weight, module.net.weight)


# -- what no file holds by itself ------------------------------------------------------------------------------------------------


def refused(make, steps, match, **options):
    module = Net(make)
    with pytest.raises(CheckpointError, match=match):
        quiet_trainer(max_epochs=2, enable_checkpointing=True, **options).fit(module, batches())
    assert module.steps == steps


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_object_among_the_options_is_told_before_the_first_batch():
    refused(
        lambda all_: WithState(all_, option=Norm.SIGN),
        0,
        r"keeps a .*Norm \(.*param_groups.*'option'\].*add_safe_globals\(\[Norm\]\)",
    )


@pytest.mark.parametrize(
    ("value", "at", "steps", "match"),
    [
        (
            lambda _: collections.deque([1], maxlen=3),
            1,
            1,
            r"collections\.deque.*checkpoint_objects=True.*weights_only=False",
        ),
        (lambda _: collections.deque([1], maxlen=3), 3, 4, r"collections\.deque.*checkpoint_objects=True"),
        (lambda _: [torch.zeros(1), Told()], 1, 1, r"Told .*\['kept'\]\[1\].*add_safe_globals\(\[Told\]\)"),
        (lambda _: lambda: 1, 1, 1, r"cannot be pickled.*no option saves it"),
    ],
    ids=["deque", "later", "object", "function"],
)
def test_an_object_in_a_state_is_told_after_the_step_that_makes_it(value, at, steps, match):
    refused(lambda all_: WithState(all_, value, at), steps, match)


def test_the_words_of_the_refusals_are_true(tmp_path):
    """What they say is done, and the run is saved, and goes on bit for bit."""
    make = lambda all_: WithState(all_, lambda _: Told(), option=Norm.SIGN)  # noqa: E731
    with torch.serialization.safe_globals([Norm, Told]):
        _, path = saved(tmp_path / "allowed", make)
        assert torch.equal(at_ten(make), at_ten(make, ckpt_path=path))
    with_deque = lambda all_: WithState(all_, lambda _: collections.deque([torch.ones(2)], maxlen=3))  # noqa: E731
    _, path = saved(tmp_path / "objects", with_deque, checkpoint_objects=True)
    with pytest.raises(CheckpointObjectsError, match="weights_only=False"):
        at_ten(with_deque, ckpt_path=path)
    assert torch.equal(at_ten(with_deque), at_ten(with_deque, ckpt_path=path, weights_only=False))
    Net.load_from_checkpoint(path, make=with_deque)  # weights and all else need no such word
