"""``self.optimizers()`` and ``self.lr_schedulers()`` return the same objects in every hook and after fit."""

import pytest
import torch
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from tests.small import Classifier, loader, quiet_trainer


class Asks(Classifier):
    """Records the returned objects by hook."""

    def __init__(self, *, manual):
        super().__init__()
        self.automatic_optimization = not manual
        self.seen = {}

    def configure_optimizers(self):
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.made, 100)
        return [self.made], [self.schedule]

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def note(self, place):
        self.seen[place] = self.optimizers(), self.lr_schedulers()


PLACES = [
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_validation_start",
    "on_train_epoch_end",
    "on_fit_end",
    "teardown",
]
for place in PLACES:
    setattr(Asks, place, lambda self, *_, place=place: self.note(place))


def fitted(*, manual):
    module, trainer = Asks(manual=manual), quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(), loader())
    return module, trainer


@pytest.mark.parametrize("manual", [False, True])
def test_one_object_from_the_first_hook_to_behind_fit(manual):
    module, trainer = fitted(manual=manual)
    module.note("behind fit")
    trainer.validate(module, loader(), verbose=False)
    module.note("behind validate")
    quiet_trainer().test(module, loader(), verbose=False)
    module.note("behind another Trainer's test")
    assert module.seen.keys() >= {*PLACES, "training_step"}
    for place, (optimizer, schedule) in module.seen.items():
        assert optimizer is module.optimizers(), place
        assert schedule is module.schedule, place
    assert module.optimizers().optimizer is module.made
    assert module.optimizers(use_pl_optimizer=False) is module.made


def test_another_fit_has_its_own():
    module, trainer = fitted(manual=False)
    first = module.optimizers()
    trainer.fit(module, loader())
    assert module.optimizers() is not first
    assert module.optimizers().optimizer is module.made


def test_a_step_behind_fit_moves_the_weights():
    module, _ = fitted(manual=True)
    before = module.net[0].weight.clone()
    optimizer = module.optimizers()
    optimizer.zero_grad()
    F.cross_entropy(module.net(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    assert not torch.equal(before, module.net[0].weight)


@pytest.mark.parametrize("manual", [False, True])
def test_a_step_before_training_is_refused(manual):
    class Early(Asks):
        def on_fit_start(self):
            self.optimizers().step()

    with pytest.raises(ConfigError, match="training_step"):
        quiet_trainer(max_epochs=1).fit(Early(manual=manual), loader())
