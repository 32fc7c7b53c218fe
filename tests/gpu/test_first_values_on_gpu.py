"""First values of modules built on the meta device, on GPUs: unit by unit as at once, on any of them, and sharded over two."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.test_first_values_ranks import SHARDED, begun, differing
from tests.strategies.first_values import STRUCTURES, by_units, tensors, whole

pytestmark = pytest.mark.gpu

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
OF_THE_HOST = {"generators of its own", "one generator for all units"}
"""Structures whose generators are the host's, which a tensor on a GPU refuses."""
ON_GPUS = [name for name in STRUCTURES if name not in OF_THE_HOST]


@pytest.mark.parametrize("structure", ON_GPUS)
def test_units_one_by_one_get_what_the_whole_module_gets(structure):
    together, left = whole(STRUCTURES[structure], device="cuda:0")
    torch.rand(3, device="cuda:0")
    apart, left_apart = by_units(STRUCTURES[structure], device="cuda:0")
    assert left == left_apart == []
    found = tensors(apart)
    assert not [name for name, value in tensors(together).items() if not torch.equal(value, found[name])]
    assert all(value.device == torch.device("cuda:0") for value in found.values())
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda:0")
    before = torch.cuda.get_rng_state(0).tolist()
    by_units(STRUCTURES[structure], device="cuda:0")
    assert torch.cuda.get_rng_state(0).tolist() == before


@NEEDS_TWO
@pytest.mark.gpu2
@pytest.mark.parametrize("structure", ON_GPUS)
def test_each_gpu_gives_the_same_numbers(structure):
    one, other = (tensors(whole(STRUCTURES[structure], device=f"cuda:{index}")[0]) for index in (0, 1))
    assert not [name for name, value in one.items() if not torch.equal(value.cpu(), other[name].cpu())]


def on_two_gpus():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    sharded = [name for name in SHARDED if name in ON_GPUS]
    found = {name: begun(name, "fsdp", accelerator="gpu") for name in sharded}
    found["ddp"] = begun(SHARDED[0], "ddp", accelerator="gpu")
    return {name: {key: value.cpu() for key, value in values.items()} for name, values in found.items()}


@NEEDS_TWO
@pytest.mark.gpu2
@pytest.mark.timeout(900)
def test_two_gpus_begin_with_the_numbers_of_one():
    for found in run_ranks(on_two_gpus, 2, timeout=800, backend=None, start_method="spawn"):
        for name, values in found.items():
            alone = begun(SHARDED[0] if name == "ddp" else name, "single", accelerator="gpu")
            assert not differing({key: value.cpu() for key, value in alone.items()}, values), name
