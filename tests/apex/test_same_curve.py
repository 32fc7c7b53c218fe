"""A script that uses apex for amp, DDP, SyncBN and FusedAdam has the loss curve of plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fabricamp.apex
from tests.apex.conftest import kept
from tests.apex.field import import_what_scripts_do, losses, run_script
from tests.distributed.ranks import run_ranks

BOUNDS = {"O0": 1e-5, "O1": 0.02, "O2": 0.02}


@pytest.fixture(scope="module", autouse=True)
def installed():
    with kept():
        fabricamp.apex.install()
        import_what_scripts_do()
        yield


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    images, labels = torch.randn(400, 3, 8, 8), torch.randint(4, (400,))
    images += labels.view(-1, 1, 1, 1) * 0.5
    return model, images, labels


def train(model, images, labels, part=slice(None)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    curve = []
    for step in range(50):
        own = torch.arange(16 * step, 16 * step + 16)[part] % 400
        loss = nn.functional.cross_entropy(model(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def deviation(printed, twin):
    """Returns the largest relative difference, over the steps, between the mean over ranks and the twin."""
    curves = [losses(text) for (text,) in printed]
    means = [sum(step) / len(step) for step in zip(*curves, strict=True)]
    assert len(means) == len(twin) == 50
    assert twin[-1] < 0.8 * twin[0]
    return max(abs(one / other - 1) for one, other in zip(means, twin, strict=True))


def arguments(level):
    # None of these gradients overflows at this scale: a skipped step would change the curve.
    return ("--opt_level", level, *([] if level == "O0" else ["--loss-scale", "1024"]))


@pytest.mark.parametrize("level", BOUNDS)
def test_two_ranks_have_the_curve_of_one_with_both_their_batches(tmp_path, level):
    printed = run_script("whole_curve", tmp_path, arguments(level), ranks=2)
    assert deviation(printed, train(*build())) < BOUNDS[level]


def _plain_torch():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.backends.cudnn.allow_tf32 = False
    model, images, labels = build()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    half = 16 // dist.get_world_size()
    return train(model, images.cuda(), labels.cuda(), slice(rank * half, rank * half + half))


def on_gpus(folder, ranks):
    curves = run_ranks(_plain_torch, ranks, backend="nccl", start_method="spawn")
    twin = [sum(step) / len(step) for step in zip(*curves, strict=True)]
    levels = list(BOUNDS)
    printed = run_script("whole_curve", folder, *map(arguments, levels), gpu=True, ranks=ranks)
    for number, level in enumerate(levels):
        found = deviation([[of_rank[number]] for of_rank in printed], twin)
        assert found < BOUNDS[level], level


@pytest.mark.gpu
def test_one_gpu_has_the_curve_of_plain_torch(tmp_path):
    on_gpus(tmp_path, 1)


@pytest.mark.gpu2
def test_two_gpus_have_the_curve_of_plain_torch(tmp_path):
    on_gpus(tmp_path, 2)
