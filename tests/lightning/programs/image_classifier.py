"""An image classifier: a small convolutional net, metrics of torchmetrics logged as objects, the best file tested."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy, F1Score

CLASSES = 4


class ShapesDataModule(pl.LightningDataModule):
    """Pictures of 8 by 8: a row, a column or one of the diagonals, under noise."""

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, CLASSES, (192,), generator=generator)
        places = torch.randint(0, 8, (192,), generator=generator)
        pictures = 0.4 * torch.randn(192, 1, 8, 8, generator=generator)
        diagonal = torch.eye(8)
        for picture, label, place in zip(pictures, labels.tolist(), places.tolist()):
            if label == 0:
                picture[0, place] += 1.0
            elif label == 1:
                picture[0, :, place] += 1.0
            else:
                picture[0] += diagonal if label == 2 else diagonal.flip(0)
        torch.save((pictures, labels), "shapes.pt")

    def setup(self, stage):
        dataset = TensorDataset(*torch.load("shapes.pt"))
        lengths, generator = [128, 32, 32], torch.Generator().manual_seed(42)
        self.train_set, self.val_set, self.test_set = random_split(dataset, lengths, generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, num_workers=0)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.hparams.batch_size)

    predict_dataloader = test_dataloader


class ImageClassifier(pl.LightningModule):
    def __init__(self, learning_rate: float = 0.01, channels: int = 6):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * channels, CLASSES),
        )
        self.train_acc = Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_acc = Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_f1 = F1Score(task="multiclass", num_classes=CLASSES, average="macro")
        self.test_acc = Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.train_acc(logits, y)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.val_f1.update(logits, y)
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log_dict({"val/acc": self.val_acc, "val/f1": self.val_f1}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test/acc", self.test_acc)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(1)

    def on_train_epoch_end(self):
        names = ("train/loss", "train/acc_epoch", "val/loss", "val/acc", "val/f1")
        metrics = self.trainer.callback_metrics
        print("epoch", self.current_epoch, " ".join(f"{metrics[name]:.8f}" for name in names))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    pl.seed_everything(42, workers=True)
    data, model = ShapesDataModule(), ImageClassifier()
    checkpoint = ModelCheckpoint(monitor="val/acc", mode="max", save_weights_only=True, filename="best")
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        deterministic=True,
        gradient_clip_val=1.0,
        logger=CSVLogger("logs", name="shapes"),
        log_every_n_steps=4,
        callbacks=[checkpoint, EarlyStopping("val/loss", patience=3), LearningRateMonitor("step")],
    )
    trainer.fit(model, datamodule=data)
    print("trained", trainer.global_step, f"{trainer.callback_metrics['lr-AdamW']:.9f}")
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    print("best", f"{checkpoint.best_model_score:.8f}")
    (result,) = trainer.test(model, datamodule=data, ckpt_path="best")
    print("test", {name: f"{value:.8f}" for name, value in result.items()})
    print("classes", torch.cat(trainer.predict(model, datamodule=data)).tolist())


if __name__ == "__main__":
    main()
