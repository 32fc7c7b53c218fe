"""Training and evaluation mode: before, during and after every evaluation, and the module's own choice."""

from __future__ import annotations

import pytest
import torch

from tests.small import Classifier, loader, quiet_trainer


class Modes(Classifier):
    """Has a submodule that stays in evaluation mode; records both modes in every step."""

    def __init__(self):
        super().__init__()
        self.still = torch.nn.Dropout().eval()
        self.notes = set()

    def _note(self, step):
        self.notes.add((step, self.training, self.net.training, self.still.training))

    def training_step(self, batch, batch_idx):
        self._note("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._note("validation")

    def test_step(self, batch, batch_idx):
        self._note("test")

    def predict_step(self, batch, batch_idx):
        self._note("predict")


def run(module, kind):
    if kind == "validation":  # within a fit
        quiet_trainer(max_epochs=1, val_check_interval=1).fit(module, loader(8), loader(4))
    else:
        getattr(quiet_trainer(), kind)(module, loader(4))
    return module


KINDS = ["validation", "test", "predict"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_gets_its_own_mode_back(kind):
    module = run(Modes(), kind)
    training = {("train", True, True, False)} if kind == "validation" else set()
    assert module.notes == {(kind, False, False, False), *training}
    assert (module.training, module.net.training, module.still.training) == (True, True, False)
    module = run(Modes().eval(), "test")
    assert not module.training


@pytest.mark.parametrize("kind", ["validation", "test"])
def test_the_module_may_choose_what_switches(kind):
    def keeps_dropout(self):
        self.eval()
        self.still.train()

    class Chooses(Modes):
        pass

    def back(self):
        getattr(Modes, f"on_{kind}_model_train")(self)  # like super(): sets the complete module to training mode
        self.went_back = True

    setattr(Chooses, f"on_{kind}_model_eval", keeps_dropout)
    setattr(Chooses, f"on_{kind}_model_train", back)
    module = run(Chooses(), kind)
    assert module.went_back
    assert (kind, False, False, True) in module.notes
    assert {note for note in module.notes if note[0] == "train"} <= {("train", True, True, True)}
    assert (module.training, module.still.training) == (True, True)


def test_freeze_and_unfreeze():
    module = Classifier()
    module.freeze()
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())
