"""The shape of the hydra template: hydra builds everything from a configuration by ``_target_``; tested from the best file."""

import logging
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_prefixed_message, rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy

CONFIG = """
defaults:
  - _self_
  - override hydra/hydra_logging: disabled
  - override hydra/job_logging: disabled
seed: 12345
train: true
test: true
data: {_target_: __main__.BlobsDataModule, train_val_test_split: [96, 32, 32], batch_size: 16}
model:
  _target_: __main__.BlobsLitModule
  net: {_target_: __main__.SimpleDenseNet, input_size: 6, lin1_size: 16, lin2_size: 8, output_size: 3}
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01, weight_decay: 0.0}
  scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, mode: min, factor: 0.1, patience: 1}
  compile: false
callbacks:
  model_checkpoint:
    _target_: lightning.pytorch.callbacks.ModelCheckpoint
    dirpath: out/checkpoints
    filename: "epoch_{epoch:03d}"
    monitor: val/acc
    mode: max
    save_last: true
    auto_insert_metric_name: false
  early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/acc, patience: 100, mode: max}
  model_summary: {_target_: lightning.pytorch.callbacks.RichModelSummary, max_depth: -1}
  rich_progress_bar: {_target_: lightning.pytorch.callbacks.RichProgressBar}
logger:
  csv: {_target_: lightning.pytorch.loggers.csv_logs.CSVLogger, save_dir: out, name: csv/, prefix: ""}
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  default_root_dir: out
  min_epochs: 1
  max_epochs: 3
  accelerator: cpu
  devices: 1
  check_val_every_n_epoch: 1
  deterministic: false
"""


class RankedLogger(logging.LoggerAdapter):
    """A logger that only the first rank writes to."""

    def __init__(
        self, name: str = __name__, rank_zero_only: bool = False, extra: Optional[Mapping[str, object]] = None
    ):
        super().__init__(logger=logging.getLogger(name), extra=extra)
        self.rank_zero_only = rank_zero_only

    def log(self, level: int, msg: str, rank: Optional[int] = None, *args, **kwargs) -> None:
        if self.isEnabledFor(level):
            current_rank = getattr(rank_zero_only, "rank", None)
            if current_rank is None:
                raise RuntimeError("The `rank_zero_only.rank` needs to be set before use")
            if not self.rank_zero_only or current_rank == 0:
                self.logger.log(level, rank_prefixed_message(msg, current_rank), *args, **kwargs)


log = RankedLogger(__name__, rank_zero_only=True)


class SimpleDenseNet(torch.nn.Module):
    def __init__(self, input_size: int, lin1_size: int, lin2_size: int, output_size: int) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(input_size, lin1_size),
            torch.nn.BatchNorm1d(lin1_size),
            torch.nn.ReLU(),
            torch.nn.Linear(lin1_size, lin2_size),
            torch.nn.BatchNorm1d(lin2_size),
            torch.nn.ReLU(),
            torch.nn.Linear(lin2_size, output_size),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.view(x.size(0), -1))


class BlobsDataModule(LightningDataModule):
    def __init__(self, train_val_test_split: Tuple[int, int, int] = (96, 32, 32), batch_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train: Optional[Dataset] = None
        self.data_val: Optional[Dataset] = None
        self.data_test: Optional[Dataset] = None
        self.batch_size_per_device = batch_size

    def setup(self, stage: Optional[str] = None) -> None:
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("Batch size is not divisible by the number of devices")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            generator = torch.Generator().manual_seed(42)
            labels = torch.randint(0, 3, (160,), generator=generator)
            points = torch.randn(160, 6, generator=generator) + torch.eye(3, 6)[labels] * 2
            self.data_train, self.data_val, self.data_test = random_split(
                dataset=TensorDataset(points, labels), lengths=self.hparams.train_val_test_split, generator=generator
            )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset=self.data_train, batch_size=self.batch_size_per_device, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset=self.data_val, batch_size=self.batch_size_per_device, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset=self.data_test, batch_size=self.batch_size_per_device, shuffle=False)


class BlobsLitModule(LightningModule):
    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (Accuracy(task="multiclass", num_classes=3) for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Tuple[torch.Tensor, torch.Tensor]):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> Dict[str, Any]:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1},
            }
        return {"optimizer": optimizer}


@rank_zero_only
def log_hyperparameters(object_dict: Dict[str, Any]) -> None:
    hparams, cfg, model, trainer = (
        {},
        OmegaConf.to_container(object_dict["cfg"]),
        object_dict["model"],
        object_dict["trainer"],
    )
    hparams["model"] = cfg["model"]
    hparams["model/params/total"] = sum(p.numel() for p in model.parameters())
    hparams["model/params/trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    hparams["callbacks"] = cfg.get("callbacks")
    hparams["seed"] = cfg.get("seed")
    for logger in trainer.loggers:
        logger.log_hyperparams(hparams)


def train(cfg: DictConfig) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    if cfg.get("seed"):
        L.seed_everything(cfg.seed, workers=True)
    datamodule: LightningDataModule = hydra.utils.instantiate(cfg.data)
    model: LightningModule = hydra.utils.instantiate(cfg.model)
    callbacks: List[Callback] = [hydra.utils.instantiate(node) for node in cfg.callbacks.values()]
    logger: List[Logger] = [hydra.utils.instantiate(node) for node in cfg.logger.values()]
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)
    object_dict = {"cfg": cfg, "datamodule": datamodule, "model": model, "trainer": trainer}
    log_hyperparameters(object_dict)
    if cfg.get("train"):
        log.info("Starting training!")
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
    train_metrics = dict(trainer.callback_metrics)
    if cfg.get("test"):
        ckpt_path = trainer.checkpoint_callback.best_model_path
        trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
        print("best", Path(ckpt_path).name)
    return {**train_metrics, **trainer.callback_metrics}, object_dict


ConfigStore.instance().store(name="train", node=OmegaConf.to_container(OmegaConf.create(CONFIG)))


@hydra.main(version_base="1.3", config_path=None, config_name="train")
def main(cfg: DictConfig) -> None:
    metrics, objects = train(cfg)
    for name, value in sorted(metrics.items()):
        print(name, f"{value:.8f}")
    print("weights", f"{sum(p.double().sum() for p in objects['model'].parameters()):.12f}")
    print("files", sorted(path.name for path in Path("out/checkpoints").iterdir()))
    print("hparams", sorted(objects["model"].hparams), objects["datamodule"].hparams.batch_size)


if __name__ == "__main__":
    main()
