"""Records a training's logged values, final weights and predictions, under Lightning and under fabricamp."""

import sys
from pathlib import Path

import torch


class Records:
    """A base class for a script's own callback, listed before Lightning's ``Callback``."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_batch_end(self, trainer, module, *batch):
        self._write("step", trainer)

    def on_validation_end(self, trainer, module):
        self._write("validation", trainer)

    def on_train_epoch_end(self, trainer, module):
        self._write("epoch", trainer)

    def on_train_end(self, trainer, module):
        self._write("end", trainer)
        weights = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        number = len(list(Path().glob("training-*.pt")))
        torch.save({"rows": self.rows, "weights": weights}, f"training-{number}.pt")

    def _write(self, where, trainer):
        values = {
            f"{kind}/{name}": float(value)
            for kind in ("callback_metrics", "logged_metrics")
            for name, value in getattr(trainer, kind).items()
        }
        self.rows.append({"where": where, "epoch": trainer.current_epoch, "step": trainer.global_step, **values})


def main(fit, predict):
    """Calls ``fit``, or in a second process ``predict``, which returns tensors; both use the current folder for their files."""
    torch.set_num_threads(1)
    if sys.argv[1] == "fit":
        fit()
    else:
        torch.save(predict(), "predictions.pt")
