"""The state of a run as sections: each is saved and restored separately, from rank 0 or per rank, in one dict."""

from __future__ import annotations

import collections
import os
import sys

import pytest
import torch

from fabricamp import Callback, CheckpointError, launch
from fabricamp.checkpoint.formats import upgraded
from fabricamp.checkpoint.record import Part, Record, Section
from fabricamp.strategies import DDP, Strategy
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer


class Counter:
    """A counter that refuses values other than numbers."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"] + 0


class Own(Section):
    """A value of each rank."""

    name = "own"
    per_rank = True

    def __init__(self, value):
        self.value = value

    def save(self):
        return {"loops.fit.own": self.value, "own": -self.value}

    def restore(self, checkpoint, path):
        self.value = checkpoint["loops"]["fit"]["own"][-1]


def two_sections(strategy, value):
    whole, own = Counter(value), Own(value)
    return Record(strategy, [Part("counter", "loops.fit.counter", whole), own]), whole, own


def test_whole_sections_are_rank_0s_and_per_rank_ones_a_list():
    def run():
        strategy = DDP()
        strategy.setup_environment(launch.detect(), torch.device("cpu"))
        return two_sections(strategy, 1 + int(os.environ["RANK"]))[0].save()

    content, other = run_ranks(run, 2, backend=None)
    assert content.pop("format") == 3
    assert content["loops"] == {"fit": {"counter": {"count": 1}, "own": [1, 2]}}
    assert content["own"] == other["own"] == [-1, -2]
    assert content.keys() == {"fabricamp_version", "torch_version", "loops", "own"}


def test_sections_are_saved_and_given_back_by_name():
    record, whole, own = two_sections(Strategy(), 3)
    content = record.save()
    assert record.save("own")["loops"] == {"fit": {"own": [3]}}
    whole.count = own.value = 0
    record.restore(content, "a.ckpt", "own")
    assert (whole.count, own.value) == (0, 3)
    record.restore(content, "a.ckpt")
    assert (whole.count, own.value) == (3, 3)
    record.restore({**content, "loops": {"fit": {"own": [4]}}}, "a.ckpt")  # another library's file
    assert (whole.count, own.value) == (3, 4)


def test_what_cannot_be_given_back_names_file_and_section():
    record, *_ = two_sections(Strategy(), 3)
    content = record.save()
    content["loops"]["fit"]["counter"] = {"count": "three"}
    with pytest.raises(CheckpointError, match=r"a\.ckpt does not fit: its counter cannot be restored here \(TypeError"):
        record.restore(content, "a.ckpt")


def test_each_section_of_a_run_is_named_where_it_is_damaged(tmp_path):
    class Counts(Callback):
        def state_dict(self):
            return {"seen": 1}

        def load_state_dict(self, state_dict):
            self.seen = state_dict["seen"]

    trainer = quiet_trainer(max_epochs=1, callbacks=Counts())
    trainer.fit(Classifier(), loader(8))
    record = trainer.record
    damage = {
        "optimizers": ("optimizer_states", [{}]),
        "learning-rate schedules": ("lr_schedulers", 1),
        "callbacks": ("callbacks", {trainer.callbacks[0].state_key: {}}),
        "loggers": ("loggers", 1),
        "counters": ("loops", 1),
    }
    for name, (key, value) in damage.items():
        with pytest.raises(CheckpointError, match=f"a.ckpt does not fit: its {name} cannot be restored"):
            record.restore({**record.save(), key: value}, "a.ckpt", name)


class Counted:
    """How often some functions are called in the block, however the callers got them."""

    def __init__(self, *functions):
        self.names = {function.__code__: function.__qualname__ for function in functions}
        self.calls = collections.Counter()

    def __enter__(self):
        sys.setprofile(self._note)
        return self.calls

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event == "call" and frame.f_code in self.names:
            self.calls[self.names[frame.f_code]] += 1


class Decays(Classifier):
    """Has a schedule, whose state is restored too."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Saves(Callback):
    """Saves at the end of training, where a half module is half still."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_a_resume_makes_one_record_and_converts_the_file_once(tmp_path):
    first = tmp_path / "a.ckpt"
    quiet_trainer(max_epochs=1, precision="O2", callbacks=Saves(first)).fit(Decays(), loader(8))
    resumed = quiet_trainer(max_epochs=2, precision="O2", callbacks=Saves(tmp_path / "b.ckpt"))
    with Counted(Record.__init__, Record.restore, upgraded) as calls:
        resumed.fit(Decays(), loader(8), ckpt_path=str(first))
    assert calls.pop("Record.restore") >= 4  # each part as soon as it is there
    assert calls == {"Record.__init__": 1, "upgraded": 1}
    # Made before there were optimizers, schedules and half weights, the record saves those of now.
    saved = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["state"]
    assert saved["lr_schedulers"][0]["last_epoch"] == 2
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}


def test_the_record_saves_the_counters_that_a_reset_has_replaced(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.reset()
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    steps = [torch.load(tmp_path / name, weights_only=True)["global_step"] for name in ("a.ckpt", "b.ckpt")]
    assert steps == [2, 0]
