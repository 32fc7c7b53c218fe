"""Resumed runs of two ranks equal uninterrupted ones, including each rank's random numbers, data and logged values.

Another number of ranks continues in the same global order.
"""

from __future__ import annotations

import logging
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from fabricamp.strategies import DDP, DelayedDDP
from tests.distributed.ranks import run_ranks
from tests.inside import session
from tests.small import quiet_trainer
from tests.trainer.test_exact_resume import BATCH, Net, Samples, Saves
from tests.trainer.test_resume import assert_equal

SIZE = 48
CASES = {
    "O0": ("O0", 1, "batch", 8),
    "O0 before a validation": ("O0", 1, "batch", 9),
    "O0 within a window": ("O0", 4, "batch", 9),
    "O1 within a window": ("O1", 3, "batch", 8),
    "O2 within a window": ("O2", 3, "batch", 8),
    "O4": ("O4", 1, "batch", 8),
    "O5 within a validation": ("O5", 2, "validation", 9),
    "O3 at the epoch's end": ("O3", 1, "epoch", 6),
}
# The place within an epoch does not depend on how gradients are exchanged; windows and levels do.
DELAYED = [name for name in CASES if name not in ("O0", "O0 before a validation", "O4")]
# Overlapped exchanges differ from delayed ones within an accumulation and in the dtypes of their buckets.
OVERLAPPED = ["O0 within a window", "O2 within a window", "O4", "O5 within a validation"]


def fit(case, seed, *, path=None, ckpt_path=None, max_steps=None, batch=BATCH, strategy="ddp", **options):
    precision, accumulate, hook, batches = case
    rank = dist.get_rank() if dist.is_initialized() else 0
    for place in (torch.manual_seed, random.seed, np.random.seed):
        place(100 * seed + rank)
    module, saves = Net(), Saves(hook, batches, path) if path is not None else None
    trainer = quiet_trainer(
        precision=precision,
        accumulate_grad_batches=accumulate,
        strategy=strategy if dist.is_initialized() else "single",
        devices="auto",
        max_steps=max_steps or 12 // accumulate,
        max_epochs=-1,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
        log_every_n_steps=2,
        callbacks=[saves] if saves else [],
        **options,
    )
    rows = []
    module.on_train_start = lambda: session(trainer).metrics.sinks.append(lambda row, step: rows.append((step, row)))
    contents = {}

    def keep():
        trainer.save_checkpoint(f"{path or ckpt_path}-end{seed}")
        contents.update(torch.load(f"{path or ckpt_path}-end{seed}", weights_only=True))

    module.on_fit_end = keep
    data = DataLoader(Samples(SIZE), batch, shuffle=True, generator=torch.Generator().manual_seed(3))
    trainer.fit(module, data, DataLoader(Samples(16, seed=2), BATCH), ckpt_path=ckpt_path)
    for place in contents["data"]["position"]:
        place.pop("at_pass_start", None)
    contents.pop("callbacks")
    return module, contents, rows, saves


def both(folder, make_strategy, names):
    """Runs each case uninterrupted and resumed; returns the cases that are not equal."""
    problems = []
    for name in names:
        case = CASES[name]
        path = folder / f"{name}.ckpt"
        straight, whole, rows, saves = fit(case, 1, path=path, strategy=make_strategy())
        resumed, again, rows_again, _ = fit(case, 2, ckpt_path=path, strategy=make_strategy())
        behind = straight.seen[saves.seen :]
        if case[2] == "validation":
            behind = resumed.seen[: len(resumed.seen) - len(behind)] + behind
        try:
            assert resumed.seen == behind
            assert rows_again == rows[len(rows) - len(rows_again) :]
            assert bool(rows_again) == (dist.get_rank() == 0)
            assert_equal(again, whole)
            assert len(whole["rng"]) == 2
            assert not torch.equal(whole["rng"][0]["torch"], whole["rng"][1]["torch"])
        except AssertionError as error:
            problems.append((name, str(error)[:500]))
    return problems


@pytest.mark.parametrize(
    ("make_strategy", "names"),
    [(DDP, CASES), (DelayedDDP, DELAYED), (partial(DelayedDDP, message_size=100), OVERLAPPED)],
    ids=["ddp", "delayed", "overlapped"],
)
def test_two_ranks(make_strategy, names, tmp_path):
    assert run_ranks(both, 2, tmp_path, make_strategy, names, timeout=200.0) == [[], []]


def order(folder, case, ckpt, batch, max_steps):
    """Resumes from a checkpoint; returns this rank's samples, the log messages and the weights."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fabricamp").addHandler(handler)
    module, contents, _, _ = fit(case, 3, ckpt_path=folder / ckpt, batch=batch, max_steps=max_steps)
    logging.getLogger("fabricamp").removeHandler(handler)
    weights = {name: value for name, value in contents["state_dict"].items() if "num_batches" not in name}
    return [index for index in module.seen if index[0] != "validation"], said, weights


def write(folder, case):
    module, *_ = fit(case, 1, path=folder / "cut.ckpt")
    return [index for index in module.seen if index[0] != "validation"]


def interleaved(ranks):
    """Returns the samples of all ranks by epoch, in the sampler's order."""
    samples = {}
    for batches in zip(*ranks, strict=True):
        for places in zip(*(batch[1] for batch in batches), strict=True):
            samples.setdefault(batches[0][0], []).extend(places)
    return samples


@pytest.mark.parametrize(("before", "after", "batch"), [(2, 1, 8), (2, 1, 4), (1, 2, 2), (2, 3, 4)])
def test_another_number_of_ranks(before, after, batch, tmp_path):
    """The order of samples is the same; with the same samples per step the weights too, except for rounding."""
    case = ("O0", 1, "batch", 3)

    def straight():
        return write(tmp_path, case)

    def resumed():
        return order(tmp_path, case, "cut.ckpt", batch, 12)

    first = run_ranks(straight, before, timeout=200.0)
    second = run_ranks(resumed, after, timeout=200.0)
    whole, rest = interleaved(first), interleaved([ranks[0] for ranks in second])
    done = 3 * before * BATCH
    assert rest[0][: SIZE - done] == whole[0][done:SIZE]
    assert len(rest[0]) - (SIZE - done) < after * batch
    if min(len(whole.get(1, [])), len(rest.get(1, []))) >= SIZE:
        assert rest[1][:SIZE] == whole[1][:SIZE]
    assert "written by" in "".join(second[0][1])
    assert f"resumed by {after}" in "".join(second[0][1])


class Plain(Net):
    """Draws no random numbers, and has no buffers that a batch changes."""

    def __init__(self):
        super().__init__()
        self.net[1], self.net[2] = torch.nn.LayerNorm(16), torch.nn.Identity()
        self.seldom.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.log("count", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=BATCH)
        return self._loss(*batch)


def one_step(path, accumulate, batch, *callbacks, strategy="ddp"):
    """Returns the weights after one step, resumed from ``path`` if it exists."""
    module = Plain()
    trainer = quiet_trainer(
        strategy=strategy, devices="auto", accumulate_grad_batches=accumulate, max_steps=1, callbacks=list(callbacks)
    )
    trainer.fit(module, DataLoader(Samples(SIZE), batch), ckpt_path=path if path.exists() else None)
    return {name: value.detach() for name, value in module.named_parameters()}


def test_a_window_is_finished_by_another_number_of_ranks(tmp_path):
    """The gradients of the accumulation are averaged over the ranks; the weights equal the uninterrupted run's up to rounding."""
    path = tmp_path / "cut.ckpt"
    straight, _ = run_ranks(one_step, 2, path, 4, 4, Saves("batch", 3, path), timeout=200.0)
    resumed = one_step(path, 4, 8, strategy="single")
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5)
        assert name.startswith("seldom") or not torch.equal(value, dict(Plain().named_parameters())[name])


def test_a_window_that_does_not_fit_is_computed_again_by_any_number_of_ranks(tmp_path):
    path = tmp_path / "cut.ckpt"
    run_ranks(one_step, 2, path, 4, 4, Saves("batch", 3, path), timeout=200.0)
    straight = run_ranks(one_step, 2, tmp_path / "none", 2, 4, timeout=200.0)
    by_two = run_ranks(one_step, 2, path, 2, 4, timeout=200.0)
    by_one = one_step(path, 2, 8, strategy="single")
    for name, value in straight[0].items():
        assert all(torch.equal(value, ranks[name]) for ranks in (straight[1], *by_two))
        torch.testing.assert_close(by_one[name], value, rtol=1e-4, atol=1e-5)
