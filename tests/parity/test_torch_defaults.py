"""torch.set_default_dtype and torch.set_default_device belong to the user: fabricamp's tensors do not follow them.

The default device "meta" replaces "cuda" on machines without a GPU: tensors that follow it have no values.
"""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fabricamp import ops
from fabricamp.apex import amp
from fabricamp.nn import FusedLayerNorm, FusedRMSNorm, MixedFusedRMSNorm, SoftmaxCrossEntropyLoss, SyncBatchNorm
from fabricamp.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from tests.allocations import NamedAllocations
from tests.cuda_on_cpu.compiler import kernel_device
from tests.distributed.ranks import run_ranks
from tests.pairs import pairs
from tests.whole_run import default_dtype, differences, flattened, in_a_list, in_order, shuffled, whole_run

__all__ = ["kernel_device"]

DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5", "bf16-true"]


def changed_by(defaults, run, **options):
    """Returns the differences between ``run`` under torch's own defaults and under each of ``defaults``."""
    expected = run(contextlib.nullcontext(), **options)
    found = {name: differences(expected, run(DEFAULTS[name](), **options)) for name in defaults}
    return {name: names for name, names in found.items() if names}


def in_a_new_folder(defaults, **options):
    with tempfile.TemporaryDirectory() as folder:
        return whole_run(Path(folder), defaults, **options)


@pytest.mark.parametrize("level", LEVELS)
def test_whole_runs(level):
    assert changed_by(DEFAULTS, in_a_new_folder, batches_of=in_a_list, precision=level, fused=level != "O4") == {}


def test_a_shuffled_run():
    # Under "meta" torch's own DataLoader cannot draw an order.
    assert changed_by(["float64", "bfloat16"], in_a_new_folder, batches_of=shuffled, precision="O2") == {}


CROSSED = pairs(["ddp", "delayed_ddp"], ["O0", "O2"], DEFAULTS)


def on_two_ranks(strategy, folder):
    found = []
    for level, more in (("O0", {"fused": False}), ("O2", {"sync_batchnorm": True})):
        folders = iter([folder / f"{level}{index}" for index in range(1 + len(DEFAULTS))])

        def run(defaults, folders=folders, **options):
            return whole_run(next(folders), defaults, **options)

        names = [name for *place, name in CROSSED if place == [strategy, level]]
        found.append(changed_by(names, run, batches_of=in_a_list, strategy=strategy, precision=level, **more))
    return [one for one in found if one]


@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp"])
def test_whole_runs_on_two_ranks(strategy, tmp_path):
    assert run_ranks(on_two_ranks, 2, strategy, tmp_path, timeout=200.0) == [[], []]


OPTIMIZERS = {
    "Adam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: FusedSGD(p, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "LAMB": lambda p: FusedLAMB(p, lr=0.01),
    "MixedPrecisionLamb": lambda p: FusedMixedPrecisionLamb(p, lr=0.01),
    "NovoGrad": lambda p: FusedNovoGrad(p, lr=0.01),
    "Adagrad": lambda p: FusedAdagrad(p, lr=0.01),
    "Lion": lambda p: FusedLion(p, lr=0.001, weight_decay=0.1),
    "LARC": lambda p: LARC(FusedSGD(p, lr=0.01, momentum=0.9)),
}


def layers(device):
    """Returns a model of our layers and losses, its input and its targets."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norms = SyncBatchNorm(16), FusedLayerNorm(16), FusedRMSNorm(16), MixedFusedRMSNorm(16)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), *norms, torch.nn.Linear(16, 5)).to(device)
    x = torch.randn(6, 8, generator=generator).to(device)
    return model, x, torch.randint(0, 5, (6,), generator=generator).to(device)


def trained(defaults, name, device):
    """Returns weights, state and losses of a few steps; loads the state with ``load_state_dict`` once in between."""
    model, x, target = layers(device)
    loss_of, positives = SoftmaxCrossEntropyLoss(), torch.ones(1, device=device)
    losses = []
    with defaults, NamedAllocations():
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            output = model(x)
            focal = ops.focal_loss(output, target, positives, 5, 0.25, 2.0, 0.1)
            loss = loss_of(output, target).mean() + focal + ops.fused_cross_entropy(output, target)
            loss.backward()
            losses.append(loss.detach())
            losses.append(ops.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        state = optimizer.state_dict()
    return flattened({"weights": model.state_dict(), "losses": losses, "state": state["state"]})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_norms_and_losses(name):
    assert changed_by(DEFAULTS, trained, name=name, device=torch.device("cpu")) == {}


@pytest.mark.parametrize("kernel_device", ["forward"], indirect=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_on_the_kernels(name, kernel_device):
    assert changed_by(DEFAULTS, trained, name=name, device=kernel_device) == {}


def with_amp(defaults, level):
    model, x, target = layers("cpu")
    with defaults, NamedAllocations():
        optimizer = FusedAdam(model.parameters(), lr=0.01, eps=1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(F.cross_entropy(model(x).float(), target), optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
            optimizer.step()
        state = amp.state_dict()
        amp.shutdown()
    return flattened({"weights": model.state_dict(), "state": optimizer.state_dict()["state"], "amp": state})


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apexs_amp(level):
    assert changed_by(DEFAULTS, with_amp, level=level) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("level", LEVELS)
def test_a_default_device_cuda(level):
    # torch's DataLoader draws its workers' seeds from the default device's generator; on a GPU dropout uses the same generator.
    for batches_of, dropout in ((in_order, 0.0), (in_a_list, 0.1)):
        options = {"precision": level, "accelerator": "gpu", "devices": 1, "batches_of": batches_of, "dropout": dropout}
        expected = in_a_new_folder(contextlib.nullcontext(), **options)
        found = in_a_new_folder(torch.device("cuda"), **options)
        assert [name for name in differences(expected, found) if not name.startswith(".rng")] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_under_a_default_device_cuda(name):
    expected = trained(contextlib.nullcontext(), name, torch.device("cuda"))
    assert differences(expected, trained(torch.device("cuda"), name, torch.device("cuda"))) == []
