"""BYOL: a target network that follows by an average, moved where the optimizer steps."""

import copy
import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MLP(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(inputs, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, outputs),
        )

    def forward(self, x):
        return self.model(x)


class BYOL(pl.LightningModule):
    def __init__(self, lr: float = 0.02, base_tau: float = 0.9, warmup_steps: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.online_network = nn.Sequential(MLP(10, 24, 12), MLP(12, 24, 8))
        self.predictor = MLP(8, 16, 8)
        self.target_network = copy.deepcopy(self.online_network)
        for parameter in self.target_network.parameters():
            parameter.requires_grad = False
        self.tau = base_tau
        self.moves = 0

    def loss(self, view_a, view_b):
        prediction = self.predictor(self.online_network(view_a))
        with torch.no_grad():
            target = self.target_network(view_b)
        return 2 - 2 * F.cosine_similarity(prediction, target, dim=-1).mean()

    def _shared_step(self, batch, stage):
        (x,) = batch
        view_a, view_b = x + 0.2 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)
        loss = (self.loss(view_a, view_b) + self.loss(view_b, view_a)) / 2
        self.log(f"{stage}_loss", loss, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self._shared_step(batch, "val")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if self.trainer.global_step < self.hparams.warmup_steps:
            scale = min(1.0, float(self.trainer.global_step + 1) / self.hparams.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = scale * self.hparams.lr
        optimizer.step(closure=optimizer_closure)
        self.move_target()

    def on_before_zero_grad(self, optimizer):
        self.zeroed = getattr(self, "zeroed", 0) + 1

    @torch.no_grad()
    def move_target(self):
        self.moves += 1
        steps = self.trainer.num_training_batches * self.trainer.max_epochs
        self.tau = 1 - (1 - self.hparams.base_tau) * (math.cos(math.pi * self.moves / steps) + 1) / 2
        for online, target in zip(self.online_network.parameters(), self.target_network.parameters()):
            target.data = self.tau * target.data + (1 - self.tau) * online.data

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            rate = self.optimizers().param_groups[0]["lr"]
            print("batch", self.global_step, f"{outputs['loss']:.8f} {rate:.6f} {self.tau:.10f}")

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print("epoch", self.current_epoch, f"{metrics['train_loss']:.8f} {metrics['val_loss']:.8f}")

    def configure_optimizers(self):
        parameters = [*self.online_network.parameters(), *self.predictor.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)
        return {"optimizer": optimizer}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["tau"] = self.tau

    def on_load_checkpoint(self, checkpoint):
        self.tau = checkpoint["tau"]


if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.randn(80, 10) @ torch.randn(10, 10)
    train, val = TensorDataset(data[:64]), TensorDataset(data[64:])
    model = BYOL()
    checkpoint = ModelCheckpoint(monitor="val_loss", dirpath="saved", filename="byol-{epoch}-{val_loss:.4f}")
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=[checkpoint], logger=False, limit_val_batches=1.0)
    trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True, drop_last=True), DataLoader(val, batch_size=8))
    print("moves", model.moves, model.zeroed, trainer.global_step)
    for name in ("online_network", "target_network"):
        print("weights", name, f"{sum(p.double().sum() for p in getattr(model, name).parameters()):.12f}")
    print("best", checkpoint.best_model_path.split("/")[-1], f"{checkpoint.best_model_score:.8f}")
    loaded = BYOL.load_from_checkpoint(checkpoint.best_model_path, map_location="cpu")
    print("loaded", loaded.tau == torch.load(checkpoint.best_model_path, weights_only=False)["tau"], loaded.hparams)
