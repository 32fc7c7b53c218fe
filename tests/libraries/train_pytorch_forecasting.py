"""The Temporal Fusion Transformer of pytorch-forecasting's first tutorial, on two sine waves with noise."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss
from recorder import Records, main

ENCODED, PREDICTED = 12, 4


class Recorder(Records, pl.Callback):
    pass


def frame():
    generator = np.random.default_rng(0)
    times = np.arange(60)
    series = [
        pd.DataFrame(
            {"time": times, "group": str(i), "value": 3 + i + np.sin(times / (2 + i)) + 0.1 * generator.normal(size=60)}
        )
        for i in range(2)
    ]
    return pd.concat(series, ignore_index=True)


def datasets():
    data = frame()
    training = TimeSeriesDataSet(
        data[data.time < 60 - PREDICTED],
        time_idx="time",
        target="value",
        group_ids=["group"],
        min_encoder_length=ENCODED // 2,
        max_encoder_length=ENCODED,
        min_prediction_length=1,
        max_prediction_length=PREDICTED,
        static_categoricals=["group"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["group"], transformation="softplus"),
        add_relative_time_idx=True,
        add_target_scales=True,
        add_encoder_length=True,
    )
    return training, TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)


def fit():
    pl.seed_everything(42)
    training, validation = datasets()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        enable_model_summary=True,
        gradient_clip_val=0.1,
        limit_train_batches=8,
        callbacks=[
            LearningRateMonitor(),
            EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10, mode="min"),
            ModelCheckpoint(dirpath="checkpoints", filename="best", monitor="val_loss"),
            Recorder(),
        ],
        logger=CSVLogger("logs"),
    )
    model = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.03,
        hidden_size=8,
        attention_head_size=1,
        dropout=0.1,
        hidden_continuous_size=4,
        loss=QuantileLoss(),
        log_interval=0,
        optimizer="adam",
        reduce_on_plateau_patience=4,
    )
    trainer.fit(
        model,
        train_dataloaders=training.to_dataloader(train=True, batch_size=8, num_workers=0),
        val_dataloaders=validation.to_dataloader(train=False, batch_size=8, num_workers=0),
    )
    print("best:", trainer.checkpoint_callback.best_model_path)


def predict():
    _, validation = datasets()
    model = TemporalFusionTransformer.load_from_checkpoint("checkpoints/best.ckpt", weights_only=False)
    loader = validation.to_dataloader(train=False, batch_size=8, num_workers=0)
    options = {"accelerator": "cpu", "logger": False}
    return model.predict(loader, mode="quantiles", trainer_kwargs=options)


if __name__ == "__main__":
    main(fit, predict)
