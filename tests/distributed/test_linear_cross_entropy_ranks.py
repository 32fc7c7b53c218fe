"""A loss without stored logits on two ranks: equal to one process with stored logits; fsdp gathers a head that is called."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fabricamp.errors import ConfigError
from fabricamp.nn import FusedLinearCrossEntropy
from fabricamp.strategies import FSDP
from tests.distributed.ranks import run_ranks
from tests.shared import once, shared_folder
from tests.unstored_logits import FAR, Block, assert_near, fitted, small_chunks

ON_RANKS = [
    ("ddp", "O0", "head", False),
    ("ddp", "O5", "function", True),
    ("delayed_ddp", "O1", "head", False),
    ("delayed_ddp", "O2", "function", True),
    ("fsdp", "O0", "function", False),  # the head is in the rest, which is gathered for the whole step
    ("fsdp", "O0", "head", True),
    ("fsdp", "O5", "head", False),
    ("head is a unit", "O0", "head", False),
    ("head is a unit", "O1", "head", False),
    ("head is a unit", "O2", "head", False),
    ("head is a unit", "O5", "head", False),
]


SCALES = {"O1": 1024.0, "O2": 1024.0}  # a dynamic one skips steps of its own at first


def strategy_of(name):
    units = {"fsdp": [Block], "head is a unit": [Block, FusedLinearCrossEntropy]}
    return FSDP(units[name]) if name in units else name


def cut(module, mesh):
    parallelize_module(module, mesh, {"head": ColwiseParallel()})


def message_of(strategy, way):
    try:
        fitted(way, strategy=strategy, devices="auto", batch_size=4)
    except ConfigError as error:
        return str(error)
    return "no error"


def on_two_ranks():
    small_chunks()
    found = {
        cell: fitted(
            cell[2],
            cell[1],
            strategy=strategy_of(cell[0]),
            devices="auto",
            batch_size=4,
            tied=cell[3],
            loss_scale=SCALES.get(cell[1]),
        )
        for cell in ON_RANKS
    }
    found["accumulated"] = fitted(
        "head", strategy=strategy_of("head is a unit"), devices="auto", batch_size=2, accumulate_grad_batches=2
    )
    found["not gathered"] = message_of(strategy_of("head is a unit"), "function")
    vocabulary = FSDP([Block], parallelize=cut, tensor_parallel=2)
    found["vocabulary"] = message_of(vocabulary, "head")
    found["vocabulary, by hand"] = by_hand()
    return found


def by_hand():
    """Returns what a head says that a script has split, called as torch's plan calls it: with the first argument alone."""
    mesh = init_device_mesh("cpu", (2,))
    head = parallelize_module(FusedLinearCrossEntropy(4, 6), mesh, ColwiseParallel())
    found = []
    for given in ({"target": torch.zeros(3, dtype=torch.int64)}, {}):
        try:
            head(torch.zeros(3, 4), **given)
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return once(shared_folder(tmp_path_factory, "linear_cross_entropy"), lambda: run_ranks(on_two_ranks, 2))


@pytest.mark.parametrize("cell", ON_RANKS, ids=str)
def test_ranks_train_as_one_process_on_the_joined_batch(cell, ranks):
    _, level, _, tied = cell
    expected = fitted("stored", level, batch_size=8, tied=tied, loss_scale=SCALES.get(level))
    assert_near((ranks[0][cell][0], {}), (expected[0], {}), 2 * FAR[level])


def test_a_head_that_fsdp_gathers_accumulates(ranks):
    expected = fitted("stored", batch_size=4, accumulate_grad_batches=2)
    assert_near((ranks[0]["accumulated"][0], {}), (expected[0], {}), 2e-6)


def test_weights_that_are_not_gathered_are_refused_by_name(ranks):
    for found in ranks:
        assert "weight is sharded over ranks" in found["not gathered"]
        assert "head = FusedLinearCrossEntropy.of(head), then head(hidden, target)" in found["not gathered"]


def test_a_vocabulary_parallel_head_is_refused_by_name(ranks):
    for found in ranks:
        assert (
            "FSDP(parallelize=...) splits head, a FusedLinearCrossEntropy, and a vocabulary-parallel"
            in found["vocabulary"]
        )
        assert len(found["vocabulary, by hand"]) == 2
        for message in found["vocabulary, by hand"]:
            assert "weight is sharded over ranks (S(0))" in message
            assert "A vocabulary-parallel head is not offered" in message
