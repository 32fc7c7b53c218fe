"""N-BEATS and an LSTM of darts' user guide, on a noisy sine: with checkpoints and early stopping, saved and loaded."""

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from darts import TimeSeries
from darts.models import BlockRNNModel, NBEATSModel
from darts.utils.serialization import safe_globals
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from recorder import Records, main


class Recorder(Records, pl.Callback):
    pass


def series():
    generator = np.random.default_rng(0)
    times = pd.date_range("2024-01-01", periods=160, freq="D")
    values = np.sin(np.arange(160) / 5) + 0.1 * generator.normal(size=160)
    return TimeSeries.from_times_and_values(times, values.astype(np.float32)).split_before(120)


def options():
    return {
        "input_chunk_length": 12,
        "output_chunk_length": 4,
        "n_epochs": 3,
        "batch_size": 16,
        "random_state": 7,
        "save_checkpoints": True,
        "force_reset": True,
        "work_dir": "work",
        "pl_trainer_kwargs": {
            "accelerator": "cpu",
            "callbacks": [EarlyStopping("val_loss", patience=5), Recorder()],
        },
    }


def fit():
    training, validation = series()
    nbeats = NBEATSModel(num_stacks=2, num_blocks=1, num_layers=2, layer_widths=16, model_name="nbeats", **options())
    nbeats.fit(training, val_series=validation)
    nbeats.save("nbeats.pt")
    recurrent = BlockRNNModel(
        model="LSTM",
        hidden_dim=8,
        dropout=0.1,
        model_name="lstm",
        lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
        lr_scheduler_kwargs={"gamma": 0.9},
        **options(),
    )
    recurrent.fit(training, val_series=validation)


def predict():
    training, _ = series()
    # darts' own pickles hold the callbacks: EarlyStopping by fabricamp's name, and darts trusts Lightning's alone.  The checkpoints
    # beside them need nothing.
    with safe_globals([Recorder, EarlyStopping, EarlyStoppingReason]):
        nbeats = NBEATSModel.load("nbeats.pt", map_location="cpu")
        best = BlockRNNModel.load_from_checkpoint("lstm", work_dir="work", best=True, map_location="cpu")
    return [torch.as_tensor(model.predict(8, series=training).values()) for model in (nbeats, best)]


if __name__ == "__main__":
    main(fit, predict)
