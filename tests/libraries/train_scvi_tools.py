"""scVI of scvi-tools' introduction, on counts of 40 genes in two batches of cells, with early stopping and its own checkpoints."""

import anndata
import lightning.pytorch as pl
import numpy as np
import scvi
import torch
from recorder import Records, main
from scvi.train import SaveCheckpoint


class Recorder(Records, pl.Callback):
    pass


def cells():
    generator = np.random.default_rng(3)
    rates = generator.gamma(2.0, size=(4, 40))
    kinds = generator.integers(0, 4, 120)
    counts = generator.poisson(rates[kinds]).astype(np.float32)
    data = anndata.AnnData(counts, obs={"batch": [f"batch {i % 2}" for i in range(120)]})
    scvi.model.SCVI.setup_anndata(data, batch_key="batch")
    return data


def fit():
    scvi.settings.seed = 0
    model = scvi.model.SCVI(cells(), n_hidden=16, n_latent=4)
    model.train(
        max_epochs=4,
        accelerator="cpu",
        train_size=0.8,
        batch_size=16,
        early_stopping=True,
        check_val_every_n_epoch=1,
        plan_kwargs={"reduce_lr_on_plateau": True, "lr_scheduler_metric": "elbo_validation"},
        enable_checkpointing=True,
        callbacks=[SaveCheckpoint("saved", monitor="elbo_validation", load_best_on_end=True), Recorder()],
    )
    print({name: frame.to_numpy().ravel().tolist() for name, frame in model.history.items()})
    model.save("model", save_anndata=True)


def predict():
    scvi.settings.seed = 0
    model = scvi.model.SCVI.load("model", accelerator="cpu")
    return [torch.as_tensor(model.get_latent_representation()), torch.as_tensor(float(model.get_elbo()))]


if __name__ == "__main__":
    main(fit, predict)
