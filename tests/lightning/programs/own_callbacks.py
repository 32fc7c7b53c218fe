"""Callbacks that log by themselves, a module that asks its Trainer for its own ones, a data module that augments behind the module's transfer."""

import csv

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch.utils.data import DataLoader


class WeightNorm(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("norm", pl_module.net.weight.norm(), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log_dict({"bias": pl_module.net.bias.mean(), "epochs": float(trainer.current_epoch + 1)})

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.logger.log_metrics({"by_hand": pl_module.net.bias.detach().sum()}, step=trainer.global_step)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader([{"x": torch.full((3,), float(i))} for i in range(8)], batch_size=2)

    def val_dataloader(self):
        return DataLoader([{"x": torch.full((3,), float(i))} for i in range(4)], batch_size=2)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            batch["x"] = batch["x"] + 0.5
        return batch


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
        self.moved = 0

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.moved += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def configure_callbacks(self):
        return [EarlyStopping("val_loss", patience=self.trainer.max_epochs)]

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch["x"]) - 1).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        print("batch", self.trainer.sanity_checking, self.trainer.evaluating, self.trainer.fit_loop.batch_idx)
        self.log("val_loss", (self.net(batch["x"]) - 1).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"]).sum()

    def on_predict_epoch_end(self):
        print("predicted", [f"{float(one):.6f}" for one in self.trainer.predict_loop.predictions])

    def on_train_batch_start(self, batch, batch_idx):
        print("train", batch_idx, self.trainer.fit_loop.batch_idx, batch["x"][0, 0].item())

    def configure_optimizers(self):
        self.trainer.fit_loop.setup_data()
        return torch.optim.SGD(self.parameters(), lr=0.01 / len(self.trainer.train_dataloader))


seed_everything(5)
module, data = Module(), Data()
trainer = Trainer(
    max_epochs=2,
    val_check_interval=2,
    callbacks=[WeightNorm()],
    logger=CSVLogger("logs", name="own"),
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accelerator="cpu",
)
trainer.fit(module, datamodule=data)
print("moved", module.moved, "patience", trainer.early_stopping_callback.patience)
print({name: f"{float(value):.6f}" for name, value in sorted(trainer.callback_metrics.items())})
with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
    for row in csv.DictReader(file):
        print({name: f"{float(value):.5f}" for name, value in sorted(row.items()) if value})
trainer.predict(module, data.val_dataloader())
print("parameters", ModelSummary(module, max_depth=-1).trainable_parameters)
print("weights", [f"{value:.8f}" for value in module.net.weight[0].tolist()])
