"""on_world_change="keep_global_batch": a step keeps its samples by another accumulate_grad_batches, or the run is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp.callbacks import GradientAccumulationScheduler
from fabricamp.data import CombinedLoader
from fabricamp.engine.saved.world_change import StepSize, micro_batches
from fabricamp.errors import CheckpointError, ConfigError
from tests.small import Classifier, data, loader, quiet_trainer

SIZE = 64


def trainer_for(**options):
    return quiet_trainer(**{"max_steps": 3, "on_world_change": "keep_global_batch", **options})


def fit(batch, path=None, **options):
    module, trainer = Classifier(), trainer_for(**options)
    if path is not None:
        module.on_fit_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(module, loader(SIZE, batch))
    return trainer, module


def resume(path, batch, **options):
    module, trainer = Classifier(), trainer_for(**options)
    trainer.fit(module, loader(SIZE, batch), ckpt_path=path)
    return trainer, module


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a checkpoint after one step of 16 samples, made by one process with two micro-batches of 8."""
    path = tmp_path_factory.mktemp("written") / "one.ckpt"
    fit(8, path, accumulate_grad_batches=2, max_steps=1)
    return path


@pytest.mark.parametrize(("batch", "given", "accumulated"), [(8, 2, 2), (4, 2, 4), (16, 2, 1), (8, 5, 2), (2, 1, 8)])
def test_other_batches_make_the_same_step(written, batch, given, accumulated):
    straight, whole = fit(16, max_steps=3)
    trainer, module = resume(written, batch, accumulate_grad_batches=given)
    assert trainer.accumulate_grad_batches == accumulated
    assert trainer.global_step == straight.global_step == 3
    for one, other in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_by_default_the_number_that_was_given_counts(written):
    trainer, _ = resume(written, 4, accumulate_grad_batches=2, on_world_change=None)
    assert trainer.accumulate_grad_batches == 2


def test_what_no_number_makes_is_refused_with_the_numbers(written):
    with pytest.raises(ConfigError) as error:
        resume(written, 3)
    message = str(error.value)
    assert "2 micro-batch(es) x 1 process(es) x batches of 8 = 16 samples" in message
    assert "1 process(es) x batches of 3 makes as many; change the loader's batch_size" in message


def test_combined_loaders_keep_each_ones_samples(tmp_path):
    path = tmp_path / "two.ckpt"

    def combined(first, second):
        return CombinedLoader({"a": loader(SIZE, first), "b": loader(SIZE, second)}, "min_size")

    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    module, trainer = Net(), trainer_for(max_steps=1)
    module.on_fit_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(module, combined(8, 4))
    going_on = trainer_for(max_steps=2)
    going_on.fit(Net(), combined(4, 2), ckpt_path=path)
    assert going_on.accumulate_grad_batches == 2
    with pytest.raises(
        ConfigError, match=r"batches of 8 and 4 = 8 and 4 samples, and no number of .* batches of 4 and 4"
    ):
        trainer_for().fit(Net(), combined(4, 4), ckpt_path=path)
    with pytest.raises(ConfigError, match="no number of micro-batches"):
        trainer_for().fit(Classifier(), loader(SIZE, 4), ckpt_path=path)


class Manual(Classifier):
    automatic_optimization = False


def test_what_cannot_be_counted_is_refused_before_the_first_batch(tmp_path):
    batches = [next(iter(loader(8, 4)))] * 4
    for module, given, options, said in (
        (Classifier(), batches, {}, "the train loader has no batch_size"),
        (Classifier(), DataLoader(data(8), batch_size=None), {}, "the train loader has no batch_size"),
        (Manual(), loader(), {}, "automatic optimization only"),
        (
            Classifier(),
            loader(),
            {"reload_dataloaders_every_n_epochs": 2},
            "reload_dataloaders_every_n_epochs=2 may change",
        ),
        (
            Classifier(),
            loader(),
            {"callbacks": [GradientAccumulationScheduler({0: 2})]},
            "on_world_change='keep_global_batch'",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            trainer_for(**options).fit(module, given)


def test_a_checkpoint_without_the_numbers_is_refused(written, tmp_path):
    path = tmp_path / "list.ckpt"
    module, trainer = Classifier(), quiet_trainer(max_steps=1)
    module.on_fit_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(module, [next(iter(loader(8, 4)))] * 4)
    with pytest.raises(ConfigError, match=r"list.ckpt does not hold the number of samples in its steps"):
        resume(path, 4)
    content = torch.load(written, weights_only=True)
    content["loops"]["fit"]["step_size"]["processes"] = 0
    content.pop("checksum")
    torch.save(content, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError, match="step_size"):
        resume(tmp_path / "odd.ckpt", 4)


def test_a_window_that_was_open_goes_on_in_other_numbers(tmp_path):
    """One finished micro-batch of two becomes two of four: no sample is trained on twice or left out."""
    path = tmp_path / "open.ckpt"
    seen = []

    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(batch[1])
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2 and self.trainer.ckpt_path is None:
                self.trainer.save_checkpoint(path)

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 and self.trainer.ckpt_path is None else None

    trainer_for(accumulate_grad_batches=2, max_epochs=1, max_steps=-1).fit(Net(), loader(SIZE, 8))
    assert len(seen) == 3
    module, trainer = Net(), trainer_for(max_epochs=1, max_steps=-1)
    trainer.fit(module, loader(SIZE, 4), ckpt_path=path)
    assert torch.equal(torch.cat(seen), data(SIZE).tensors[1])
    straight, whole = fit(16, max_epochs=1, max_steps=-1)
    assert trainer.global_step == straight.global_step == 4
    for one, other in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_windows_are_whole_wherever_a_run_goes_on(tmp_path):
    """After 8 samples, batches of 8 begin in the middle of an accumulation of two, which must not end there."""
    path = tmp_path / "one.ckpt"
    fit(4, path, accumulate_grad_batches=2, max_steps=1)
    steps = []

    class Net(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            steps.append(self.global_step)

    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Net(), loader(SIZE, 8), ckpt_path=path)
    assert steps == [1, 2, 2, 3, 3, 4, 5]


@pytest.mark.parametrize(
    ("before", "here", "number", "others"),
    [
        ((2, 2, [8]), (2, 1, [8]), 4, ""),
        ((2, 2, [8]), (2, 4, [8]), 1, ""),
        ((1, 8, [3]), (1, 2, [6]), 2, ""),
        ((2, 2, [8]), (2, 3, [8]), 0, "start 1 or 2 or 4 process"),
        ((1, 2, [8]), (1, 4, [8]), 0, "start 1 or 2 process"),
        ((6, 4, [8]), (1, 5, [8]), 0, "start 2 or 3 or 4 or 6 process"),
        ((1, 2, [8]), (1, 2, [5]), 0, "makes as many; change"),
        ((2, 2, [8, 4]), (1, 1, [8, 4]), 4, ""),
        ((2, 2, [8, 4]), (1, 1, [8, 8]), 0, "change the loader's batch_size"),
    ],
)
def test_micro_batches_by_the_numbers(before, here, number, others):
    if number:
        assert micro_batches(StepSize(*before), StepSize(*here)) == number
        return
    with pytest.raises(ConfigError) as error:
        micro_batches(StepSize(*before), StepSize(*here))
    assert others in str(error.value)
