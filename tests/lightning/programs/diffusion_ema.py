"""Diffusion over points in the plane, with an average of the weights kept by a callback of the program's own."""

import copy
from typing import Any, Dict

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks.callback import Callback
from pytorch_lightning.callbacks.progress import TQDMProgressBar
from pytorch_lightning.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA(Callback):
    """Swaps averaged weights in for validation, and carries them in checkpoints."""

    def __init__(self, decay: float = 0.9, apply_every_n_steps: int = 1):
        self.decay = decay
        self.apply_every_n_steps = apply_every_n_steps
        self.average = None
        self.updates = 0

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.average is None:
            self.average = copy.deepcopy(pl_module.model).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step % self.apply_every_n_steps == 0:
            self.updates += 1
            for averaged, weight in zip(self.average.parameters(), pl_module.model.parameters()):
                averaged.mul_(self.decay).add_(weight, alpha=1 - self.decay)

    def on_validation_start(self, trainer, pl_module) -> None:
        self.kept = pl_module.model
        pl_module.model = self.average

    def on_validation_end(self, trainer, pl_module) -> None:
        pl_module.model = self.kept

    def state_dict(self) -> Dict[str, Any]:
        return {"updates": self.updates, "average": self.average.state_dict()}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        self.restored = state_dict["average"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        checkpoint["ema_decay"] = self.decay


class Diffusion(pl.LightningModule):
    def __init__(self, width=24, timesteps=20, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )
        betas = torch.linspace(1e-3, 0.2, timesteps)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, dim=0), persistent=False)

    def q_sample(self, x, t, noise):
        kept = self.alphas_cumprod[t][:, None]
        return kept.sqrt() * x + (1 - kept).sqrt() * noise

    def p_losses(self, x):
        t = torch.randint(0, self.hparams.timesteps, (x.shape[0],), device=self.device)
        noise = torch.randn_like(x)
        inputs = torch.cat([self.q_sample(x, t, noise), t[:, None] / self.hparams.timesteps], dim=1)
        return F.mse_loss(self.model(inputs), noise)

    def training_step(self, batch, batch_idx):
        loss = self.p_losses(batch[0])
        self.log("train/loss", loss, prog_bar=True, logger=True, on_step=True, on_epoch=True)
        self.log("global_step", float(self.global_step), prog_bar=True, logger=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss_ema", self.p_losses(batch[0]), prog_bar=False, on_step=False, on_epoch=True)

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self.model, norm_type=2)
        self.log_dict(norms)
        if self.global_step % 6 == 0:
            print("norms", len(norms), f"{norms['grad_2.0_norm_total']:.8f}")

    @torch.no_grad()
    def sample(self, number):
        x = torch.randn(number, 2, device=self.device)
        for step in reversed(range(self.hparams.timesteps)):
            t = torch.full((number, 1), step / self.hparams.timesteps, device=self.device)
            beta, kept = self.betas[step], self.alphas_cumprod[step]
            x = (x - beta / (1 - kept).sqrt() * self.model(torch.cat([x, t], dim=1))) / (1 - beta).sqrt()
            x = x + beta.sqrt() * torch.randn_like(x) if step else x
        return x

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print(
            self.current_epoch,
            f"{metrics['train/loss_epoch']:.8f} {metrics['val/loss_ema']:.8f} {metrics['train/loss_step']:.8f}",
        )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 2e-2, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


pl.seed_everything(23)
angles = 6.28318 * torch.rand(112)
rings = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(112, 2))
train, val = torch.utils.data.random_split(rings, [96, 16])
ema = EMA(decay=0.9)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    gradient_clip_val=1.0,
    callbacks=[ema, TQDMProgressBar(refresh_rate=10)],
    default_root_dir="runs",
    log_every_n_steps=5,
)
module = Diffusion()
trainer.fit(module, DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=16))
checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
print("ema", ema.updates, checkpoint["ema_decay"], f"{sum(p.double().sum() for p in ema.average.parameters()):.9f}")
print("weights", f"{sum(p.double().sum() for p in module.parameters()):.12f}")
print("saved", checkpoint["global_step"], checkpoint["epoch"], "alphas_cumprod" in checkpoint["state_dict"])
print("rate", f"{trainer.optimizers[0].param_groups[0]['lr']:.10f}")
print("samples", [f"{value:.7f}" for value in module.sample(3).flatten().tolist()])
