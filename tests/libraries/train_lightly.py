"""SimCLR of lightly's documentation with its online linear and kNN classifiers, on coloured images that the script draws."""

from pathlib import Path

import cpu_torchvision  # noqa: F401  # before torchvision
import numpy as np
import pytorch_lightning as pl
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms.simclr_transform import SimCLRTransform
from lightly.utils.benchmarking import MetricCallback, OnlineLinearClassifier
from lightly.utils.benchmarking.benchmark_module import BenchmarkModule
from PIL import Image
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from recorder import Records, main
from torch import nn

CLASSES = 3


class Recorder(Records, pl.Callback):
    pass


class SimCLR(BenchmarkModule):
    def __init__(self, dataloader_kNN):
        super().__init__(dataloader_kNN, CLASSES, knn_k=5)
        self.save_hyperparameters(ignore="dataloader_kNN")
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.projection_head = SimCLRProjectionHead(8, 8, 4)
        self.criterion = NTXentLoss(temperature=0.1)
        self.online_classifier = OnlineLinearClassifier(feature_dim=8, num_classes=CLASSES, topk=(1, 2))

    def training_step(self, batch, batch_index):
        (first, second), targets, _ = batch
        features = self.backbone(torch.cat([first, second]))
        one, other = self.projection_head(features).chunk(2)
        loss = self.criterion(one, other)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))
        class_loss, values = self.online_classifier.training_step((features.detach(), targets.repeat(2)), batch_index)
        self.log_dict(values, sync_dist=True, batch_size=len(targets))
        return loss + class_loss

    def validation_step(self, batch, batch_index):
        super().validation_step(batch, batch_index)
        features = self.backbone(batch[0])
        loss, values = self.online_classifier.validation_step((features.detach(), batch[1]), batch_index)
        self.log_dict(values, prog_bar=True, sync_dist=True, batch_size=len(batch[1]))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def images(folder, count):
    generator = np.random.default_rng(len(folder))
    for kind in range(CLASSES):
        place = Path(folder, str(kind))
        place.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 90, (32, 32, 3))
            pixels[:, :, kind] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return folder


def loader(folder, transform, *, shuffle):
    dataset = LightlyDataset(folder, transform=transform)
    return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=shuffle, drop_last=shuffle, num_workers=0)


def loaders():
    plain = torchvision.transforms.ToTensor()
    training = loader(images("training", 12), SimCLRTransform(input_size=32, gaussian_blur=0.0), shuffle=True)
    return training, loader("training", plain, shuffle=False), loader(images("validation", 4), plain, shuffle=False)


def fit():
    pl.seed_everything(1)
    training, neighbours, validation = loaders()
    metrics = MetricCallback()
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        log_every_n_steps=3,
        val_check_interval=2,
        callbacks=[
            LearningRateMonitor(),
            EarlyStopping("val_online_cls_loss", patience=100),
            metrics,
            ModelCheckpoint("checkpoints", "best", monitor="val_online_cls_loss", save_last=True),
            Recorder(),
        ],
        logger=CSVLogger("logs"),
    )
    trainer.fit(SimCLR(neighbours), training, validation)
    print(metrics.val_metrics)


def predict():
    _, neighbours, validation = loaders()
    model = SimCLR.load_from_checkpoint("checkpoints/best.ckpt", dataloader_kNN=neighbours)
    model.eval()
    with torch.no_grad():
        return torch.cat([model.backbone(batch[0]) for batch in validation])


if __name__ == "__main__":
    main(fit, predict)
