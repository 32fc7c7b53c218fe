"""SimCLR with a classifier that a callback trains beside it, and the learning rate in the logs."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.functional import accuracy

from pytorch_lightning.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.rank_zero import rank_zero_info


class TwoViews(Dataset):
    """Noisy copies of one of three prototypes: two of them a sample, and its class."""

    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.prototypes = torch.eye(3).repeat_interleave(4, dim=1)
        self.labels = torch.randint(0, 3, (number,), generator=generator)
        self.noise = 0.4 * torch.randn(number, 12, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        x = self.prototypes[self.labels[index]] + self.noise[index]
        return (x + 0.1 * torch.randn(12), x + 0.1 * torch.randn(12)), self.labels[index]


class SimCLR(pl.LightningModule):
    def __init__(self, hidden_dim, lr, temperature, weight_decay, max_epochs=500):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.temperature > 0.0, "The temperature must be a positive float!"
        self.backbone = nn.Sequential(nn.Linear(12, 4 * hidden_dim), nn.BatchNorm1d(4 * hidden_dim), nn.ReLU())
        self.projector = nn.Sequential(
            nn.Linear(4 * hidden_dim, 4 * hidden_dim), nn.ReLU(inplace=True), nn.Linear(4 * hidden_dim, hidden_dim)
        )

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.hparams.max_epochs, eta_min=self.hparams.lr / 50
        )
        return [optimizer], [lr_scheduler]

    def info_nce_loss(self, batch, mode="train"):
        views, _ = batch
        feats = self.projector(self.backbone(torch.cat(views, dim=0)))
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim / self.hparams.temperature
        nll = (-cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)).mean()
        self.log(mode + "_loss", nll, on_step=mode == "train", on_epoch=True)
        comb_sim = torch.cat([cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)], dim=-1)
        sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
        self.log(mode + "_acc_top1", (sim_argsort == 0).float().mean())
        self.log(mode + "_acc_mean_pos", 1 + sim_argsort.float().mean())
        return nll

    def training_step(self, batch, batch_idx):
        return self.info_nce_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self.info_nce_loss(batch, mode="val")


class OnlineEvaluator(Callback):
    """A linear classifier over detached features, trained by its own optimizer behind each batch."""

    def on_fit_start(self, trainer, pl_module):
        self.head = nn.Linear(pl_module.backbone[0].out_features, 3).to(pl_module.device)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (view, _), labels = batch
        with torch.no_grad():
            features = pl_module.backbone(view)
        logits = self.head(features.detach())
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        score = accuracy(logits.softmax(-1), labels, task="multiclass", num_classes=3)
        pl_module.log("online_acc", score, on_step=False, on_epoch=True)
        if batch_idx == 0:
            print(
                "step",
                trainer.global_step,
                f"{outputs['loss']:.8f}",
                f"{trainer.callback_metrics['train_loss_step']:.8f}",
            )

    def on_train_epoch_end(self, trainer, pl_module):
        self.report(trainer, "train_loss_epoch", "train_acc_top1", "online_acc", "val_loss")

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.report(trainer, "val_loss", "val_acc_mean_pos")

    @rank_zero_only
    def report(self, trainer, *names):
        print(trainer.current_epoch, *(f"{name} {trainer.callback_metrics[name]:.8f}" for name in names))


def train(max_epochs=3):
    pl.seed_everything(42)
    model = SimCLR(hidden_dim=4, lr=5e-3, temperature=0.07, weight_decay=1e-4, max_epochs=max_epochs)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        logger=CSVLogger("logs", name="simclr"),
        log_every_n_steps=2,
        callbacks=[
            ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc_top1"),
            LearningRateMonitor("epoch"),
            OnlineEvaluator(),
        ],
    )
    trainer.logger._default_hp_metric = None
    loader = DataLoader(TwoViews(96, 0), batch_size=16, shuffle=True, drop_last=True, num_workers=0)
    trainer.fit(model, loader, DataLoader(TwoViews(32, 1), batch_size=16, shuffle=False))
    rank_zero_info("trained")
    print("lr", f"{trainer.callback_metrics['lr-AdamW']:.9f}", f"{trainer.optimizers[0].param_groups[0]['lr']:.9f}")
    model = SimCLR.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    print("temperature", model.hparams.temperature)
    return model


if __name__ == "__main__":
    train()
