"""Teaches one thing: precision, SyncBN, the exchange of gradients and CUDA graphs are arguments; the model's code stays the same.

``python train.py`` trains a small ResNet on synthetic images; ``--data /path/to/imagenet`` trains ResNet-50.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from imagenet import Images, resnet
from torch import Tensor
from torch.nn import functional as F

from fabricamp import Trainer, TrainingModule, seed_everything
from fabricamp.callbacks import LearningRateMonitor, ModelCheckpoint
from fabricamp.loggers import CSVLogger
from fabricamp.runs import plot


class Classifier(TrainingModule):
    """A ResNet trained with SGD, label smoothing, warm-up and a cosine schedule."""

    def __init__(self, arch: str, classes: int, lr: float, weight_decay: float = 5e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        blocks, width = {"resnet50": ([3, 4, 6, 3], 64), "tiny": ([1, 1, 1, 1], 16)}[arch]
        self.net = resnet(blocks, width, classes)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations lack it

    def scores(self, images: Tensor) -> Tensor:
        # Images arrive as bytes, because that makes the copy to the GPU four times smaller.
        # This method is not `forward`, because at O2 and O5 the outermost module that a step calls casts its input to half.
        images = ((images.float() - 118.0) / 58.0).contiguous(memory_format=torch.channels_last)
        scores: Tensor = self.net(images)
        return scores

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.scores(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = self.scores(images).argmax(dim=1) == labels
        self.log("val_accuracy", correct.float().mean(), prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.hparams.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=self.hparams.lr, momentum=0.9, nesterov=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, steps, pct_start=0.1, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with train/CLASS/*.jpg and val/CLASS/*.jpg; else synthetic")
    parser.add_argument("--arch", choices=("resnet50", "tiny"), help="None: resnet50 with --data, else tiny")
    parser.add_argument("--size", type=int, help="pixels of a side; None: 224 with --data, else 64")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, of each process")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.2, help="the highest rate at 256 images a step of all processes")
    parser.add_argument("--precision", default="O0", help="opt level O0 to O5, or a name such as bf16-mixed")
    parser.add_argument("--strategy", default="auto", help="single, ddp or delayed_ddp")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over the batch of all processes")
    parser.add_argument("--cuda-graph", action="store_true", help="replay the whole step as one CUDA graph")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto", help="processes on this machine")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, of each process")
    parser.add_argument("--folder", default="runs", help="where logs and checkpoints go")
    parser.add_argument(
        "--resume", action="store_true", help="resume the furthest checkpoint in --folder, if there is one"
    )
    parser.add_argument("--quick", action="store_true", help="2 epochs of 256 synthetic images")
    parser.add_argument("--picture", help="draw loss and accuracy into this .png or .svg file")
    options = parser.parse_args()
    options.arch = options.arch or ("resnet50" if options.data else "tiny")
    options.size = options.size or (224 if options.data else 64)
    if options.quick:
        options.epochs = 2
    return options


def main() -> None:
    options = parse()
    seed_everything(0)
    checkpoints = ModelCheckpoint(monitor="val_accuracy", mode="max", every="1 epoch, 30 min")
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        precision=options.precision,
        sync_batchnorm=options.sync_batchnorm,
        cuda_graph=options.cuda_graph,
        max_epochs=options.epochs,
        per_sample_seed=True,
        log_every_n_steps=4,
        default_root_dir=options.folder,
        logger=CSVLogger(options.folder, name="imagenet"),
        callbacks=[LearningRateMonitor(), checkpoints],
    )
    data = Images(options.data, options.size, options.batch_size, options.workers, 256 if options.quick else 1024)
    lr = options.lr * options.batch_size * trainer.world_size / 256
    module = Classifier(options.arch, data.classes, lr)
    trainer.fit(module, datamodule=data, ckpt_path="auto" if options.resume else None)
    if trainer.is_global_zero and trainer.log_dir:
        print(f"best val accuracy {checkpoints.best_model_score:.1%}; logs in {trainer.log_dir}")
        if options.picture:
            plot([trainer.log_dir], metrics=["train_loss", "val_accuracy"], out=options.picture)


if __name__ == "__main__":
    main()
