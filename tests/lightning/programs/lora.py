"""LoRA: low-rank updates beside frozen layers, in bf16 autocast, with clipping of the program's own and two validation sets."""

import math

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, linear, rank=2, alpha=4.0):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x):
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


def add_lora(module, rank):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child, rank))
        else:
            add_lora(child, rank)
    return module


class Finetune(pl.LightningModule):
    def __init__(self, rank: int = 2, lr: float = 0.02, clip: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.base = nn.Sequential(
            nn.Embedding(20, 12), nn.Flatten(), nn.Linear(48, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 5)
        )
        self.base[0].weight.requires_grad_(False)
        add_lora(self.base, rank)

    def forward(self, tokens):
        return self.base(tokens)

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits, labels)
        if batch_idx == 0:
            print("dtypes", logits.dtype, loss.dtype, self.base[2].up.dtype)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        tokens, labels = batch
        logits = self(tokens)
        name = ("seen", "unseen")[dataloader_idx]
        self.log(f"{name}_loss", F.cross_entropy(logits, labels), add_dataloader_idx=False)
        self.log("acc", (logits.argmax(dim=-1) == labels).float().mean())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        value = self.hparams.clip * (1 + self.current_epoch)
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")

    def on_after_backward(self):
        if self.trainer.is_last_batch:
            norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
            print("norm", f"{norm:.8f}", sum(p.grad is not None for p in self.parameters()))

    def on_validation_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print(*(f"{name} {metrics[name]:.8f}" for name in sorted(metrics) if not name.startswith("train")))

    def on_save_checkpoint(self, checkpoint):
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
                "interval": "step",
            },
        }


def tokens(number, seed):
    drawn = torch.randint(0, 20, (number, 4), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(drawn, drawn.sum(dim=1) % 5)


if __name__ == "__main__":
    pl.seed_everything(31)
    model = Finetune()
    checkpoint = ModelCheckpoint(dirpath="adapters", monitor="seen_loss", filename="{epoch}-{step}")
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        callbacks=[checkpoint],
        logger=False,
        num_sanity_val_steps=0,
    )
    loaders = [DataLoader(tokens(32, 0), batch_size=16), DataLoader(tokens(32, 1), batch_size=16)]
    trainer.fit(model, DataLoader(tokens(64, 0), batch_size=8, shuffle=True), val_dataloaders=loaders)
    print("precision", trainer.precision, f"{trainer.callback_metrics['train_loss']:.8f}", trainer.global_step)
    print("rate", f"{trainer.optimizers[0].param_groups[0]['lr']:.8f}", trainer.num_val_batches)
    adapters = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
    print("file", checkpoint.best_model_path.split("/")[-1], sorted(adapters))
    other = Finetune.load_from_checkpoint(checkpoint.best_model_path, strict=False)
    print("weights", f"{sum(p.double().sum() for p in other.parameters() if p.requires_grad):.12f}")
    print("loaded", sum(p.requires_grad for p in other.parameters()))
