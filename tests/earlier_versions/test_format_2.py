"""Checkpoints of format 2, whose keys had other names: runs go on from them bit for bit.

``format_2/`` holds one of each scene, named by the commit that wrote them:
``python -m tests.earlier_versions.test_format_2 FOLDER NAME``.
All numbers of these runs are exact in their dtypes (whole numbers, and halves of them), in any order of summation: the same bits on
every machine.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from fabricamp import Callback, TrainingModule
from fabricamp.callbacks import EMA, EarlyStopping
from fabricamp.checkpoint import read_checkpoint
from fabricamp.checkpoint.formats import upgraded
from fabricamp.data import CombinedLoader, LengthGroups
from fabricamp.loggers import CSVLogger
from fabricamp.metrics.saving import load_rows, save_rows
from fabricamp.metrics.slots import Published
from fabricamp.precision import OptLevel
from fabricamp.rng import isolate_rng
from tests.small import quiet_trainer
from tests.trainer.test_resume import assert_equal

FILES = Path(__file__).parent / "format_2"
OVERFLOWS_AT = 2


def whole_numbers(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (size, 8), generator=generator).float()
    y = torch.randint(0, 2, (size, 3), generator=generator).float() * 2 - 1
    return TensorDataset(x, y)


class Draws:
    """Batches without a sampler: each one draws a number, so a resumed pass has to read past the earlier ones."""

    def __len__(self):
        return 4

    def __iter__(self):
        for index in range(len(self)):
            yield torch.randint(0, 4, (2, 8)).float() + index, torch.ones(2, 3)


class Stream:
    """Batches that know their own position; the next pass goes on where a limit ended the one before."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 7:
            self.position += 1
            yield torch.full((2, 8), float(self.position % 3)), torch.ones(2, 3)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Net(TrainingModule):
    """One layer whose gradients do not depend on its weights; logs values of every kind."""

    def __init__(self, *, overflows=True):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(24).reshape(3, 8) / 8)
            self.net.bias.zero_()
        self.total = SumMetric()
        self.overflows = overflows
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen.append([float(x.sum()) for x, _ in parts] + [torch.randint(0, 100, ()).item()])
        loss = sum((self.net(x) * y).sum() for x, y in parts)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("exact", loss.detach().double(), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=4)
        self.log("most", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=4)
        self.log("number", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="sum", batch_size=4)
        self.total.update(float(batch_idx))
        self.log("total", self.total, on_step=False, on_epoch=True, batch_size=4)
        overflow = self.overflows and self.global_step == OVERFLOWS_AT
        return loss * (float("inf") if overflow else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) * batch[1]).sum(), batch_size=4)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1 / 64, momentum=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Cut(Callback):
    """Writes a checkpoint after some micro-batch of the run."""

    def __init__(self, path, batches):
        self.path = path
        self.batches = batches

    def on_train_start(self, trainer, pl_module):
        trainer.callback_metrics["own"] = torch.tensor(7.0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.state.batches_done == self.batches:
            trainer.save_checkpoint(self.path)
            self.seen = len(pl_module.seen)


class Restored(Callback):
    """Writes what a run goes on from, before its first batch."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def combined():
    return CombinedLoader(
        {
            "drawn": DataLoader(whole_numbers(32, 1), 4, shuffle=True),
            "own": DataLoader(whole_numbers(10, 2), 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
            "read": Draws(),
        },
        "max_size_cycle",
    )


def limited():
    groups = LengthGroups([1 + index % 5 for index in range(16)], batch_size=2, seed=3)
    return CombinedLoader(
        {"stream": Stream(), "groups": DataLoader(whole_numbers(16, 4), batch_sampler=groups)}, "max_size_cycle"
    )


class Scene(NamedTuple):
    """How a run goes, after which micro-batch it is cut, and the Trainer's arguments."""

    make: Callable[[], Any]
    cut_at: int
    options: dict[str, Any]


SCENES = {
    # Within the fourth step: two of its micro-batches are done, the overflow of the step before is not read yet.
    "accumulation": Scene(
        combined,
        14,
        {
            "precision": lambda: OptLevel("O2", max_loss_scale=2.0**9),
            "accumulate_grad_batches": 4,
            "max_steps": 6,
            "val_check_interval": 8,
        },
    ),
    # In the second epoch of those that a limit ends; each goes on in the stream where the one before ended.
    "limit": Scene(limited, 5, {"precision": lambda: "O0", "limit_train_batches": 3, "max_epochs": 4}),
    # Its steps end within an epoch, and it is saved after its end.
    "end": Scene(
        lambda: DataLoader(whole_numbers(32, 1), 4, shuffle=True),
        0,
        {
            "precision": lambda: OptLevel("O2", max_loss_scale=2.0**9),
            "nan_policy": "stop",
            "max_steps": 5,
            "val_check_interval": 4,
        },
    ),
}


def fit(scene, folder, *callbacks, ckpt_path=None, **changes):
    make, _, options = SCENES[scene]
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(3 if ckpt_path is None else 4)
    module = Net(overflows=scene == "accumulation")
    options = {**options, "precision": options["precision"](), **changes}
    trainer = quiet_trainer(
        **options,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[EMA(0.5), EarlyStopping("val_loss", patience=99), *callbacks],
        logger=CSVLogger(folder),
        default_root_dir=folder,
    )
    trainer.fit(module, make(), DataLoader(whole_numbers(8, 6), 4), ckpt_path=ckpt_path)
    return module, trainer


def content(path):
    """What a run goes on from, without what each file has of its own, and what earlier files have no word of."""
    state = read_checkpoint(path)
    for own in ("loggers", "fabricamp_version", "torch_version"):
        state.pop(own)
    for name in ("optimizer_identities", "lr_scheduler_identities"):
        state["loops"]["fit"].pop(name, None)
    state["amp"].pop("schedules_follow", None)
    state["loops"]["fit"].pop("loggers_at_end")
    for position in state["data"]["position"]:
        # What leads to a batch that is done again, and to the end of a pass: files of 0.2.0 have less of it.
        position.pop("earlier", None)
        position.get("at_pass_start", {}).pop("rng", None)
        for states in ("rng_states", "rng_states_ahead"):
            position.get("at_limit", {}).pop(states, None)
    return state


def assert_equal_states(one, other):
    """Checks that two contents are equal bit for bit; of the gradients' norms in the scaler's ring the last bit may differ.

    The files were written on one CPU, and another sums the squares of a norm in vectors of another width.  As integers of 32 bits
    such floats differ by one, and are far above all counts.
    """
    rings = []
    for state in (one, other):
        scaler = state.get("amp", {}).get("scaler", {})
        rings.append(scaler.pop("ring", torch.zeros(1, dtype=torch.int32)))
    assert_equal(one, other)
    ring, other_ring = rings
    differs = ring != other_ring
    assert (ring - other_ring).abs().max() <= 1
    assert (ring[differs] > 1_000_000).all()


def last_state(trainer, path):
    trainer.save_checkpoint(path)
    return content(path)


def before_the_first_batch(path):
    """The content without the two parts that a resumed run takes up with its first batch."""
    state = content(path)
    state.pop("rng")
    state["loops"]["fit"].pop("stepped")
    return state


def files(scene):
    return sorted(FILES.glob(f"*-{scene}.ckpt"))


@pytest.mark.parametrize("scene", ["accumulation", "limit"])
def test_a_run_that_was_cut_goes_on_bit_for_bit(scene, tmp_path):
    (file,) = files(scene)
    cut = Cut(tmp_path / "cut.ckpt", SCENES[scene].cut_at)
    restored = Restored(tmp_path / "restored.ckpt")
    with isolate_rng():
        straight, whole = fit(scene, tmp_path / "straight", cut)
        resumed, rest = fit(scene, tmp_path / "resumed", restored, ckpt_path=file)
    assert_equal_states(content(tmp_path / "cut.ckpt"), content(file))
    assert_equal(before_the_first_batch(tmp_path / "restored.ckpt"), before_the_first_batch(file))
    assert resumed.seen == straight.seen[cut.seen :]
    assert whole.global_step == rest.global_step
    assert whole.skipped_steps == rest.skipped_steps == int(scene == "accumulation")
    assert_equal_states(last_state(rest, tmp_path / "rest-end.ckpt"), last_state(whole, tmp_path / "whole-end.ckpt"))
    assert_equal(rest.callback_metrics, whole.callback_metrics)


def test_a_run_that_had_ended_shows_its_values_and_goes_on_bit_for_bit(tmp_path):
    (file,) = files("end")
    with isolate_rng():
        _, ended = fit("end", tmp_path / "ended", Cut(tmp_path / "none.ckpt", 0))
        ended.save_checkpoint(tmp_path / "ended.ckpt")
        _, again = fit("end", tmp_path / "again", ckpt_path=file)
        straight, whole = fit("end", tmp_path / "straight", Cut(tmp_path / "none.ckpt", 0), max_steps=11)
        resumed, rest = fit("end", tmp_path / "resumed", ckpt_path=file, max_steps=11)
    assert_equal(content(tmp_path / "ended.ckpt"), content(file))
    assert_equal(again.callback_metrics, ended.callback_metrics)
    assert again.callback_metrics["own"] == 7.0
    assert resumed.seen == straight.seen[5:]
    assert_equal_states(last_state(rest, tmp_path / "rest-end.ckpt"), last_state(whole, tmp_path / "whole-end.ckpt"))


RENAMED = {
    "loops.fit.stop": "loops.fit.stop_reason",
    "loops.fit.closed": "loops.fit.epoch_ended",
    "loops.fit.ended": "loops.fit.metrics_at_end",
    "loops.fit.ended.*.given": "loops.fit.metrics_at_end.*.user_entries",
    "loops.fit.ended_logs": "loops.fit.loggers_at_end",
    "loops.fit.objects.*.*.updates": "loops.fit.torchmetrics.*.*.update_count",
    "loops.fit.objects.*.*.states": "loops.fit.torchmetrics.*.*.states",
    "loops.fit.window.gradients": "loops.fit.accumulation.gradients",
    "loops.fit.window.held": "loops.fit.accumulation.params_with_grad",
    "loops.fit.metrics.*.given": "loops.fit.metrics.*.user_entries",
    "loops.fit.metrics.*.table.cells.*.number": "loops.fit.metrics.*.table.slots.*.host_value",
    "loops.fit.metrics.*.table.cells.*.sent": "loops.fit.metrics.*.table.slots.*.flushed_weight",
    "loops.fit.metrics.*.table.cells.*.object": "loops.fit.metrics.*.table.slots.*.metric_attribute",
    "loops.fit.metrics.*.table.cells.*.weight": "loops.fit.metrics.*.table.slots.*.weight",
    "loops.fit.metrics.*.table.cells.*.published": "loops.fit.metrics.*.table.slots.*.published",
    "amp.scaler.window.scale": "amp.scaler.step_state.scale",
    "amp.scaler.window.first_window": "amp.scaler.step_state.first_step",
    "amp.scaler.scalers.*.first_window": "amp.scaler.scalers.*.first_step",
    "amp.scaler.windows": "amp.scaler.steps",
    "amp.scaler.known": "amp.scaler.last_status",
    "amp.scaler.at_floor": "amp.scaler.steps_at_min_scale",
    "amp.scaler.sticky": "amp.scaler.keep_skipping",
    "data.position.*.last": "data.position.*.is_over",
    "data.position.*.again": "data.position.*.earlier_pass",
    "data.position.*.begun.rng": "data.position.*.at_pass_start.rng",
    "data.position.*.begun.generators": "data.position.*.at_pass_start.generators",
    "data.position.*.begun.again": "data.position.*.at_pass_start.earlier_pass",
    "data.position.*.drawn": "data.position.*.rng_states",
    "data.position.*.drawn_ahead": "data.position.*.rng_states_ahead",
    "data.position.*.orders.*.apart": "data.position.*.orders.*.separate",
    "data.position.*.places.*.batches": "data.position.*.positions.*.batches",
    "data.position.*.places.*.rounds": "data.position.*.positions.*.rounds",
    "data.position.*.places.*.state": "data.position.*.positions.*.state",
    "data.position.*.places.*.drawn": "data.position.*.positions.*.rng_states",
    "data.position.*.places.*.groups": "data.position.*.positions.*.batches_of_all_ranks",
    "data.position.*.ended.drawn": "data.position.*.at_limit.rng_states",
    "data.position.*.ended.places.*.batches": "data.position.*.at_limit.positions.*.batches",
    "data.position.*.ended.places.*.groups": "data.position.*.at_limit.positions.*.batches_of_all_ranks",
}
"""Where format 2 has a value, and where a file has it since; ``*`` is any key or index."""


def values_at(value, path):
    """All values at ``path``, in the order of the file."""
    if not path:
        return [value]
    key, *rest = path
    if key == "*":
        inner = value.values() if isinstance(value, dict) else list(value or ())
    else:
        inner = [value[key]] if isinstance(value, dict) and key in value else []
    return [one for part in inner for one in values_at(part, rest)]


@pytest.mark.parametrize("old", RENAMED)
def test_a_value_is_found_under_its_new_key(old):
    found = []
    for file in FILES.iterdir():
        written, state = torch.load(file, weights_only=True), read_checkpoint(file)
        assert (written["format"], state["format"]) == (2, 3)
        values = values_at(written, old.split("."))
        current = values_at(state, RENAMED[old].split("."))
        if not any(isinstance(value, dict | list) for value in values):  # in these, keys may have changed as well
            assert_equal(current, values)
        assert len(current) == len(values)
        assert old == RENAMED[old] or not values_at(state, old.split("."))
        found += values
    assert found, "no file has this key: it is not tested"


def test_a_flush_on_its_way_from_a_gpu_is_found_under_its_new_keys():
    """Files that were written on a CPU have none: there it arrives at once."""
    published = Published("loss", "loss", True, "mean", False, True, False)
    row = {"published": [published._asdict()], "numbers": [1.0], "weights": [-1], "device": [0.5]}
    metrics = {"pending": [{"step": 4, "rows": [row]}]}
    state = {"fabricamp_version": "0.1.0", "format": 2, "loops": {"fit": {"metrics": [metrics]}}}
    (flush,) = upgraded(state, "gpu.ckpt")["loops"]["fit"]["metrics"][0]["pending"]
    (values,) = load_rows(flush.pop("ranks"))
    assert flush == {"step": 4}
    assert values == ([published], [1.0], [-1], [0.5])
    assert load_rows(save_rows([values])) == [values]


def test_a_limit_within_a_loader_that_is_read_past_is_found_under_its_new_keys():
    states = [{"rng": 1, "generators": []}]
    at_limit = {"places": [{"batches": 2, "drawn": states}], "drawn": states[0]}
    state = {"fabricamp_version": "0.1.0", "format": 2, "data": {"position": [{"batches": 0, "ended": at_limit}]}}
    assert upgraded(state, "own.ckpt")["data"]["position"] == [
        {"batches": 0, "at_limit": {"positions": [{"batches": 2, "rng_states": states}], "rng_states": states[0]}}
    ]


def test_values_of_users_and_plug_ins_keep_their_keys():
    own = {"stop": 1, "window": 2, "places": [{"drawn": 3, "groups": 4}], "cells": 5, "known": 6, "held": 7, "again": 8}
    state = {
        "fabricamp_version": "0.1.0",
        "format": 2,
        "amp": {"scaler": dict(own), "own": dict(own)},
        "callbacks": {"Own": dict(own)},
        "loggers": [{"logger": "Own", "state": dict(own)}],
        "data": {"datamodule": dict(own), "position": [{"places": [{"batches": 1, "state": dict(own)}]}]},
        "loops": {"fit": {"objects": [{"metric": {"updates": 1, "states": dict(own)}}], "window": None}},
        **own,
    }
    found = upgraded(state, "own.ckpt")
    assert {key: found[key] for key in own} == own
    assert found["amp"] == {"scaler": own, "own": own}
    assert found["callbacks"] == {"Own": own}
    assert found["loggers"] == [{"logger": "Own", "state": own}]
    assert found["data"] == {"datamodule": own, "position": [{"positions": [{"batches": 1, "state": own}]}]}
    assert found["loops"]["fit"] == {
        "torchmetrics": [{"metric": {"update_count": 1, "states": own}}],
        "accumulation": None,
    }


@pytest.mark.parametrize("amp", [None, [1], "own", {"scaler": None}, {"scaler": [1]}])
def test_a_precision_of_another_layout_stays_as_it_is(amp):
    state = {"fabricamp_version": "0.1.0", "format": 2, "amp": copy.deepcopy(amp), "data": {"position": [{}, None]}}
    assert upgraded(state, "own.ckpt")["amp"] == amp


def write(folder, name):
    folder.mkdir(exist_ok=True)
    for scene, how in SCENES.items():
        file = folder / f"{name}-{scene}.ckpt"
        with tempfile.TemporaryDirectory() as logs:
            _, trainer = fit(scene, Path(logs), Cut(file, how.cut_at))
            if scene == "end":
                trainer.save_checkpoint(file)


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute(), sys.argv[2])
