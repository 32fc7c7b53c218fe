"""A script for Lightning with changed imports: mypy checks it strictly together with the package, and a test runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricamp as pl
from fabricamp import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from fabricamp.accelerators import CUDAAccelerator
from fabricamp.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from fabricamp.callbacks.callback import Callback as DeepCallback
from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar as DeepBar
from fabricamp.core.optimizer import LightningOptimizer
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from fabricamp.loggers.logger import DummyLogger, Logger
from fabricamp.strategies import DDPStrategy, SingleDeviceStrategy
from fabricamp.trainer.states import RunningStage, TrainerFn
from fabricamp.utilities import AttributeDict, grad_norm, rank_zero_info, rank_zero_only
from fabricamp.utilities.combined_loader import CombinedLoader
from fabricamp.utilities.exceptions import MisconfigurationException
from fabricamp.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS, OptimizerLRScheduler


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.randn(8, 4))

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return DataLoader(self.data, batch_size=self.hparams.batch_size)

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.data, batch_size=self.hparams["batch_size"])


class Model(LightningModule):
    def __init__(self, lr: float = 0.1, net: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = net or nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        loss = self(batch[0]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log_dict({"a": loss}, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self(batch[0]).mean())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def on_train_epoch_end(self) -> None:
        optimizers = self.optimizers()
        print(self.trainer.callback_metrics.get("loss"), self.current_epoch, self.global_step, optimizers)
        if self.logger is not None:
            print(self.logger.log_dir)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": "val"}}


class Notes(DeepCallback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module=pl_module, stage=stage)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if trainer.state.fn is TrainerFn.FITTING and trainer.state.stage == RunningStage.TRAINING:
            rank_zero_info("batch %d", trainer.fit_loop.total_batch_idx)


class Bar(TQDMProgressBar):
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return items


@rank_zero_only
def show(text: str) -> None:
    print(text)


def main() -> None:
    seed_everything(1, workers=True)
    checkpoint = ModelCheckpoint(monitor="val", mode="min", save_top_k=1, save_last=True)
    callbacks: list[Callback] = [
        checkpoint,
        EarlyStopping("val"),
        LearningRateMonitor(),
        Notes(),
        RichProgressBar(),
    ]
    _: Callback = DeepBar()
    loggers: list[Logger] = [CSVLogger("runs"), TensorBoardLogger("runs"), DummyLogger()]
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=loggers,
        callbacks=callbacks,
        precision="32-true",
        strategy="auto",
    )
    (
        DDPStrategy(find_unused_parameters=True),
        SingleDeviceStrategy(),
        pl.callbacks.ModelSummary(),
        pl.utilities.rank_zero_only,
    )
    try:
        trainer.fit(model=Model(), datamodule=Data())
    except MisconfigurationException as error:
        show(str(error))
    trainer.fit_loop.max_epochs = 3
    best = Model.load_from_checkpoint(checkpoint.best_model_path, net=nn.Linear(4, 1))
    best.freeze()
    values: AttributeDict = best.hparams
    print(
        values.lr,
        trainer.validate(best, datamodule=Data()),
        trainer.strategy.root_device,
        CUDAAccelerator.is_available(),
    )
    print(CombinedLoader({"a": DataLoader(TensorDataset(torch.ones(1)))}, "min_size"), LightningOptimizer)


if __name__ == "__main__":
    main()
