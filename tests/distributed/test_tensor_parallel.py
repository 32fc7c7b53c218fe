"""fsdp with layers split over two ranks: equals one process on the joined batch, resumes exactly, and refuses what cannot work."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from fabricamp import Callback, ConfigError
from fabricamp.strategies import FSDP
from fabricamp.strategies.tensor_parallel import split_layers
from fabricamp.utilities.grads import grad_norm
from tests.distributed import sharded
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import Cell, alone, too_far
from tests.shared import once, shared_folder
from tests.small import loader

CELLS = [
    Cell("O0", "sgd", 1, ("norm", 0.3), True, "one copy"),
    Cell("O0", "FusedAdam", 3, ("norm", 0.3), True, "one copy"),
    Cell("O1", "FusedAdam", 1, ("value", 0.02), True, "one copy"),
    Cell("O4", "adamw", 3, ("norm", 0.3), True, "one copy"),
    Cell("O2", "FusedAdam", 1, ("norm", 0.3), True, "two copies"),
]
LOOKED_AT = CELLS[0]
RESUMED = [CELLS[1], CELLS[4]]  # the first is interrupted within an accumulation


class Block(torch.nn.Module):
    """Has two layers that are split into 17 rows each, and unsplit ones: a norm, and a scale with a gradient that counts once."""

    def __init__(self):
        super().__init__()
        self.heads = 2
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 34)
        self.down = torch.nn.Linear(34, 16)
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        inner = self.up(self.norm(x)).view(len(x), self.heads, 17)  # this rank's number of heads
        return x + self.scale * self.down(F.gelu(inner).flatten(1))


class Net(sharded.Net):
    """Records its samples; the numbers of heads are restored after a run."""

    block = Block

    def training_step(self, batch, batch_idx):
        self.log("seen", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return super().training_step(batch, batch_idx)


def split(module, mesh):
    for block in module.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.heads //= mesh.size()


class Draws(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.rand(())


class Norms(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 1:
            pl_module.norms = {name: float(norm) for name, norm in grad_norm(pl_module, 2).items()}


fitted = functools.partial(sharded.fitted, net=Net)


def sharding(cell):
    return FSDP([Block], replicate=2 if cell.units == "two copies" else 1, parallelize=split, tensor_parallel=2)


def on_four_ranks(folder):
    found = {"straight": {}, "resumed": {}}
    for number, cell in enumerate(CELLS):
        path = folder / f"{number}.ckpt"
        if cell in RESUMED:
            found["straight"][cell] = fitted(cell, sharding(cell), 4, save=path)
            found["resumed"][cell] = fitted(cell, sharding(cell), 4, ckpt_path=path)
        elif cell == LOOKED_AT:
            found["straight"][cell], found["norms"], found["predictions"] = looked_at(sharding(cell), 4)
        else:
            found["straight"][cell] = fitted(cell, sharding(cell), 4)
    found["from a file"] = fitted(CELLS[1], sharding(CELLS[1]), 4, ckpt_path=folder / "single.ckpt")
    found["drawn"] = float(torch.rand(()))
    found["whole layers"] = fitted(CELLS[1], "fsdp", 2, save=folder / "whole.ckpt", at=6, ckpt_path=folder / "1.ckpt")
    found["from whole layers"] = fitted(CELLS[1], sharding(CELLS[1]), 4, ckpt_path=folder / "whole.ckpt")
    return found


def looked_at(strategy, batch_size):
    """Returns the result of a fit, gradient norms in its second step, and predictions after it."""
    found = []

    def look(trainer, module):
        assert [one.heads for one in module.blocks] == [2, 2, 2]
        found.extend((module.norms, torch.cat(trainer.predict(module, loader(16, batch_size))).double()))

    return fitted(LOOKED_AT, strategy, batch_size, callbacks=[Norms()], then=look), *found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory, "tensor")


@pytest.fixture(scope="module")
def ranks(folder):
    def run():
        fitted(CELLS[1], "single", 8, callbacks=[Draws()], save=folder / "single.ckpt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_ranks(on_four_ranks, 4, folder, timeout=200.0)

    return once(folder, run)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_split_layers_train_what_one_process_trains_on_the_joined_batch(cell, ranks):
    found = ranks[0]["straight"][cell]
    assert too_far(cell, found, net=Net, limit=2e-6) is None
    assert found[1]["seen"] == alone(cell, Net)[1]["seen"] == 32


@pytest.mark.parametrize("cell", RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_the_straight_one(cell, ranks):
    assert torch.equal(ranks[0]["straight"][cell][0], ranks[0]["resumed"][cell][0])


def test_files_and_folders_go_on_with_split_layers_and_without(ranks, folder):
    """A sample counts once in logged values, however many ranks compute it; ranks that compute together draw the same numbers."""
    straight, _ = alone(CELLS[1], Net)
    runs = {name: ranks[0][name] for name in ("from a file", "whole layers", "from whole layers")}
    runs["one process"] = fitted(CELLS[1], "single", 8, ckpt_path=folder / "1.ckpt")
    for name, (gone_on, logged) in runs.items():
        assert (gone_on - straight).abs().max() < 1e-6, name
        assert logged["seen"] == 32, name
    assert ranks[0]["drawn"] == ranks[1]["drawn"]


def test_norms_and_predictions_are_those_of_whole_layers(ranks):
    _, norms, predictions = looked_at("single", 8)
    for one in ranks:
        assert one["norms"] == pytest.approx(norms, rel=1e-4)
        assert torch.allclose(one["predictions"], predictions, atol=1e-5)


class Odd(Block):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 33)


@pytest.mark.parametrize(
    ("parallelize", "words"),
    [
        (lambda module, mesh: None, "has split no parameter of ModuleDict"),
        (
            lambda module, mesh: parallelize_module(module["odd"], mesh, {"up": ColwiseParallel()}),
            r"odd\.up\.weight \(33, 16\)",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(parallelize, words):
    """Two ranks in torch's fake process group, which exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ConfigError, match=words):
            split_layers(torch.nn.ModuleDict({"odd": Odd()}), mesh, parallelize)
    finally:
        dist.destroy_process_group()
