"""Metrics of torchmetrics: collections with prefixes, a confusion matrix, and two validation sets."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

CLASSES = 4


def blobs(number, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    centers = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    return TensorDataset(centers[labels] + spread * torch.randn(number, 2, generator=generator), labels)


class Classifier(LightningModule):
    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.loss = nn.CrossEntropyLoss()
        metrics = MetricCollection(
            {
                "acc": MulticlassAccuracy(CLASSES, average="micro"),
                "precision": MulticlassPrecision(CLASSES),
                "recall": MulticlassRecall(CLASSES),
                "f1": MulticlassF1Score(CLASSES),
            }
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = nn.ModuleList([metrics.clone(prefix="val_near/"), metrics.clone(prefix="val_far/")])
        self.test_metrics = metrics.clone(prefix="test/")
        self.confusion = MulticlassConfusionMatrix(CLASSES)
        self.mean_loss = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> STEP_OUTPUT:
        x, y = batch
        logits = self.net(x)
        loss = self.loss(logits, y)
        self.mean_loss(loss, weight=len(y))
        self.log("train/loss", self.mean_loss, on_step=True, on_epoch=True)
        self.log_dict(self.train_metrics(logits, y), on_step=True, on_epoch=False)
        return {"loss": loss, "logits": logits.detach(), "y": y}

    def on_train_epoch_end(self) -> None:
        computed = self.train_metrics.compute()
        self.log_dict({f"{name}_epoch": value for name, value in computed.items()})
        self.train_metrics.reset()
        print("train", self.current_epoch, *(f"{name} {value:.8f}" for name, value in sorted(computed.items())))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val/loss", self.loss(logits, y), batch_size=len(y))
        collection = self.val_metrics[dataloader_idx]
        collection.update(logits, y)
        self.log_dict(collection, on_step=False, on_epoch=True, add_dataloader_idx=False)
        self.confusion.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        matrix = self.confusion.compute()
        self.confusion.reset()
        if not self.trainer.sanity_checking:
            self.log("val/diagonal", matrix.diag().sum().float() / matrix.sum())
            print("confusion", matrix.flatten().tolist())
            metrics = self.trainer.callback_metrics
            print(*(f"{name} {metrics[name]:.8f}" for name in sorted(metrics) if name.startswith("val")))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.test_metrics(self.net(x), y)
        self.log_dict(self.test_metrics)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return DataLoader(blobs(120, 0.8, 0), batch_size=32, shuffle=True)

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return [DataLoader(blobs(40, 0.6, 1), batch_size=16), DataLoader(blobs(50, 1.2, 2), batch_size=16)]

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(blobs(60, 0.8, 3), batch_size=32)


if __name__ == "__main__":
    seed_everything(5)
    model = Classifier()
    logger = CSVLogger("logs")
    trainer = Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=logger, log_every_n_steps=1)
    trainer.fit(model)
    for name, value in sorted(trainer.callback_metrics.items()):
        print(name, value.dtype, f"{value:.8f}")
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    (result,) = trainer.test(model, verbose=False)
    print("test", {name: round(value, 8) for name, value in sorted(result.items())})
    near, far = trainer.validate(model, verbose=False)
    print(
        "validate",
        sorted(near),
        sorted(far),
        f"{near['val/loss/dataloader_idx_0']:.8f} {far['val/loss/dataloader_idx_1']:.8f}",
    )
