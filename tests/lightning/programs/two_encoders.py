"""Two encoders, of pictures and of texts, trained against each other in one batch; what belongs together is found again."""

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """A picture that is bright at two places, and the two words that name them."""

    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(number)])
        self.noise = 0.2 * torch.randn(number, 16, generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        picture = self.noise[index].clone()
        picture[self.words[index]] += 1.0
        return {"image": picture.view(1, 4, 4), "text": self.words[index]}


class Projection(nn.Module):
    def __init__(self, inputs, outputs, dropout=0.1):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(outputs)

    def forward(self, x):
        x = self.first(x)
        return F.normalize(self.norm(x + self.dropout(self.second(F.gelu(x)))), dim=-1)


class DualEncoder(L.LightningModule):
    def __init__(self, width=16, image_lr=0.01, text_lr=0.02, weight_decay=0.1, warmup_steps=4):
        super().__init__()
        self.save_hyperparameters()
        self.image_encoder = nn.Sequential(nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), Projection(72, width))
        self.text_encoder = nn.ModuleDict({"words": nn.EmbeddingBag(16, 24), "head": Projection(24, width)})
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.kept = []

    def forward(self, batch):
        return self.image_encoder(batch["image"]), self.text_encoder["head"](self.text_encoder["words"](batch["text"]))

    def contrast(self, images, texts):
        if self.trainer.world_size > 1:
            images, texts = (self.all_gather(one, sync_grads=True).flatten(0, 1) for one in (images, texts))
        logits = self.logit_scale.exp() * images @ texts.t()
        labels = torch.arange(len(logits), device=self.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    def training_step(self, batch, batch_idx):
        loss = self.contrast(*self(batch))
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log("train/temperature", 1 / self.logit_scale.exp())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logit_scale.data.clamp_(0, math.log(100))

    def validation_step(self, batch, batch_idx):
        images, texts = self(batch)
        self.kept.append((images, texts))
        self.log("val/loss", self.contrast(images, texts), sync_dist=True)

    def on_validation_epoch_end(self):
        images, texts = (torch.cat(one) for one in zip(*self.kept))
        self.kept.clear()
        ranks = (images @ texts.t()).argsort(dim=1, descending=True)
        places = (ranks == torch.arange(len(ranks), device=ranks.device)[:, None]).float().argmax(dim=1)
        self.log_dict({"val/top1": (places < 1).float().mean(), "val/top5": (places < 5).float().mean()})

    def on_train_epoch_end(self):
        names = ("train/loss", "train/temperature", "val/loss", "val/top1", "val/top5")
        print(self.current_epoch, " ".join(f"{self.trainer.callback_metrics[name]:.8f}" for name in names))

    def configure_optimizers(self):
        groups = [
            {"params": self.image_encoder.parameters(), "lr": self.hparams.image_lr},
            {"params": self.text_encoder.parameters(), "lr": self.hparams.text_lr},
            {"params": [self.logit_scale], "lr": self.hparams.image_lr, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=self.hparams.weight_decay)
        warmup = self.hparams.warmup_steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(8)
    model = DualEncoder()
    best = ModelCheckpoint("saved", "{epoch}", monitor="val/top5", mode="max")
    trainer = L.Trainer(max_epochs=4, accelerator="cpu", accumulate_grad_batches=2, callbacks=[best], logger=False)
    train = DataLoader(Pairs(160, 0), batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(model, train, DataLoader(Pairs(40, 1), batch_size=16))
    print("steps", trainer.global_step, [f"{group['lr']:.6f}" for group in trainer.optimizers[0].param_groups])
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    print("best", best.best_model_path.split("/")[-1], f"{best.best_model_score:.8f}")
    loaded = DualEncoder.load_from_checkpoint(best.best_model_path).eval()
    images, texts = loaded({key: value for key, value in next(iter(train)).items()})
    print("loaded", tuple(images.shape), f"{(images * texts).sum(-1).mean():.8f}")
