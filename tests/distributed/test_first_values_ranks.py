"""First values of modules built on the meta device: equal numbers at any number of ranks, under every strategy."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, TrainingModule, seed_everything
from fabricamp.strategies import FSDP
from tests.distributed.ranks import run_ranks
from tests.shared import once, shared_folder
from tests.small import quiet_trainer
from tests.strategies.first_values import STRUCTURES, WORDS, RootFillsAll, Stack, block_of, on_meta, tensors

NOT_SHARDED = {"torch's layers", "root applies a function, then zeroes, half embedding"}
"""fsdp refuses parameters without a dimension, and two dtypes in one unit."""
SHARDED = [name for name in STRUCTURES if name not in NOT_SHARDED]
TRAINED = [name for name in SHARDED if name.startswith(("root", "outermost", "flags"))]
TOKENS = torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(1))


class Fitted(TrainingModule):
    """A network of the structure, on the meta device."""

    def __init__(self, structure, build=None):
        super().__init__()
        self.build = build or STRUCTURES[structure]

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = on_meta(self.build)

    def training_step(self, batch, batch_idx):
        scores = self.net(batch)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looks(Callback):
    """Keeps the full tensors that a run begins with, and the generators' states."""

    def on_fit_start(self, trainer, pl_module):
        self.values = {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
            for name, tensor in tensors(pl_module).items()
        }
        self.states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def begun(structure, strategy, *, build=None, steps=0, **options):
    """Returns the values that a fit begins with."""
    seed_everything(7, verbose=False)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    looks = Looks()
    devices = 1 if strategy == "single" else "auto"
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_steps=steps, callbacks=[looks], **options)
    trainer.fit(Fitted(structure, build), torch.utils.data.DataLoader(TOKENS, batch_size=2))
    assert looks.states == before
    return looks.values


def split(module, mesh):
    for block in module.net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded(structures=SHARDED):
    found = {name: begun(name, "fsdp") for name in structures}
    if int(os.environ["WORLD_SIZE"]) == 4:
        found["copies"] = begun(SHARDED[0], FSDP(replicate=2))
        found["split"] = begun("orthogonal, sparse", FSDP(parallelize=split, tensor_parallel=2))
        found["offload"] = begun(SHARDED[0], FSDP(offload=True))
    return found


def entropy(self):
    nn.init.normal_(self.up.weight)
    with torch.no_grad():
        self.down.weight.copy_(torch.from_numpy(np.random.default_rng().standard_normal(self.down.weight.shape)))


def on_two_ranks(folder):
    found = {"fsdp": sharded()}
    found["ddp"] = {name: begun(name, "ddp") for name in STRUCTURES}
    found["delayed"] = begun(SHARDED[0], "delayed_ddp")
    found["levels"] = {level: begun(SHARDED[0], "fsdp", precision=level) for level in ("O2", "O3", "O5")}
    # Each rank has a copy, whose values it has filled itself.
    found["different"] = begun(None, FSDP(replicate=2), build=lambda: Stack(block_of(init_weights=entropy)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(os.environ["RANK"]))  # each rank with a seed of its own
        looks = Looks()
        trainer = quiet_trainer(strategy=FSDP(replicate=2), devices="auto", max_steps=0, callbacks=[looks])
        trainer.fit(Fitted(SHARDED[0]), torch.utils.data.DataLoader(TOKENS, batch_size=2))
        found["own seeds"] = looks.values
    found["saved"] = {name: saved(name, folder / f"{number}.ckpt") for number, name in enumerate(TRAINED)}
    found["again"] = again()
    with pytest.raises(
        ConfigError, match=r"net\.bare of Fitted were built on the meta device, and no module gives them"
    ):
        begun(None, "fsdp", build=lambda: Stack(block_of(), bare=lambda: nn.Parameter(torch.ones(3))))
    return found


def saved(structure, path):
    """Returns the weights after four steps, and after two that go on from a checkpoint."""

    class SaveAt(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)

    def run(callbacks, ckpt_path=None):
        seed_everything(7, verbose=False)
        trainer = quiet_trainer(strategy="fsdp", devices="auto", max_steps=2, callbacks=callbacks)
        module = Fitted(structure)
        trainer.fit(module, torch.utils.data.DataLoader(TOKENS, batch_size=2), ckpt_path=ckpt_path)
        return tensors(module)

    return run([SaveAt()]), run([], ckpt_path=path)


def again():
    """A second fit with the module of a first one: rank 0 has its values, the others are on the meta device."""
    seed_everything(7, verbose=False)
    found = []
    module = Fitted(SHARDED[0])
    for strategy, steps in (("fsdp", 1), ("fsdp", 1), ("ddp", 1)):
        looks = Looks()
        trainer = quiet_trainer(strategy=strategy, devices="auto", max_steps=steps, callbacks=[looks])
        after = {name: tensor.detach().clone() for name, tensor in tensors(module).items()} if found else None
        trainer.fit(module, torch.utils.data.DataLoader(TOKENS, batch_size=2))
        found.append((after, looks.values))
    return found[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory, "first_values")


@pytest.fixture(scope="module")
def ranks(folder):
    return once(folder, lambda: run_ranks(on_two_ranks, 2, folder, backend=None))


def differing(values, others):
    assert values.keys() == others.keys()
    return [name for name, value in values.items() if not torch.equal(value, others[name])]


def test_two_ranks_begin_with_the_numbers_of_one_process(ranks):
    for name in STRUCTURES:
        alone = begun(name, "single")
        for rank in ranks:
            assert not differing(alone, rank["ddp"][name]), name
            if name in SHARDED:
                assert not differing(alone, rank["fsdp"][name]), name
    assert not differing(begun(SHARDED[0], "single"), ranks[1]["delayed"])


@pytest.mark.parametrize(("number", "structures"), [(1, SHARDED), (3, SHARDED[::2]), (4, SHARDED[1::2])])
def test_any_number_of_ranks_begins_with_the_same_numbers(ranks, number, structures):
    """Copies, layers that are split, and shards in host memory too."""
    for found in run_ranks(sharded, number, structures, backend=None):
        for name, values in found.items():
            expected = {"copies": SHARDED[0], "offload": SHARDED[0], "split": "orthogonal, sparse"}.get(name, name)
            assert not differing(ranks[0]["fsdp"][expected], values), name


def test_levels_begin_with_the_same_numbers_in_their_dtypes(ranks):
    expected = ranks[0]["fsdp"][SHARDED[0]]
    for level, values in ranks[1]["levels"].items():
        for name, value in values.items():
            assert torch.equal(value, expected[name].to(value.dtype)), (level, name)
    assert ranks[0]["levels"]["O3"]["net.head.weight"].dtype == torch.float16


def test_ranks_that_draw_differently_end_with_those_of_rank_0(ranks):
    """A method that takes numbers of its process, and a seed of its own on each rank."""
    one, other = (rank["different"] for rank in ranks)
    assert not differing(one, other)
    rows = one["net.blocks.1.down.weight"]
    assert rows.std() > 0.5
    assert not differing(*(rank["own seeds"] for rank in ranks))


def test_a_checkpoint_after_it_goes_on(ranks):
    for name, (straight, resumed) in ranks[0]["saved"].items():
        assert not differing(straight, resumed), name


def test_a_second_fit_keeps_the_values_of_rank_0(ranks):
    for rank in ranks:
        for before, after in zip(ranks[0]["again"], rank["again"], strict=True):
            assert not differing(before[0], after[1])


def test_a_net_of_one_unit_begins_with_the_same_numbers():
    values = run_ranks(lambda: begun(None, FSDP([nn.Embedding]), build=RootFillsAll), 2, backend=None)
    assert not differing(values[0], begun(None, "single", build=RootFillsAll))
