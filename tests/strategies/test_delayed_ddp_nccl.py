"""delayed_ddp over NCCL on two GPUs: the weights of ddp, no race between streams, no wait of the host."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, TrainingModule
from fabricamp.gradients.memory import GradientMemory
from fabricamp.optimizers import FusedAdam
from fabricamp.strategies import DDP, DelayedDDP, Environment
from fabricamp.strategies.overlapped_allreduce import Lane
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

WARM = 8
STEPS = 30
MODES = {
    "delayed": {},
    "overlapped": {"message_size": 100_000, "prof": True},
    "streams": {"message_size": 1, "num_allreduce_streams": 4},
}


def own_device():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def join():
    device = own_device()
    dist.init_process_group("nccl", device_id=device)
    return device


class Deep(nn.Module):
    """Layers of many sizes, so single-gradient messages are sent while later gradients are computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        widths = [64, 512, 96, 1024, 33, 700, 128, 64]
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in itertools.pairwise(widths))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.requires_grad:
                # Delays the device, so a message that is sent too early has wrong values.
                x.register_hook(_slow)
        return self.norm(x)


def _slow(gradient):
    torch.cuda._sleep(200_000)


class Net(TrainingModule):
    """``extra`` takes part on one rank in every second step, ``never`` takes no part."""

    def __init__(self, fused, sometimes):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
        self.extra, self.never = nn.Linear(3, 3), nn.Linear(2, 2)
        self.fused, self.sometimes = fused, sometimes

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        if self.sometimes and (batch_idx + self.global_rank) % 2:
            scores = self.extra(scores)
        return nn.functional.cross_entropy(scores.float(), y)

    def configure_optimizers(self):
        if self.fused:
            return FusedAdam(self.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
        trained = [*self.net.parameters(), *(self.extra.parameters() if self.sometimes else ())]
        return torch.optim.AdamW(trained, lr=0.01, eps=1e-3, weight_decay=0.1, fused=True)


class ErrorOnWait(Callback):
    """Makes torch raise at every synchronising call in steps between flushes."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == WARM:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == WARM + STEPS - 2:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, module, exception):
        torch.cuda.set_sync_debug_mode("default")


def fitted(strategy, level, fused, sometimes=False, accumulate=1, callbacks=()):
    module = Net(fused, sometimes)
    trainer = quiet_trainer(
        accelerator="gpu",
        devices="auto",
        strategy=strategy,
        precision=level,
        max_steps=WARM + STEPS,
        max_epochs=-1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=10_000,
        callbacks=list(callbacks),
        cuda_graph=False,  # before a first capture the ranks agree, and wait for each other
    )
    trainer.fit(module, batches(accumulate))
    assert trainer.global_step == WARM + STEPS
    return torch.cat([one.detach().double().flatten().cpu() for one in module.parameters()])


def batches(accumulate):
    count = (WARM + STEPS) * accumulate * 8
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4, pin_memory=True)


def trainers():
    join()
    found = {}
    for level, fused in itertools.product(["O0", "O1", "O2", "O5"], [True, False]):
        if level in ("O0", "O2") or fused:
            # ddp refuses parameters that no backward reaches, unless this option is set.
            found[level, fused, "ddp"] = fitted(DDP(find_unused_parameters=True), level, fused)
            for name, options in MODES.items():
                found[level, fused, name] = fitted(DelayedDDP(**options), level, fused, callbacks=[ErrorOnWait()])
    for level in ("O0", "O2"):
        for name, options in MODES.items():
            strategy = DelayedDDP(**options)
            found[level, "sometimes", name] = fitted(strategy, level, True, sometimes=True, callbacks=[ErrorOnWait()])
        found[level, "sums", "ddp"] = fitted(DDP(find_unused_parameters=True), level, False, accumulate=2)
        found[level, "sums", "delayed"] = fitted(DelayedDDP(), level, False, accumulate=2, callbacks=[ErrorOnWait()])
    dist.destroy_process_group()
    return found


def test_the_trainer_trains_what_ddp_trains_without_a_wait():
    first, second = run_ranks(trainers, 2, backend=None, start_method="spawn", timeout=280)
    for key, weights in first.items():
        assert torch.isfinite(weights).all(), key
        assert torch.equal(weights, second[key]), key
        level, kind, _ = key
        reference = first[level, kind, "delayed" if kind == "sometimes" else "ddp"]
        apart = (weights - reference).abs().max()
        assert apart < (1e-4 if level == "O0" else 3e-2), (key, apart)


def strategy_alone():
    """Messages of one gradient each on four streams give the bits of the delayed mode, step by step."""
    device = own_device()
    found = {}
    for name, options in MODES.items():
        strategy = DelayedDDP(timeout=60, **options)
        rank = int(os.environ["RANK"])
        strategy.setup_environment(Environment(rank=rank, local_rank=rank, world_size=2), device)
        module = Deep().to(device)
        parameters = list(module.parameters())
        step = strategy.wrap_module(module, lambda batch, module=module: module(batch).square().mean(), automatic=True)
        torch.manual_seed(rank)
        sums = []
        for _ in range(STEPS):
            for parameter in parameters:
                parameter.grad = None
            step(torch.randn(32, 64, device=device)).backward()
            gradients = strategy.reduce_gradients(GradientMemory(parameters))
            sums.append(torch.cat([one.flatten() for one in gradients.tensors]))
        found[name] = torch.stack(sums).cpu()
        strategy.teardown()
    return [torch.equal(found["delayed"], found[name]) for name in MODES]


def test_no_race_between_streams():
    assert run_ranks(strategy_alone, 2, backend=None, start_method="spawn", timeout=120) == [[True] * 3] * 2


class Sent:
    """Stands for flat gradients: copies what it is given, and records the stream on which it does so."""

    def send(self, message, gradients, group, *, wait):
        assert wait
        self.stream = torch.cuda.current_stream()
        self.copy = gradients[0].clone()


def test_a_lane_restores_stream_and_device():
    """A module may be on another device than the current one, and its backward on a stream of its own."""
    torch.cuda.set_device(0)
    side = torch.cuda.Stream(1)
    backward = torch.cuda.Stream(1)
    here = torch.cuda.current_stream(0)
    there = torch.cuda.current_stream(1)
    lane = Lane(None, side)
    sent = Sent()
    for index in range(3):
        gradient = torch.zeros(1 << 20, device="cuda:1")
        backward.wait_stream(there)
        with torch.cuda.device(1), torch.cuda.stream(backward):
            torch.cuda._sleep(20_000_000)
            gradient.fill_(index + 1)
            torch.cuda.set_device(0)
            lane.send(sent, None, [gradient])
            # Here, because the contexts around it restore them too.
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream(0) == here
            assert torch.cuda.current_stream(1) == backward
            lane.wait()
            total = sent.copy.sum()
        assert sent.stream == side
        backward.synchronize()  # item() waits for the current stream alone
        assert total.item() == (index + 1) * (1 << 20)
