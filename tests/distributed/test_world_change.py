"""Runs resumed with more or fewer processes: on_world_change="keep_global_batch" keeps the samples of each step."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Sampler

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.optimizers import FusedAdam
from fabricamp.rng import global_seed, isolate_rng
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer
from tests.trainer.test_exact_resume import Samples, Saves

SIZE, BATCH, EPOCHS = 96, 4, 2
STEP = 16  # samples per step
CLOSE = {
    "O0": {"rtol": 1e-4, "atol": 1e-5},
    "O2": {"rtol": 2e-2, "atol": 2e-3},
    "O5": {"rtol": 5e-2, "atol": 1e-2},
}


class Net(Classifier):
    """Records its samples; its schedule is as long as the number of steps that the Trainer expects."""

    def __init__(self, optimizer):
        super().__init__()
        self.seen, self.optimizer, self.until = [], optimizer, None

    def training_step(self, batch, batch_idx):
        self.seen += [(self.current_epoch, self.global_step, index) for index in batch[2].tolist()]
        return super().training_step(batch[:2], batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == self.until:
            self.trainer.stop("that is enough")

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.01, eps=1e-3)
        schedule = OneCycleLR(optimizer, 0.02, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class InOneProcess(Sampler):
    """Yields in one process the order that several processes share."""

    def __init__(self, size, epoch=0):
        self.size, self.epoch = size, epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(
            torch.randperm(self.size, generator=torch.Generator().manual_seed(global_seed() + self.epoch)).tolist()
        )


def train(folder, loader, seed, until, level, optimizer, accumulate, strategy="single"):
    """Trains up to ``until`` steps; returns the values to compare."""
    torch.manual_seed(seed)
    module = Net(optimizer)
    module.until = until
    trainer = quiet_trainer(
        strategy=strategy,
        devices="auto",
        precision=level,
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        on_world_change="keep_global_batch",
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1)],
    )
    trainer.fit(module, loader, ckpt_path="auto")
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    state = module.state_dict() if trainer.is_global_zero else {}
    return {
        "steps": trainer.global_step,
        "seen": module.seen,
        "lr": lr,
        "state": state,
        "window": trainer.accumulate_grad_batches,
    }


def check(folder, strategy, worlds, level, optimizer, accumulate):
    """Trains a part of the steps with each number of ranks; samples, learning rates and weights must equal those of one process."""
    steps = EPOCHS * SIZE // STEP
    options = level, optimizer
    # If one process begins the run, its generator draws each epoch's order.
    order = {"shuffle": True} if worlds[0] == 1 else {"sampler": InOneProcess(SIZE)}
    with isolate_rng():
        straight = train(folder / "straight", DataLoader(Samples(SIZE), STEP, **order), 1, None, *options, 1)
    loader, seen = DataLoader(Samples(SIZE), BATCH, shuffle=True), []
    for number, world in enumerate(worlds, start=1):
        until = steps * number // len(worlds)
        how = *options, accumulate, strategy
        ranks = run_ranks(train, world, folder / "ranks", loader, number, until, *how, timeout=200.0)
        assert {one["steps"] for one in ranks} == {until}
        assert {one["window"] for one in ranks} == {STEP // BATCH // world}
        seen += [place for one in ranks for place in one["seen"]]
    assert sorted(seen) == sorted(straight["seen"])
    assert ranks[0]["lr"] == straight["lr"]
    assert ranks[0]["state"].keys() == straight["state"].keys()
    for name, value in straight["state"].items():
        torch.testing.assert_close(
            ranks[0]["state"][name], value, **CLOSE[level], msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize(
    ("strategy", "worlds", "level", "optimizer", "accumulate"),
    [("ddp", (2, 1, 4), "O0", torch.optim.AdamW, 2), ("fsdp", (1, 4), "O2", FusedAdam, 4)],
)
def test_steps_keep_their_samples(strategy, worlds, level, optimizer, accumulate, tmp_path):
    check(tmp_path, strategy, worlds, level, optimizer, accumulate)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, FusedAdam])
@pytest.mark.parametrize("level", list(CLOSE))
@pytest.mark.parametrize("worlds", [(2, 1, 4), (2, 4, 1), (4, 2, 1), (1, 2, 4), (1, 4, 1)])
@pytest.mark.parametrize("strategy", ["ddp", "delayed_ddp", "fsdp"])
def test_steps_keep_their_samples_under_every_strategy(strategy, worlds, level, optimizer, tmp_path):
    check(tmp_path, strategy, worlds, level, optimizer, STEP // BATCH // worlds[0])


def within_a_window(path, ckpt_path):
    """Trains an epoch; two ranks write a file after their third micro-batch, in the middle of an accumulation of two."""
    module, saves = Net(torch.optim.AdamW), Saves("batch", 3, path)
    trainer = quiet_trainer(
        strategy="ddp",
        devices="auto",
        max_epochs=1,
        accumulate_grad_batches=2,
        on_world_change="keep_global_batch",
        callbacks=[] if ckpt_path else [saves],
    )
    trainer.fit(module, DataLoader(Samples(SIZE), BATCH), ckpt_path=ckpt_path)
    return module.state_dict(), module.seen, trainer.accumulate_grad_batches


def test_a_window_goes_on_with_another_number_of_ranks(tmp_path):
    path = tmp_path / "cut.ckpt"
    straight, _ = run_ranks(within_a_window, 2, path, None, timeout=200.0)
    ((state, seen, window),) = run_ranks(within_a_window, 1, path, path, timeout=200.0)
    assert window == 4
    assert [index for *_, index in seen] == list(range(3 * 2 * BATCH, SIZE))
    for name, value in straight[0].items():
        torch.testing.assert_close(state[name], value, **CLOSE["O0"])


class Places(Callback):
    def on_train_start(self, trainer, module):
        self.found = trainer.accumulate_grad_batches, sorted(trainer.strategy.places_of_whole_gradients())


def sharded_in_smaller_batches(folder):
    """One process begins with batches of 8 samples and resumes with batches of 4."""
    found = []
    for batch, until in ((8, 2), (4, 4)):
        places, keeper = Places(), ModelCheckpoint(folder, every_n_train_steps=2)
        options = {
            "strategy": "fsdp",
            "devices": "auto",
            "max_epochs": 1,
            "max_steps": until,
            "enable_checkpointing": True,
        }
        trainer = quiet_trainer(**options, on_world_change="keep_global_batch", callbacks=[places, keeper])
        trainer.fit(Classifier(), loader(32, batch), ckpt_path="auto")
        found.append(places.found)
    return found


def test_windows_that_come_with_smaller_batches_keep_gradients_whole_too(tmp_path):
    (found,) = run_ranks(sharded_in_smaller_batches, 1, tmp_path)
    assert found == [(1, []), (2, ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"])]
