"""``bf16-true``, ``16-true`` and ``64-true``: inputs, outputs and torch's default dtype in the step are the module's dtype."""

import pytest
import torch
from torch.nn import functional as F

from fabricamp import TrainingModule
from tests.small import loader, quiet_trainer

DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64, "64": torch.float64}


class Looks(TrainingModule):
    """Records the dtypes in each step; ``scale`` is a loss module with its own weight."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.scale = torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))
        self.silent = torch.nn.Identity()

    def configure_model(self):
        self.seen["configure_model"] = {torch.get_default_dtype()}
        self.net = torch.nn.Linear(8, 3)
        self.made_as = self.net.weight.dtype

    def look(self, place, batch):
        x, y = batch
        assert y.dtype is torch.int64
        output = self.silent(self.net(self.silent(x)))
        loss = self.scale(output, F.one_hot(y, 3).to(output.dtype))
        made = torch.zeros(2)
        dtypes = {torch.get_default_dtype(), x.dtype, output.dtype, loss.dtype, made.dtype, self.net.weight.dtype}
        self.seen[place] = dtypes
        return output, loss

    def training_step(self, batch, batch_idx):
        loss = self.look("training_step", batch)[1]
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.look("validation_step", batch)[1])

    def test_step(self, batch, batch_idx):
        self.look("test_step", batch)

    def predict_step(self, batch, batch_idx):
        return self.look("predict_step", batch)[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


PLACES = ["configure_model", "training_step", "validation_step", "test_step", "predict_step"]


@pytest.mark.parametrize("precision", DTYPES)
def test_all_of_the_step_is_of_one_dtype(precision):
    module, trainer, dtype = Looks(), quiet_trainer(precision=precision, max_epochs=1), DTYPES[precision]
    trainer.fit(module, loader(8), loader(4))
    assert module.made_as is dtype
    trainer.test(module, loader(4), verbose=False)
    outputs = trainer.predict(module, loader(4))
    assert module.seen == {place: {dtype} for place in PLACES}
    assert outputs[0].dtype is dtype
    assert torch.get_default_dtype() is torch.float32
    assert module.scale.pos_weight.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_level_o3_keeps_the_boundary():
    module = Looks()
    quiet_trainer(precision="O3", max_epochs=1).fit(module, loader(8))
    assert module.made_as is torch.float32
    assert module.seen["training_step"] == {torch.float32, torch.float16}  # weights are half, everything else is fp32


@pytest.mark.parametrize("place", ["configure_model", "training_step", "validation_step"])
def test_the_default_is_put_back_behind_an_error(place):
    class Raises(Looks):
        pass

    def fail(self, *_):
        assert torch.get_default_dtype() is torch.bfloat16
        raise ValueError(place)

    setattr(Raises, place, fail)
    with pytest.raises(ValueError, match=place):
        quiet_trainer(precision="bf16-true", max_epochs=1).fit(Raises(), loader(8), loader(4))
    assert torch.get_default_dtype() is torch.float32


def test_a_step_within_another_default_puts_that_back():
    torch.set_default_dtype(torch.float64)
    try:
        module = Looks()
        quiet_trainer(precision="bf16-true", max_epochs=1).fit(module, loader(8))
        assert torch.get_default_dtype() is torch.float64
        assert module.seen["training_step"] == {torch.bfloat16}
    finally:
        torch.set_default_dtype(torch.float32)
