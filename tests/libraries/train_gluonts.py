"""DeepAR of GluonTS's quick start, on twelve noisy series; the predictor is saved and loaded as a folder."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from gluonts.dataset.common import ListDataset
from gluonts.model.predictor import Predictor
from gluonts.torch import DeepAREstimator
from recorder import Records, main

HOURS, PREDICTED = 24 * 8, 12


class Recorder(Records, pl.Callback):
    pass


def series(length):
    generator = np.random.default_rng(0)
    times = np.arange(HOURS)
    values = [10 + i + np.sin(2 * np.pi * times / 24 + i) + 0.2 * generator.normal(size=HOURS) for i in range(12)]
    start = pd.Period("2024-01-01 00:00", freq="h")
    return ListDataset([{"start": start, "target": value[:length]} for value in values], freq="h")


def fit():
    pl.seed_everything(0)
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=PREDICTED,
        context_length=24,
        hidden_size=8,
        num_layers=1,
        batch_size=8,
        num_batches_per_epoch=10,
        trainer_kwargs={"max_epochs": 3, "accelerator": "cpu", "callbacks": [Recorder()]},
    )
    predictor = estimator.train(series(HOURS - PREDICTED), series(HOURS), shuffle_buffer_length=32)
    Path("predictor").mkdir()
    predictor.serialize(Path("predictor"))


def predict():
    predictor = Predictor.deserialize(Path("predictor"))
    pl.seed_everything(0)
    forecasts = list(predictor.predict(series(HOURS - PREDICTED)))
    return torch.stack([torch.as_tensor(forecast.samples) for forecast in forecasts])


if __name__ == "__main__":
    main(fit, predict)
