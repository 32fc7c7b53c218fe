"""PyTorch Tabular's first example: a CategoryEmbeddingModel classifies a table of numbers and categories; saved as a folder."""

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from recorder import Records, main


class Recorder(Records, pl.Callback):
    pass


def table(count, seed):
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(generator.normal(size=(count, 3)), columns=["a", "b", "c"])
    frame["kind"] = generator.choice(["x", "y", "z"], count)
    frame["target"] = np.where(frame.a + (frame.kind == "x") > frame.b, "yes", "no")
    return frame


def fit():
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(
            task="classification", layers="16-8", activation="LeakyReLU", learning_rate=1e-2, dropout=0.1
        ),
        optimizer_config=OptimizerConfig(lr_scheduler="ReduceLROnPlateau", lr_scheduler_monitor_metric="valid_loss"),
        trainer_config=TrainerConfig(
            auto_lr_find=False, batch_size=16, max_epochs=3, accelerator="cpu", checkpoints_path="checkpoints"
        ),
        verbose=False,
    )
    model.fit(train=table(96, 0), validation=table(32, 1), callbacks=[Recorder()], seed=11)
    print(model.evaluate(table(32, 2)))
    model.save_model("model")


def predict():
    model = TabularModel.load_model("model")
    frame = model.predict(table(32, 2))
    return torch.as_tensor(frame.select_dtypes("number").to_numpy())


if __name__ == "__main__":
    main(fit, predict)
