"""Runs resume from checkpoints of earlier versions bit for bit.

``files/`` has one file of each layout, named by the commit that wrote it with
``python -m tests.checkpoint.test_checkpoint_formats FILE``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from fabricamp import Callback, CheckpointError, TrainingModule
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.loggers import CSVLogger
from fabricamp.rng import capture_rng, global_seed, isolate_rng
from tests.small import data, quiet_trainer
from tests.trainer.test_resume import assert_equal

FILES = sorted((Path(__file__).parent / "files").glob("*.ckpt"))
FORMAT_0 = next(file for file in FILES if file.stem == "b05a50f")
OVERFLOWS_AT, CUT_AT, STEPS = 2, 17, 8


class Net(TrainingModule):
    """Has a small instance of everything in a checkpoint: BatchNorm, masters, a schedule, running values, random numbers."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 3, bias=False)
        )
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append((x.sum().item(), torch.rand(()).item()))
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss.detach(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss * (float("inf") if self.global_step == OVERFLOWS_AT else 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Cut(Callback):
    """Writes a checkpoint within an accumulation, after two of its micro-batches and with two pending step statuses."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.batches_done == CUT_AT:
            trainer.save_checkpoint(self.path)
            self.seen = len(module.seen)


class Restored(Callback):
    """Saves a resumed run's state before its first batch, and the generators' states in that batch."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not hasattr(self, "rng"):
            self.rng = capture_rng()


def shuffled():
    return DataLoader(data(24), 4, shuffle=True)


def shuffled_as_then():
    """Returns a loader in the order of earlier versions: from seed and epoch, in one process too."""
    return DataLoader(data(24), 4, sampler=DistributedSampler(range(24), 1, 0, seed=global_seed()))


def order_of(file):
    """Returns a loader in the order of the file's run; only files of the current order have the key "orders"."""
    return shuffled if "orders" in read_checkpoint(file)["data"]["position"][0] else shuffled_as_then


def fit(folder, *callbacks, ckpt_path=None, make=shuffled):
    torch.manual_seed(3 if ckpt_path is None else 4)
    module = Net()
    trainer = quiet_trainer(
        precision="O2",
        max_steps=STEPS,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        log_every_n_steps=2,
        enable_checkpointing=True,
        callbacks=[EarlyStopping("loss_epoch", patience=9), ModelCheckpoint(folder / "own"), *callbacks],
        logger=CSVLogger(folder),
        default_root_dir=folder,
    )
    trainer.fit(module, make(), ckpt_path=ckpt_path)
    return module, trainer


def as_read(path):
    """Returns the part of a checkpoint that determines the resumed run, without values specific to each file."""
    state = read_checkpoint(path)
    state["loops"]["fit"] = {
        "stop_reason": "",
        "interrupted": False,
        "epoch_ended": True,
        "validations": 0,
        "skipped_before": 0,
        **state["loops"]["fit"],
    }
    for name in ("step_size", "kernel_choice", "tensor_parallel", "metrics_at_end", "loggers_at_end"):
        state["loops"]["fit"].pop(name, None)  # what earlier files have no word of, nor of what follows
    for name in ("optimizer_identities", "lr_scheduler_identities"):
        state["loops"]["fit"].pop(name, None)
    state["amp"].pop("schedules_follow", None)
    for metrics in state["loops"]["fit"]["metrics"]:
        for name in ("user_entries", "dtypes"):
            metrics.setdefault(name, {})
        for slot in metrics["table"]["slots"]:
            slot.setdefault("flushed_weight", 0)
    sums, loss = state["loops"]["fit"]["accumulation"]["tensors"]
    state["loops"]["fit"]["accumulation"]["tensors"] = [
        sums[sums != 0],
        loss,
    ]  # there may be gaps between the parameters
    # Values, and a flag for each of the three.  Before a BatchNorm a bias has no gradient but what rounding leaves, which may be 0.
    assert 8 * 4 + 4 * 3 + 3 < sums.count_nonzero() <= 8 * 4 + 4 + 4 * 3 + 3
    for own in ("callbacks", "loggers", "fabricamp_version", "torch_version", "rng", "pytorch-lightning_version"):
        state.pop(own, None)
    state["loops"] = {"fit": state["loops"]["fit"]}  # the other keys are for Lightning
    return state


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_an_earlier_version_goes_on_bit_for_bit(file, tmp_path):
    with isolate_rng():
        cut, restored = Cut(tmp_path / "cut.ckpt"), Restored(tmp_path / "restored.ckpt")
        straight, _ = fit(tmp_path / "straight", cut, make=order_of(file))
        module, trainer = fit(tmp_path / "resumed", restored, ckpt_path=file)
    assert_equal(as_read(tmp_path / "restored.ckpt"), as_read(file))
    # Files without this key are from runs that chose kernels as for a captured step.
    chosen = read_checkpoint(file)["loops"]["fit"].get("kernel_choice", "graph")
    assert read_checkpoint(tmp_path / "restored.ckpt")["loops"]["fit"]["kernel_choice"] == chosen
    stopping, written = (
        read_checkpoint(one)["callbacks"]["EarlyStopping{'monitor': 'loss_epoch', 'mode': 'min'}"]
        for one in (tmp_path / "restored.ckpt", file)
    )
    assert stopping.pop("best_score") == written.pop("best_score") > 0
    assert stopping.pop("stopping_reason") == 0
    assert written.pop("stopping_reason", "not_stopped") in (0, "not_stopped")  # text in earlier files
    assert written.items() <= stopping.items()
    assert_equal(restored.rng, torch.load(file, weights_only=True)["rng"][0])
    assert module.seen == straight.seen[cut.seen :]
    assert trainer.global_step == STEPS
    assert trainer.skipped_steps == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_fields_are_read_by_name(file):
    written, state = torch.load(file, weights_only=True), read_checkpoint(file)
    status = state["amp"]["scaler"]["last_status"]
    as_written = written["amp"]["scaler"]["known"]
    assert list(status.values()) == list(as_written.values() if "format" in written else as_written)
    assert (status["applied"], status["skipped_steps"]) == (False, 1)
    slots = state["loops"]["fit"]["metrics"][0]["table"]["slots"]
    assert [slot["published"]["key"] for slot in slots] == ["loss_step", "loss_epoch", "most"]
    assert {slot["published"]["loader"] for slot in slots} == {-1}
    assert state["format"] == 3


def test_verdicts_are_written_by_name(tmp_path):
    with isolate_rng():
        _, trainer = fit(tmp_path)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    state = torch.load(tmp_path / "new.ckpt", weights_only=True)
    assert state["format"] == 3
    assert state["amp"]["scaler"]["last_status"]["skipped_steps"] == 1
    flushes = [flush for rank in state["loops"]["fit"]["metrics"] for flush in rank["pending"]]
    assert all(row["published"][0]["key"] == "loss_step" for flush in flushes for row in flush["ranks"])


@pytest.mark.parametrize("number", [4, -1, "1", True])
def test_a_file_of_a_later_version_is_refused(number, tmp_path):
    state = torch.load(FORMAT_0, weights_only=True)
    del state["checksum"]
    torch.save({**state, "format": number, "fabricamp_version": "9.0"}, tmp_path / "later.ckpt")
    with pytest.raises(CheckpointError, match=rf"format {number!r} .* fabricamp 9.0; .* up to 3: install"):
        read_checkpoint(tmp_path / "later.ckpt")


@pytest.mark.parametrize("known", [None, [True], list(range(9)), "no", {}])
def test_a_file_that_is_not_as_its_format_is_refused(known, tmp_path):
    state = torch.load(FORMAT_0, weights_only=True)
    del state["checksum"]
    state["amp"]["scaler"]["known"] = known
    torch.save(state, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="does not have the layout of format 0"):
        read_checkpoint(tmp_path / "other.ckpt")


def test_each_layout_has_a_small_file():
    assert {torch.load(file, weights_only=True).get("format", 0) for file in FILES} == {0, 2}
    # Half of a file is generator states: torch's has 5 kB, and later files contain it three times.
    assert all(file.stat().st_size < 45_000 for file in FILES)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fit(Path(folder), Cut(sys.argv[1]))
