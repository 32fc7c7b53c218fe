"""fsdp over NCCL on two GPUs: one GPU's weights, kernels on local parts, exact resumes, no wait of the host in a step."""

from __future__ import annotations

import functools
import os
from itertools import product

import pytest
import torch

from fabricamp import seed_everything
from fabricamp.callbacks import AsyncCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.ops.flat_casts import FlatCast
from fabricamp.strategies import FSDP, fsdp, fsdp_collectives
from fabricamp.utilities.grads import grad_norm
from tests.distributed import test_fsdp_collectives as collectives
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import CELLS, Block, Cell, Net, fitted, flat, sharding, too_far
from tests.shared import once, shared_folder
from tests.small import loader, quiet_trainer

TOTAL = "grad_2.0_norm_total"

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.timeout(900),  # a worker waits for what another one computes
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

# Combinations that are interrupted within an accumulation, and some between two steps.
RESUMED = [cell for number, cell in enumerate(CELLS) if cell.accumulate > 1 or number % 4 == 0]
SPLIT = [Cell(level, "FusedAdam", 1, ("norm", 0.3), True, "one copy") for level in ("O0", "O1", "O5")]

on_gpus = functools.partial(fitted, accelerator="gpu")


def on_two_gpus(folder):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = {"straight": {}, "resumed": {}}
    for number, cell in enumerate(CELLS):
        path = folder / f"{number}.ckpt"
        found["straight"][cell] = on_gpus(cell, sharding(cell), 4, save=path)
        if cell in RESUMED:
            found["resumed"][cell] = on_gpus(cell, sharding(cell), 4, ckpt_path=path)
    found["exchanged"] = exchanged_each_time(folder / "exchanged.ckpt")
    found["places"] = places()
    found["beside"] = beside(folder / "beside")
    found["waits"] = waits()
    return found


def split_layers():
    """Returns the results of runs with layers split over both GPUs."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return {cell: on_gpus(cell, tensor_parallel.sharding(cell), 8, net=tensor_parallel.Net) for cell in SPLIT}


def exchanged_each_time(path):
    """Returns the weights of an uninterrupted and a resumed run in which full gradients do not fit into memory."""
    chosen, fsdp.fits = fsdp.fits, lambda *_: False
    cell = next(one for one in CELLS if one[:3] == ("O1", "FusedAdam", 3))
    found = on_gpus(cell, sharding(cell), 4, save=path), on_gpus(cell, sharding(cell), 4, ckpt_path=path)
    fsdp.fits = chosen
    return found


def places():
    """Returns the devices of shards and gradients, the module's device, a gradient norm and full values, under offload."""

    class Looking(Net):
        def on_before_optimizer_step(self, optimizer):
            parts = [*self.parameters(), *(one.grad for one in self.parameters())]
            self.seen = (
                {one.to_local().device.type for one in parts},
                self.device.type,
                float(grad_norm(self, 2)[TOTAL]),
                [one.full_tensor().clone() for one in parts],
            )

    seed_everything(5, verbose=False)
    module = Looking("FusedAdam")
    trainer = quiet_trainer(accelerator="gpu", devices="auto", strategy=FSDP([Block], offload=True), max_steps=2)
    trainer.fit(module, loader(32, 4))
    return module.seen


def beside(folder):
    """Returns the weights after a run with background saves, and after a run that resumes from its second step."""

    def run(ckpt_path=None):
        seed_everything(5, verbose=False)
        module = Net("FusedAdam")
        saves = AsyncCheckpoint(folder, every="2 steps", save_top_k=-1, monitor="step")
        options = {"max_steps": 6, "enable_checkpointing": True, "callbacks": [saves], "precision": "O5"}
        trainer = quiet_trainer(accelerator="gpu", devices="auto", strategy=FSDP([Block]), **options)
        trainer.fit(module, loader(64, 4, shuffle=True), ckpt_path=ckpt_path)
        return None if trainer.global_rank else flat(module)

    return run(), run(folder / "epoch=0-step=2.ckpt")


def waits():
    """Runs steps in which torch raises at a wait of the host, after some that may wait."""

    class Watched(Net):
        def on_train_batch_start(self, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if batch_idx >= 4 else "default")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("default")

    seed_everything(5, verbose=False)
    options = {"gradient_clip_val": 0.5, "precision": "O1", "max_epochs": 1, "log_every_n_steps": 1000}
    options["cuda_graph"] = False  # before the first capture ranks agree in each step, and wait for it
    trainer = quiet_trainer(accelerator="gpu", devices="auto", strategy=FSDP([Block]), **options)
    trainer.fit(Watched("FusedAdam"), loader(64, 4))
    return trainer.global_step


def copies():
    """Compares runs whose shards and gradients are cast as they are copied with runs that leave the copies to torch."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    fsdp_collectives._FEWEST = 32
    launches = []
    real, sums = FlatCast.__call__, fsdp_collectives.rank_sums
    FlatCast.__call__ = lambda *arguments: launches.append("cast") or real(*arguments)
    fsdp_collectives.rank_sums = lambda *arguments, **options: launches.append("sums") or sums(*arguments, **options)
    for precision, reshard in product(("O2", "O4", "O5"), (True, False)):
        options = {"accelerator": "gpu", "accumulate_grad_batches": 2 if precision == "O4" else 1}
        units = [collectives.Block, collectives.EvenBlock]
        launches.clear()
        own = collectives.trained(precision, strategy=FSDP(units, reshard_after_forward=reshard), **options)
        # Gradients that were accumulated are in fp32, and torch scatters them.
        assert set(launches) == ({"cast"} if precision == "O4" else {"cast", "sums"})
        launches.clear()
        with collectives.torchs_copies():
            torchs = collectives.trained(precision, strategy=FSDP(units, reshard_after_forward=reshard), **options)
        assert not launches
        assert torch.equal(torch.stack(own.losses), torch.stack(torchs.losses))
        if int(os.environ["RANK"]) == 0:
            assert torch.equal(flat(own), flat(torchs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory, "fsdp-nccl")


@pytest.fixture(scope="module")
def ranks(folder):
    run = functools.partial(run_ranks, on_two_gpus, 2, folder, backend=None, start_method="spawn", timeout=400.0)
    return once(folder, run)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_two_gpus_train_what_one_trains_on_the_joined_batch(cell, ranks):
    assert too_far(cell, ranks[0]["straight"][cell], accelerator="gpu", limit=1e-4) is None


@pytest.mark.parametrize("cell", RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_the_straight_one(cell, ranks):
    assert torch.equal(ranks[0]["straight"][cell][0], ranks[0]["resumed"][cell][0])


def test_a_run_that_exchanges_behind_each_micro_batch_is_resumed_to_the_same_bits(ranks):
    (straight, _), (resumed, _) = ranks[0]["exchanged"]
    assert torch.equal(straight, resumed)


def test_a_folder_of_two_gpus_goes_on_with_one_and_is_read_without(ranks, folder):
    gone_on, _ = on_gpus(CELLS[0], "single", 8, ckpt_path=folder / "0.ckpt")
    assert (gone_on - ranks[0]["straight"][CELLS[0]][0]).abs().max() < 1e-4
    assert read_checkpoint(folder / "0.ckpt")["state_dict"]["blocks.0.up.weight"].device.type == "cpu"


def test_parts_that_are_offloaded_are_in_host_memory(ranks):
    (devices, device, norm, values), (_, _, other, other_values) = (one["places"] for one in ranks)
    assert (devices, device) == ({"cpu"}, "cuda")
    assert norm == other > 0
    assert {value.device.type for value in values} == {"cpu"}
    assert all(map(torch.equal, values, other_values))


def test_a_folder_that_was_written_beside_training_goes_on_bit_for_bit(ranks):
    straight, resumed = ranks[0]["beside"]
    assert torch.equal(straight, resumed)


@pytest.fixture(scope="module")
def split_ranks():
    return run_ranks(split_layers, 2, backend=None, start_method="spawn", timeout=120.0)


@pytest.mark.parametrize("cell", SPLIT, ids=str)
def test_layers_that_are_split_train_what_whole_ones_train(cell, split_ranks):
    found = split_ranks[0][cell]
    assert too_far(cell, found, net=tensor_parallel.Net, accelerator="gpu", limit=1e-4) is None


def test_the_host_waits_for_nothing_in_a_step(ranks):
    assert [one["waits"] for one in ranks] == [8, 8]


def test_the_bits_are_those_of_torchs_copies():
    run_ranks(copies, 2, backend=None, start_method="spawn")
