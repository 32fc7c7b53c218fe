"""Fine-tuning: a pretrained backbone is frozen, and a callback lets it train from the second epoch on."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def images(number, classes, seed):
    """Bars: the class says at which row or column."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (number,), generator=generator)
    pictures = 0.3 * torch.randn(number, 1, 8, 8, generator=generator)
    for picture, label in zip(pictures, labels):
        (picture[0] if label % 2 else picture[0].t())[2 * (label // 2)] += 1.0
    return TensorDataset(pictures, labels)


class Pretraining(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.head = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("pretrain_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Unfreeze(pl.Callback):
    """Gives the backbone to the optimizer at an epoch, at a tenth of the head's rate."""

    def __init__(self, at_epoch):
        self.at_epoch = at_epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.at_epoch:
            optimizer = trainer.optimizers[0]
            for parameter in pl_module.backbone.parameters():
                parameter.requires_grad = True
            rate = optimizer.param_groups[0]["lr"] / 10
            optimizer.add_param_group({"params": pl_module.backbone.parameters(), "lr": rate})

    def on_train_epoch_end(self, trainer, pl_module):
        trained = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        statistics = pl_module.backbone[1].running_mean.double().sum()
        rates = [f"{group['lr']:.8f}" for group in trainer.optimizers[0].param_groups]
        print("epoch", trainer.current_epoch, "trained", trained, "rates", rates, f"{statistics:.9f}")


class Transfer(pl.LightningModule):
    def __init__(self, weights, lr=0.05):
        super().__init__()
        self.save_hyperparameters(ignore=["weights"])
        self.backbone = backbone()
        self.backbone.load_state_dict(weights)
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False
        self.classifier = nn.Linear(8, 2)

    def forward(self, x):
        return self.classifier(self.backbone(x))

    def on_train_epoch_start(self):
        self.backbone.train(self.current_epoch >= 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def on_validation_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print("validation", f"{metrics['val_loss']:.8f} {metrics['val_acc']:.8f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    pl.seed_everything(3)
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    pretraining = Pretraining()
    trainer = pl.Trainer(max_epochs=2, **settings)
    trainer.fit(pretraining, DataLoader(images(128, 4, 0), batch_size=16, shuffle=True))
    print("pretrained", f"{trainer.callback_metrics['pretrain_loss']:.8f}", trainer.global_step)
    trainer.save_checkpoint("pretrained.ckpt", weights_only=True)

    state = torch.load("pretrained.ckpt", weights_only=True)["state_dict"]
    weights = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    model = Transfer(weights)
    trainer = pl.Trainer(max_epochs=4, callbacks=[Unfreeze(at_epoch=2)], **settings)
    val_loader = DataLoader(images(48, 2, 2), batch_size=16)
    trainer.fit(model, DataLoader(images(96, 2, 1), batch_size=16, shuffle=True), val_loader)
    print("train_loss", f"{trainer.callback_metrics['train_loss']:.8f}", trainer.global_step)
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    model.freeze()
    print("frozen", any(p.requires_grad for p in model.parameters()), model.training)
    print("logits", [f"{value:.8f}" for value in model(next(iter(val_loader))[0])[:2].flatten().tolist()])


if __name__ == "__main__":
    main()
