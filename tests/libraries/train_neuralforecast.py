"""NHITS and an LSTM of NeuralForecast's quick start, on the sum of a trend and a season; saved and loaded as a folder."""

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NHITS
from recorder import Records, main

HORIZON = 6


class Recorder(Records, pl.Callback):
    pass


def frame():
    generator = np.random.default_rng(1)
    days = pd.date_range("2023-01-01", periods=120, freq="D")
    series = [
        pd.DataFrame(
            {
                "unique_id": name,
                "ds": days,
                "y": slope * np.arange(120) + np.sin(np.arange(120) / 3) + 0.1 * generator.normal(size=120),
            }
        )
        for name, slope in (("one", 0.01), ("two", 0.03), ("three", -0.02))
    ]
    return pd.concat(series, ignore_index=True)


def fit():
    options = {
        "h": HORIZON,
        "input_size": 3 * HORIZON,
        "max_steps": 20,
        "val_check_steps": 5,
        "early_stop_patience_steps": 3,
        "accelerator": "cpu",
    }
    models = [
        NHITS(mlp_units=3 * [[16, 16]], scaler_type="robust", **options, callbacks=[Recorder()]),
        LSTM(encoder_hidden_size=8, decoder_hidden_size=8, **options, callbacks=[Recorder()]),
    ]
    forecast = NeuralForecast(models=models, freq="D")
    forecast.fit(df=frame(), val_size=2 * HORIZON)
    forecast.save("forecast", overwrite=True)


def predict():
    forecast = NeuralForecast.load("forecast")
    table = forecast.predict(df=frame())
    return torch.as_tensor(table.select_dtypes("number").to_numpy())


if __name__ == "__main__":
    main(fit, predict)
