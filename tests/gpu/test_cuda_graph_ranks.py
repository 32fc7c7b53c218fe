"""Steps of two ranks as CUDA graphs: the bits of eager ones, with the exchange of gradients and of statistics in the graph."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabricamp import Callback, CudaGraph, OptLevel, TrainingModule
from fabricamp.callbacks import GradientAccumulationScheduler
from fabricamp.engine.graph import comparison
from fabricamp.engine.graph.comparison import compare
from fabricamp.optimizers import FusedAdam, FusedSGD
from fabricamp.strategies import DDP, DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.inside import captured_steps, graph_update
from tests.small import quiet_trainer

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


def join():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Samples(Dataset):
    """A dataset; with ``odd`` the ranks get batches of different sizes."""

    def __init__(self, count, *, odd=False, spikes=False):
        self.count, self.odd, self.spikes = count, odd, spikes

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = 6 + (2 * int(torch.randint(3, (), generator=generator)) if self.odd else 0)
        x = torch.randn(size, 3, 8, 8, generator=generator)
        if self.spikes and index % 17 == 11:
            x *= 3e5
        return x, torch.randint(0, 5, (size,), generator=generator)


class Net(TrainingModule):
    def __init__(self, optimizer=FusedAdam):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 36, 5)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        if self.optimizer is FusedAdam:
            return FusedAdam(self.parameters(), lr=1e-3, eps=1e-4)
        if self.optimizer is FusedSGD:
            return FusedSGD(self.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, fused=True, capturable=True)


class Watch(Callback):
    def __init__(self):
        self.losses, self.replays, self.first = [], 0, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].clone())
        graph = graph_update(trainer)
        self.replays = 0 if graph is None else sum(one.replays for one in captured_steps(graph).values())
        self.first = self.first or (trainer.global_step if self.replays else 0)


def fitted(
    strategy, graph, level="O0", optimizer=FusedAdam, accumulate=1, sync=True, partial="step", callbacks=(), **data
):
    watch = Watch()
    trainer = quiet_trainer(
        accelerator="gpu",
        devices="auto",
        strategy=strategy,
        precision=level,
        max_epochs=3,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
        partial_window=partial,
        sync_batchnorm=sync,
        log_every_n_steps=9,
        callbacks=[watch, *callbacks],
        cuda_graph=graph,
    )
    module = Net(optimizer)
    torch.manual_seed(5 + trainer.global_rank)
    trainer.fit(module, DataLoader(Samples(60, **data), batch_size=None))
    state = [one.cpu() for one in module.state_dict().values()]
    assert (
        not graph or not isinstance(strategy, DDP) or watch.first >= 11
    )  # torch's wrapper takes statistics in its first steps
    return state, torch.stack(watch.losses).cpu(), watch.replays, trainer.skipped_steps


FAST = OptLevel("O1", scale_window=9)
CASES = {
    "delayed O0": (DelayedDDP, {}),
    "delayed O1 spikes": (DelayedDDP, {"level": FAST, "spikes": True}),
    "delayed O2": (DelayedDDP, {"level": "O2", "optimizer": FusedSGD}),
    "delayed O5": (DelayedDDP, {"level": "O5"}),
    "delayed torch": (DelayedDDP, {"optimizer": torch.optim.AdamW, "sync": False}),
    "delayed O0 windows": (DelayedDDP, {"accumulate": 3}),
    "delayed O2 windows": (DelayedDDP, {"level": "O2", "accumulate": 3, "spikes": True}),
    "delayed O1 odd": (DelayedDDP, {"level": "O1", "odd": True}),
    "overlapped O2": (lambda: DelayedDDP(message_size=2000), {"level": "O2"}),
    "overlapped O2 windows": (
        lambda: DelayedDDP(message_size=2000, num_allreduce_streams=2),
        {"level": "O2", "accumulate": 3},
    ),
    "ddp O0": (DDP, {}),
    "ddp O1": (DDP, {"level": "O1", "optimizer": torch.optim.AdamW, "sync": False}),
    "ddp O2 views": (lambda: DDP(gradient_as_bucket_view=True), {"level": "O2"}),
    "delayed O2 freezing": (DelayedDDP, {"level": "O2", "callbacks": ["Freeze"]}),
    "ddp O2 freezing": (DDP, {"level": "O2", "callbacks": ["Freeze"]}),
    "ddp O0 odd": (DDP, {"odd": True}),
    "windows ddp O0": (DDP, {"accumulate": 3, "sync": False}),
    "windows ddp O1 drop": (DDP, {"level": FAST, "accumulate": 4, "partial": "drop", "sync": False, "spikes": True}),
    "windows ddp O1 torch": (DDP, {"level": "O1", "accumulate": 2, "optimizer": torch.optim.AdamW, "odd": True}),
    "windows ddp O2": (DDP, {"level": "O2", "accumulate": 3, "optimizer": FusedSGD, "sync": False, "spikes": True}),
    "windows ddp O0 views": (lambda: DDP(gradient_as_bucket_view=True), {"accumulate": 2}),
    "windows ddp O5 change": (DDP, {"level": "O5", "callbacks": ["Change"]}),
    "windows delayed O0 change": (DelayedDDP, {"callbacks": ["Change"], "sync": False}),
    "checked delayed O1 odd": (DelayedDDP, {"level": "O1", "odd": True, "check": 3}),
    "checked ddp O0 windows": (DDP, {"accumulate": 2, "sync": False, "check": 4}),
}


def runs(names):
    join()
    found = {}
    for name in names:
        strategy, options = CASES[name]
        options = dict(options)
        callbacks, check = options.pop("callbacks", ()), options.pop("check", 0)
        comparison.compare = compared = Counted(compare)
        found[name] = [
            fitted(strategy(), graph, callbacks=[CALLBACKS[one]() for one in callbacks], **options)
            for graph in (False, CudaGraph(warmup=4, check_every=check))
        ]
        assert (compared.count > 6) is bool(check), (name, compared.count)
        print(name, [(one[2], one[3]) for one in found[name]], flush=True)
    dist.destroy_process_group()
    return found


class Counted:
    """Counts the comparisons of replays with eager steps."""

    def __init__(self, compare):
        self.count, self.compare = 0, compare

    def __call__(self, *arguments, **options):
        self.count += 1
        return self.compare(*arguments, **options)


@pytest.mark.parametrize("kind", ["delayed O", "delayed t", "overlapped", "ddp", "windows", "checked"])
def test_the_bits_of_eager_steps(kind):
    names = [name for name in CASES if name.startswith(kind)]
    for found in run_ranks(runs, 2, names, backend=None, start_method="spawn", timeout=280):
        for name, (eager, graph) in found.items():
            for one, other in zip(eager[0], graph[0], strict=True):
                assert torch.equal(one.isnan(), other.isnan()), name
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), name
            assert torch.equal(eager[1].nan_to_num(), graph[1].nan_to_num()), name
            assert eager[3] == graph[3], name
            assert graph[2] > 15, name


class Freeze(Callback):
    def on_train_epoch_start(self, trainer, module):
        module.net[0].requires_grad_(trainer.current_epoch != 1)


CALLBACKS = {"Freeze": Freeze, "Change": lambda: GradientAccumulationScheduler({0: 2, 2: 3})}


class Late(Net):
    """A step that cannot be captured on one rank."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return loss


def one_cannot():
    join()
    trainer = quiet_trainer(accelerator="gpu", devices="auto", strategy="delayed_ddp", max_epochs=1, cuda_graph="auto")
    trainer.fit(Late(), DataLoader(Samples(60), batch_size=None))
    why = graph_update(trainer).why_eager
    dist.destroy_process_group()
    return trainer.global_step, why


def test_where_one_rank_cannot_capture_all_run_eagerly():
    (steps, first), (others, second) = run_ranks(one_cannot, 2, backend=None, start_method="spawn", timeout=120)
    assert steps == others == 30
    assert "another rank cannot capture" in first
    assert "the step does something that cannot be captured" in second


class Raises(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 25:
            raise RuntimeError("here")


def ends_with_graphs():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    words, options = [], {"accelerator": "gpu", "devices": "auto", "strategy": "ddp", "max_epochs": 1}
    for callbacks in ([], [Raises()]):
        watch = Watch()
        trainer = quiet_trainer(cuda_graph=CudaGraph(warmup=4), callbacks=[watch, *callbacks], **options)
        try:
            trainer.fit(Net(), DataLoader(Samples(60), batch_size=None))
        except RuntimeError as error:
            words.append(str(error))
        words.append(watch.replays > 10)
    return words


def test_processes_end_after_graphs_with_exchanges():
    """NCCL hangs if a group is destroyed before a graph with its collectives; the Trainer owns the group of a fit."""
    for words in run_ranks(ends_with_graphs, 2, backend=None, start_method="spawn", timeout=60):
        assert words == [True, "here", True]
