"""A rank is killed with SIGKILL repeatedly, and the job is restarted: its final weights equal those of an uninterrupted run."""

from __future__ import annotations

import collections
import json
import random
import shutil
import signal

import pytest
import torch

from fabricamp import seed_everything
from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from fabricamp.checkpoint import PARTIAL_SUFFIX, read_checkpoint
from fabricamp.ops.shards import local
from fabricamp.strategies import DDP, FSDP
from tests.kill.attempts import WORLD_SIZE, Kill, attempt, draw, import_everything
from tests.small import Classifier, loader, quiet_trainer


class Noisy(Classifier):
    """Consumes random numbers, validates, and has BatchNorm's statistics."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))
        self.net.append(torch.nn.Dropout(0.2))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


def parts(value):
    """Returns ``value`` with this rank's local shards in place of sharded tensors."""
    if isinstance(value, dict):
        return {key: parts(item) for key, item in value.items()}
    return [*map(parts, value)] if isinstance(value, list | tuple) else local(value)


def job_in(folder, strategy=DDP, kind=ModelCheckpoint):
    """Returns a job that trains 12 steps in 3 epochs, saves 6 times, validates 6 times, and writes its weights at its end."""

    def job(armed):
        seed_everything(7, verbose=False)
        checkpoint = kind(
            folder / "checkpoints", monitor="val_loss", save_top_k=2, every_n_train_steps=2, save_last=True
        )
        trainer = quiet_trainer(
            devices="auto",
            strategy=strategy(timeout=60),
            max_epochs=3,
            enable_checkpointing=True,
            val_check_interval=2,
            num_sanity_val_steps=0,
            callbacks=[checkpoint, armed],
            default_root_dir=folder,
        )
        module = Noisy()
        trainer.fit(module, loader(16, 2, shuffle=True), loader(12, 2), ckpt_path="auto")
        if trainer.is_global_zero:
            torch.save(parts([module.state_dict(), trainer.optimizers[0].state_dict()]), folder / "attempt-weights")

    return job


def check_files(folder):
    """Checks that every file or folder loads, or has a hidden name."""
    for file in (folder / "checkpoints").glob("*"):
        if not (file.name.startswith(".") and file.name.endswith(PARTIAL_SUFFIX)):
            assert read_checkpoint(file)["global_step"] > 0, file


def outcome(folder):
    return torch.load(folder / "attempt-weights", weights_only=True)


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def straight(folder, strategy, kind):
    """Runs without a kill; returns its result and the counts of events at which a kill is possible."""
    import_everything(folder / "warm")
    assert attempt(job_in(folder, strategy, kind), folder).finished
    spans = [json.loads((folder / f"attempt-counts-{rank}").read_text()) for rank in range(WORLD_SIZE)]
    return outcome(folder), spans


def survive(folder, number, seed, strategy=DDP, kind=ModelCheckpoint):
    """Kills ``number`` times, over as many trainings as necessary; returns the number of kills per phase."""
    expected, spans = straight(folder / "straight", strategy, kind)
    generator = random.Random(seed)
    phases = collections.Counter()
    training = 0
    while phases.total() < number:
        here = folder / f"training{training}"
        kill = draw(generator, spans)
        ended = attempt(job_in(here, strategy, kind), here, kill)
        check_files(here)
        if ended.phase:
            phases[ended.phase] += 1
            assert not ended.finished
            continue
        assert ended.finished, f"{kill}: {ended}"
        assert same(outcome(here), expected), f"training {training} of seed {seed}"
        training += 1
    here = folder / f"training{training}"
    last = attempt(job_in(here, strategy, kind), here)
    assert last.finished, last
    assert same(outcome(here), expected)
    return phases


def test_twenty_kills(tmp_path):
    phases = survive(tmp_path, 20, seed=1)
    assert phases.total() == 20
    assert len(phases) >= 2


class Encoder:
    """An object that consumes random numbers while it is pickled."""

    def __getstate__(self):
        return {"drawn": random.random() + torch.rand(1).item()}


def with_objects_in(folder, kind, **allowed):
    def job(armed):
        seed_everything(7, verbose=False)
        checkpoint = kind(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1)
        trainer = quiet_trainer(
            devices="auto",
            strategy=DDP(timeout=60),
            max_steps=10,
            enable_checkpointing=True,
            checkpoint_objects=True,
            callbacks=[checkpoint, armed],
        )
        module = Noisy()
        module.save_hyperparameters({"encoder": Encoder()})
        trainer.fit(module, loader(32, 2, shuffle=True), ckpt_path="auto", **allowed)
        if trainer.is_global_zero:
            torch.save(parts([module.state_dict(), trainer.optimizers[0].state_dict()]), folder / "attempt-weights")

    return job


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
def test_kills_of_two_ranks_with_objects(kind, tmp_path):
    """A restart without permission stops on both ranks and changes no file; with permission it ends with the same bits."""
    import_everything(tmp_path / "warm")
    assert attempt(with_objects_in(tmp_path / "straight", kind), tmp_path / "straight").finished
    here = tmp_path / "killed"
    allowed = {"weights_only": False}
    for kill in (Kill(0, "file", 8), Kill(1, "call", 9000)):
        assert attempt(with_objects_in(here, kind, **allowed), here, kill).codes[kill.rank] == -signal.SIGKILL, kill
        files = {file.name: file.stat().st_mtime_ns for file in (here / "checkpoints").glob("*.ckpt")}
        assert files
        refused = attempt(with_objects_in(here, kind), here)
        assert refused.codes == [1, 1]
        assert refused.failures.count("CheckpointObjectsError: ckpt_path='auto'") == WORLD_SIZE
        assert {file.name: file.stat().st_mtime_ns for file in (here / "checkpoints").glob("*.ckpt")} == files
    assert attempt(with_objects_in(here, kind, **allowed), here).finished
    assert same(outcome(here), outcome(tmp_path / "straight"))


def alone_in(folder, strategy, writes):
    """One process that saves twice, so that files rotate; few steps, so that all of its file operations can be tested."""

    def job(armed):
        seed_everything(7, verbose=False)
        checkpoint = writes(folder / "checkpoints", every_n_train_steps=2, save_last=True)
        options = {"max_steps": 4, "enable_checkpointing": True, "callbacks": [checkpoint, armed]}
        trainer = quiet_trainer(strategy=strategy, devices="auto", **options)
        module = Noisy()
        trainer.fit(module, loader(32, 4, shuffle=True), ckpt_path="auto")
        torch.save(parts([module.state_dict(), trainer.optimizers[0].state_dict()]), folder / "attempt-weights")

    return job


_ALL = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("strategy", "writes", "kind", "step"),
    [
        ("single", ModelCheckpoint, "operation", 5),
        ("fsdp", ModelCheckpoint, "file", 12),
        ("fsdp", AsyncCheckpoint, "file", 31),
        pytest.param("single", ModelCheckpoint, "operation", 1, marks=_ALL),
        pytest.param("fsdp", ModelCheckpoint, "file", 1, marks=_ALL),
        pytest.param("fsdp", AsyncCheckpoint, "file", 1, marks=_ALL),
    ],
)
def test_a_kill_before_each_operation_on_a_file(strategy, writes, kind, step, tmp_path):
    import_everything(tmp_path / "warm")
    straight = tmp_path / "straight"
    assert attempt(alone_in(straight, strategy, writes), straight, world_size=1).finished
    expected = outcome(straight)
    number = json.loads((straight / "attempt-counts-0").read_text())[kind]
    assert number > 30
    for when in range(1, number + 1, step):
        here = tmp_path / f"operation{when}"
        killed = attempt(alone_in(here, strategy, writes), here, Kill(0, kind, when), world_size=1)
        check_files(here)
        assert killed.phase, f"{kind} {when} of {number}: {killed}"
        if when % (3 * step) == 1:
            assert attempt(alone_in(here, strategy, writes), here, world_size=1).finished
            assert same(outcome(here), expected), when
        shutil.rmtree(here)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("writes", [ModelCheckpoint, AsyncCheckpoint])
def test_fifty_kills_of_ranks_that_write_folders(writes, tmp_path):
    phases = survive(tmp_path, 50, seed=3, strategy=FSDP, kind=writes)
    print(phases)
    assert {"training", "saving"} <= set(phases)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_kills(tmp_path):
    phases = survive(tmp_path, 200, seed=2)
    print(phases)
    assert {"training", "saving", "rotating", "validating"} <= set(phases)
