"""Forecasts daily series, and teaches one thing: validate on days after those of training, then forecast with `Trainer.predict`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fabricamp import DataModule, Trainer, TrainingModule, seed_everything
from fabricamp.callbacks import ModelCheckpoint

CONTEXT, HORIZON = 56, 28  # the model reads eight weeks and forecasts four


def make_series(count: int, days: int) -> Tensor:
    """Sales of shops per day: a weekly pattern of each shop, a cycle of 40 days, a slope and noise."""
    day = torch.arange(days)
    week = torch.randn(count, 7).gather(1, (day % 7).expand(count, -1))
    cycle = torch.sin(2 * torch.pi * (day / 40 + torch.rand(count, 1)))
    slope = torch.randn(count, 1) * day / days
    return week + 1.5 * cycle + slope + 0.2 * torch.randn(count, days)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Each window of each series: CONTEXT days, and the HORIZON days after them."""

    def __init__(self, series: Tensor) -> None:
        self.windows = series.unfold(1, CONTEXT + HORIZON, 1).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index]
        return window[:CONTEXT], window[CONTEXT:]


class ShopData(DataModule):
    """The last four weeks are for the test, the four weeks before them for validation; training sees no day of either."""

    def __init__(self, count: int, days: int) -> None:
        super().__init__()
        self.series = make_series(count, days)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Windows(self.series[:, : -2 * HORIZON]), batch_size=64, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Windows(self.series[:, -2 * HORIZON - CONTEXT : -HORIZON]), batch_size=64)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Windows(self.series[:, -HORIZON - CONTEXT :]), batch_size=64)

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.series[:, -HORIZON - CONTEXT : -HORIZON]), batch_size=64)


class Forecaster(TrainingModule):
    """A GRU reads the context week by week; a linear layer adds a change for each day to the naive forecast."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.gru = nn.GRU(7, width, batch_first=True)
        self.head = nn.Linear(width, HORIZON)

    def forward(self, context: Tensor) -> Tensor:
        mean = context.mean(dim=1, keepdim=True)
        weeks = (context - mean).unflatten(1, (-1, 7))  # one step of the GRU reads a week
        _, hidden = self.gru(weeks)
        change: Tensor = self.head(hidden[-1])
        return last_week(context) + change

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        context, future = batch
        loss = F.l1_loss(self(context), future)
        self.log("train_error", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        context, future = batch
        self.log("val_error", F.l1_loss(self(context), future), prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        context, future = batch
        self.log("test_error", F.l1_loss(self(context), future))
        self.log("naive_error", F.l1_loss(last_week(context), future))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (context,) = batch
        forecast: Tensor = self(context)
        return forecast

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def last_week(context: Tensor) -> Tensor:
    """The naive forecast: the last week, repeated."""
    return context[:, -7:].repeat(1, HORIZON // 7)


def draw(path: str, series: Tensor, forecasts: Tensor) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from error
    truth, drawn = series.numpy(), forecasts.numpy()
    figure, axes = plt.subplots(3, 1, figsize=(8, 4.5), sharex=True, layout="constrained")
    for shop, axis in enumerate(axes):
        axis.plot(range(-CONTEXT, 0), truth[shop, -HORIZON - CONTEXT : -HORIZON], color="0.6", label="the model reads")
        axis.plot(range(HORIZON), truth[shop, -HORIZON:], color="black", label="truth")
        axis.plot(range(HORIZON), drawn[shop], color="tab:red", label="forecast")
        axis.set_ylabel(f"shop {shop}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    axes[-1].set_xlabel("days from the end of the context")
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shops and epochs, for a test of the script")
    parser.add_argument("--picture", help="draw forecasts and truth into this file")
    parser.add_argument("--folder", default="runs/forecasting", help="where logs and checkpoints go")
    options = parser.parse_args()

    seed_everything(1)
    data = ShopData(count=20 if options.quick else 50, days=300)
    module = Forecaster()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2 if options.quick else 8,
        callbacks=[ModelCheckpoint(monitor="val_error")],
        default_root_dir=options.folder,
    )
    trainer.fit(module, datamodule=data)
    (result,) = trainer.test(module, datamodule=data, ckpt_path="best", verbose=False)
    predictions = trainer.predict(module, datamodule=data, ckpt_path="best")
    assert predictions is not None
    forecasts = torch.cat(predictions)
    error, naive = result["test_error"], result["naive_error"]
    print(f"mean error of {len(forecasts)} forecasts: {error:.3f}, last week repeated: {naive:.3f}")
    if options.picture:
        draw(options.picture, data.series, forecasts)


if __name__ == "__main__":
    main()
