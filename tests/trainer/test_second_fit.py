"""A Trainer's second fit continues the counts of the first, as in Lightning; trainer.reset() sets them to 0."""

from __future__ import annotations

import pytest
import torch

from fabricamp import Callback
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.optimizers import FusedSGD
from tests.small import Classifier, loader, quiet_trainer


class Places(Classifier):
    """Records the position of each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        return super().training_step(batch, batch_idx)


class Hooks(Callback):
    """Records the called hooks."""

    def __init__(self):
        self.called = []

    def on_fit_start(self, trainer, module):
        self.called.append("fit")

    def on_sanity_check_start(self, trainer, module):
        self.called.append("sanity")

    def on_train_start(self, trainer, module):
        self.called.append("train")

    def on_train_end(self, trainer, module):
        self.called.append("train end")


def fit(trainer, module=None, val=None):
    """Trains four batches an epoch; returns the positions of the steps."""
    module = module or Places()
    module.seen = []
    trainer.fit(module, loader(16), val)
    return module.seen


def test_at_its_limit_it_trains_nothing_and_says_so(caplog):
    hooks = Hooks()
    trainer = quiet_trainer(max_epochs=2, callbacks=hooks, enable_model_summary=True)
    fit(trainer)
    hooks.called.clear()
    caplog.clear()
    assert fit(trainer) == []
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)
    assert hooks.called == ["fit"]
    assert "Nothing left to train at step 8: max_epochs=2 reached already" in caplog.text


def test_with_a_higher_limit_it_goes_on():
    hooks, module = Hooks(), Places()
    trainer = quiet_trainer(max_epochs=1, callbacks=hooks)
    fit(trainer, module, loader(4))
    before = trainer.optimizers[0]
    trainer.fit_loop.max_epochs = 2
    assert fit(trainer, module, loader(4)) == [(1, 0, 4), (1, 1, 5), (1, 2, 6), (1, 3, 7)]
    assert hooks.called == ["fit", "sanity", "train", "train end"] * 2
    assert trainer.optimizers[0] is not before


@pytest.mark.parametrize("ends", ["max_steps", "stop"])
def test_an_epoch_that_a_limit_or_a_stop_ended_counts(ends):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if ends == "stop" and trainer.global_step == 6:
                trainer.should_stop = True

    trainer = quiet_trainer(max_epochs=-1, max_steps=6 if ends == "max_steps" else 9, callbacks=Stop())
    assert fit(trainer)[-1] == (1, 1, 5)
    trainer.fit_loop.epoch_loop.max_steps = 9
    assert fit(trainer) == [(2, 0, 6), (2, 1, 7), (2, 2, 8)]


def test_checkpoints_and_logs_go_on_by_the_same_count(tmp_path):
    best = ModelCheckpoint(tmp_path, save_top_k=-1)
    trainer = quiet_trainer(max_epochs=1, callbacks=best, enable_checkpointing=True)
    fit(trainer)
    trainer.fit_loop.max_epochs = 2
    fit(trainer)
    fit(trainer)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


def test_a_checkpoint_says_where_to_go_on(tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    fit(trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer.fit_loop.max_epochs = 3
    fit(trainer)
    module = Places()
    trainer.fit(module, loader(16), ckpt_path=tmp_path / "one.ckpt")
    assert module.seen[0] == (1, 0, 4)
    assert trainer.global_step == 12


def test_after_reset_it_begins_anew():
    trainer = quiet_trainer(max_epochs=1)
    fit(trainer)
    trainer.reset()
    assert (trainer.current_epoch, trainer.global_step) == (0, 0)
    assert fit(trainer)[0] == (0, 0, 0)


def test_in_workers_too():
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="ddp", start_method="fork")
    trainer.fit(Classifier(), loader(16))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Classifier(), loader(16))
    assert (trainer.current_epoch, trainer.global_step) == (3, 6)


def test_the_optimizers_of_the_fit_are_there_behind_an_evaluation(tmp_path):
    module, trainer = Classifier(), quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(16))
    optimizer = trainer.optimizers[0]
    trainer.validate(module, loader(4), verbose=False)
    assert trainer.optimizers == [optimizer]
    trainer.save_checkpoint(tmp_path / "behind.ckpt")
    (saved,) = torch.load(tmp_path / "behind.ckpt", weights_only=True)["optimizer_states"]
    assert torch.equal(saved["state"][0]["momentum_buffer"], optimizer.state_dict()["state"][0]["momentum_buffer"])
    trainer.validate(Classifier(), loader(4), verbose=False)
    assert trainer.optimizers == []


class TwoHalves(Classifier):
    """Manual optimization with two optimizers and dropout; raises once, at the point ``fails``."""

    def __init__(self, fails=""):
        super().__init__()
        self.automatic_optimization = False
        self.dropout, self.fails = torch.nn.Dropout(0.5), fails

    def fail_in(self, place):
        if self.fails == place and self.global_step >= 2:
            self.fails = ""
            raise ValueError(place)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = torch.nn.functional.cross_entropy(self.net(self.dropout(batch[0])), batch[1])
            self.manual_backward(loss)
            self.fail_in("a step")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def on_validation_epoch_start(self):
        self.fail_in("validation")

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.net[0], self.net[2])]


@pytest.mark.parametrize("place", ["a step", "validation"])
def test_a_module_whose_fit_failed_goes_on_as_a_new_one_does(place, tmp_path):
    def fitted(trainer, module, ckpt_path=None):
        torch.manual_seed(1)
        trainer.fit(module, loader(16), loader(4), ckpt_path=ckpt_path)
        return list(module.parameters())

    def new_trainer(folder):
        keeper = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
        return quiet_trainer(max_epochs=2, callbacks=keeper, enable_checkpointing=True, num_sanity_val_steps=0)

    module, trainer = TwoHalves(place), new_trainer(tmp_path / "failed")
    with pytest.raises(ValueError, match=place):
        fitted(trainer, module)
    assert all(one.training for one in module.modules())
    assert all(one.requires_grad for one in module.parameters())
    again = fitted(trainer, module, "last")
    straight = fitted(new_trainer(tmp_path / "straight"), TwoHalves())
    assert all(map(torch.equal, again, straight))


class FailsInAWindow(Classifier):
    """Steps after ``every`` micro-batches; raises once, after the fifth micro-batch's backward."""

    def __init__(self, every, fails=True, *, automatic=False, fused=False):
        super().__init__()
        self.automatic_optimization, self.every, self.fused = automatic, every, fused
        self.left = 5 if fails else 0

    def configure_optimizers(self):
        return (FusedSGD if self.fused else torch.optim.SGD)(self.parameters(), lr=0.1)

    def on_after_backward(self):
        self.left -= 1
        if self.left == 0:
            raise ValueError("the fifth")

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None


@pytest.mark.parametrize("precision", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize(
    ("automatic", "every", "again", "fused"),
    [
        (False, 1, "same trainer", False),
        (False, 3, "new trainer", True),
        (True, 1, "new trainer", False),
        (True, 3, "same trainer", True),
    ],
)
def test_after_a_failed_fit_the_next_one_begins_without_gradients(precision, automatic, every, again, fused):
    def new_trainer():
        options = {"accumulate_grad_batches": every} if automatic else {}
        return quiet_trainer(max_epochs=2, precision=precision, **options)

    module, trainer = FailsInAWindow(every, automatic=automatic, fused=fused), new_trainer()
    with pytest.raises(ValueError, match="the fifth"):
        trainer.fit(module, loader(24))
    new = FailsInAWindow(every, fails=False, automatic=automatic, fused=fused)
    new.load_state_dict(module.state_dict())
    (trainer if again == "same trainer" else new_trainer()).fit(module, loader(24))
    new_trainer().fit(new, loader(24))
    assert all(map(torch.equal, module.parameters(), new.parameters()))
