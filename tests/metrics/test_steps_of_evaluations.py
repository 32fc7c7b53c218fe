"""Training and validation log one name with on_step and on_epoch: callbacks and loggers see the values of Lightning 2.6.6."""

import torch

from fabricamp import Callback, Trainer, TrainingModule


class Model(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log("loss", float(batch_idx), on_step=True, on_epoch=True)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", 10.0 + batch_idx, on_step=True, on_epoch=True)
        self.log("val", 20.0 + batch_idx, on_step=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Reads(Callback):
    def __init__(self):
        self.seen = {}

    def read(self, where, trainer):
        self.seen[where] = [
            {name: float(value) for name, value in values.items()}
            for values in (trainer.callback_metrics, trainer.logged_metrics)
        ]

    def on_validation_end(self, trainer, module):
        self.read("validation", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.read("epoch", trainer)


def test_callbacks_keep_the_training_steps_value_and_loggers_the_validations(tmp_path):
    reads = Reads()
    loader = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        num_sanity_val_steps=0,
        callbacks=[reads],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader, loader)

    callbacks, loggers = reads.seen["validation"]
    assert callbacks == {"loss": 10.5, "loss_epoch": 10.5, "loss_step": 1.0, "val": 20.5, "val_epoch": 20.5}
    assert loggers == {"loss_step": 11.0, "loss_epoch": 10.5, "val_step": 21.0, "val_epoch": 20.5}
    callbacks, loggers = reads.seen["epoch"]
    assert callbacks == {"loss": 0.5, "loss_epoch": 0.5, "loss_step": 1.0, "val": 20.5, "val_epoch": 20.5}
    assert loggers == {"loss_step": 11.0, "loss_epoch": 0.5, "val_step": 21.0, "val_epoch": 20.5}
