"""The user's transfer hooks that run ahead of their steps: exact resume, and attributes that they must not read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import ConfigError, Trainer
from fabricamp.data import Feed, move_to_device
from fabricamp.engine.source import reads
from tests.small import QUIET, Classifier, data, loader, quiet_trainer
from tests.trainer.test_exact_resume import DATA, Net, assert_exact


def before(self, batch, dataloader_idx):
    """Adds noise of every generator, drawn while batches are moved ahead."""
    if isinstance(batch, dict):
        return {key: before(self, one, dataloader_idx) for key, one in batch.items()}
    return [batch[0] + torch.rand(()) + random.random() + float(np.random.rand()), *batch[1:]]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(
    ("kind", "done", "accumulate"), [("shuffled", 8, 3), ("a stream that draws", 5, 1), ("two loaders", 10, 1)]
)
def test_hooks_that_draw_ahead_go_on_exactly(kind, done, accumulate, ahead, tmp_path, monkeypatch):
    """Makes the feed prefetch on a CPU as on a GPU."""
    monkeypatch.setattr(Net, "on_before_batch_transfer", before, raising=False)

    def feed(*args, **options):
        return Feed(*args, **{**options, "prefetch": ahead})

    monkeypatch.setattr("fabricamp.engine.source.Feed", feed)
    validates = 1.0 if "stream" in kind else 0.5
    assert_exact(
        tmp_path, DATA[kind], ("batch", done), accumulate_grad_batches=accumulate, val_check_interval=validates
    )


def test_a_run_that_was_resumed_can_be_cut_again(tmp_path):
    """A resumed pass records the batches that it reads again as the uninterrupted pass does."""

    def batches(feed, count=None):
        return [batch.item() for batch, _ in zip(feed, range(99 if count is None else count), strict=False)]

    def feed():
        return Feed(
            DataLoader(torch.arange(9.0)), prepare=lambda one: one + torch.rand(()).double(), prefetch=2, hooked=True
        )

    def cut(one, count, done):
        """Returns the values of some batches, with a random number for each step, and the state after them."""
        found = []
        for batch in one:
            found.append((batch.item(), torch.rand(()).item()))
            if len(found) == count:
                return found, one.state_dict(done), torch.get_rng_state()
        return found, None, None

    torch.manual_seed(0)
    straight, _, _ = cut(feed(), None, 9)
    torch.manual_seed(0)
    first, state, rng = cut(feed(), 3, 3)
    found = first
    for done in (4, 5):
        torch.manual_seed(77)
        going = feed()
        assert going.load_state_dict(state) == done - 1
        torch.set_rng_state(rng)
        running = going.starting_at(done - 1)
        found = [*found, (next(running).item(), torch.rand(()).item())]
        state, rng = going.state_dict(done), torch.get_rng_state()
    assert found == straight[:5]


def noted(module):
    """Records the stream of a hook and the number of steps; returns the global step if ``looks`` is set."""
    module.seen.append((torch.cuda.current_stream(), module.trainer.state.global_step))
    return module.global_step if module.looks else 0


def reads_nothing(self, batch, device, dataloader_idx):
    noted(self)
    return move_to_device(batch, device)


def reads_at_once(self, batch, device, dataloader_idx):
    noted(self)
    return move_to_device(batch, device) if self.global_step >= 0 else None


def reads_within(self, batch, device, dataloader_idx):
    return [one for one in batch if self.trainer.global_step >= 0]


def test_what_reads_the_step_is_found():
    assert [reads(one, "global_step") for one in (reads_at_once, reads_within, reads_nothing, print)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_hook_that_runs_ahead_may_not_read_the_step():
    trainer = quiet_trainer()
    trainer.state.ahead = True
    with pytest.raises(ConfigError, match=r"on_after_batch_transfer, or give Trainer\(prefetch_batches=0\)"):
        _ = trainer.global_step


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    """On a GPU hooks run ahead, on a side stream."""

    def fit(self, hook, ahead=1, make=loader, *, looks=False, **options):
        class Moving(Classifier):
            transfer_batch_to_device = hook
            stream = None  # the stream of the steps

            def on_train_start(self):
                Moving.stream = torch.cuda.current_stream()

            def training_step(self, batch, batch_idx):
                batch[0] *= 2  # an edit in place changes only this batch
                return super().training_step(batch, batch_idx)

        module = Moving()
        module.seen, module.looks = [], looks
        given = {**QUIET, "accelerator": "gpu", "max_epochs": 2, "prefetch_batches": ahead}
        Trainer(**given, **options).fit(module, make())
        assert Moving.stream is not None
        return [(stream == Moving.stream, step) for stream, step in module.seen], list(module.parameters())

    @pytest.mark.parametrize("precision", ["O0", "O2"])
    def test_the_bits_are_those_of_batches_moved_at_their_step(self, precision):
        here, expected = self.fit(reads_nothing, 0, precision=precision)
        assert all(same for same, _ in here)
        for ahead in (1, 2):
            streams, found = self.fit(reads_nothing, ahead, precision=precision)
            assert not any(same for same, _ in streams)
            assert [step for _, step in streams[:8]] == [max(0, index - ahead) for index in range(8)]
            assert all(map(torch.equal, found, expected))

    def test_batches_of_other_lengths(self):
        def make():
            x, y = data(30).tensors
            return [
                [x[start:stop].clone().pin_memory(), y[start:stop]]
                for start, stop in ((0, 3), (3, 20), (20, 21), (21, 30))
            ]

        _, expected = self.fit(reads_nothing, 0, make)
        for ahead in (1, 2):
            assert all(map(torch.equal, self.fit(reads_nothing, ahead, make)[1], expected))

    def test_one_that_reads_the_step_runs_at_it_and_a_line_says_so(self, caplog):
        streams, _ = self.fit(reads_at_once)
        assert all(same for same, _ in streams)
        assert [step for _, step in streams] == list(range(16))
        assert "Moving.transfer_batch_to_device reads global_step" in caplog.text

    def test_one_that_reads_it_out_of_sight_is_refused(self):
        with pytest.raises(ConfigError, match="a transfer hook that runs ahead"):
            self.fit(reads_nothing, looks=True)
        self.fit(reads_nothing, ahead=0, looks=True)
