"""The snapshot of a GPU's memory: the batches in it, and the Python frames of each allocation."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from fabricamp.profilers import MemoryProfiler, memory
from tests.small import Classifier, loader, quiet_trainer

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(
    ("options", "batches", "window"),
    [
        ({}, 8, (0, 3)),
        ({}, 2, (0, 2)),
        ({"wait": 2, "active": 1}, 8, (2, 3)),
        ({"wait": 7, "active": 5}, 8, (7, 8)),
        ({"wait": 3, "active": None}, 8, (3, 8)),
        ({"wait": 8}, 8, (8, 8)),
        ({"wait": 9}, 8, None),
    ],
)
def test_the_window_has_the_batches_that_were_chosen(options, batches, window, monkeypatch, tmp_path):
    """torch's recording needs a GPU, so this test only records when it begins and ends."""
    done, seen = [], []
    monkeypatch.setattr(memory, "record_memory", lambda entries: seen.append((entries, len(done))))
    monkeypatch.setattr(memory, "write_memory", lambda path: seen.append((path.name, len(done))))
    monkeypatch.setattr(memory, "forget_memory", lambda: seen.append(("forgotten", len(done))))

    class Counted(Classifier):
        def training_step(self, batch, batch_idx):
            done.append(batch_idx)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_steps=batches)
    trainer.profiler = MemoryProfiler(tmp_path, max_entries=10, **options)
    trainer.fit(Counted(), loader(32))
    if window is None:
        assert not seen
    else:
        assert seen == [(10, window[0]), ("fit-memory.pickle", window[1]), ("forgotten", window[1])]


def snapshot(path):
    with Path(path).open("rb") as file:
        return pickle.load(file)


class Sized(Classifier):
    """Allocates 8 MiB times the number of batches so far in each batch."""

    def training_step(self, batch, batch_idx):
        torch.empty((batch_idx + 1) << 23, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("precision", ["O0", "O2"])
@pytest.mark.parametrize(("profiler", "sizes"), [("memory", {1, 2, 3}), (MemoryProfiler(wait=2, active=1), {3})])
def test_a_snapshot_names_the_steps_that_asked_for_memory(profiler, sizes, precision, tmp_path, caplog):
    trainer = quiet_trainer(accelerator="gpu", max_steps=5, profiler=profiler, precision=precision)
    trainer.profiler.dirpath = tmp_path
    trainer.fit(Sized(), loader(32))
    found = snapshot(tmp_path / "fit-memory.pickle")
    assert found["segments"]
    (events, *_) = [one for one in found["device_traces"] if one]
    asked = [one for one in events if one["action"] == "alloc" and one["size"] >= 1 << 23]
    assert {one["size"] >> 23 for one in asked} == sizes
    assert all("training_step" in {frame["name"] for frame in one["frames"]} for one in asked)
    assert f"memory of {len(sizes)} batches: {tmp_path / 'fit-memory.pickle'}" in caplog.text


@pytest.mark.gpu
@on_a_gpu
def test_a_lack_of_memory_is_in_the_snapshot(tmp_path, caplog):
    class Greedy(Classifier):
        def training_step(self, batch, batch_idx):
            self.too_much = torch.empty(2**50, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.cuda.OutOfMemoryError):
        quiet_trainer(accelerator="gpu", profiler=MemoryProfiler(tmp_path)).fit(Greedy(), loader(32))
    (events, *_) = [one for one in snapshot(tmp_path / "fit-memory.pickle")["device_traces"] if one]
    assert any(one["action"] == "oom" and one["size"] >= 2**50 for one in events)
    assert "fit-memory.pickle" in caplog.text
