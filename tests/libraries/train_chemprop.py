"""The regression of chemprop's training notebook, on the molecular weights of simple alcohols, amines and acids."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from chemprop import data, featurizers, models, nn
from lightning.pytorch.callbacks import ModelCheckpoint
from recorder import Records, main

CHAINS = [
    end.format(chain="C" * length) for length in range(1, 13) for end in ("{chain}O", "{chain}N", "{chain}C(=O)O")
]


class Recorder(Records, pl.Callback):
    pass


def points():
    return [data.MoleculeDatapoint.from_smi(smiles, [float(len(smiles) + smiles.count("O") / 2)]) for smiles in CHAINS]


def splits():
    every = points()
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    parts = [every[i::6] for i in range(6)]
    training = [one for part in parts[:4] for one in part]
    return [data.MoleculeDataset(part, featurizer) for part in (training, parts[4], parts[5])]


def fit():
    pl.seed_everything(5)
    training, validation, test = splits()
    scaler = training.normalize_targets()
    validation.normalize_targets(scaler)
    output = nn.UnscaleTransform.from_standard_scaler(scaler)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=16, hidden_dim=16, output_transform=output, dropout=0.1),
        batch_norm=True,
        metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
    )
    trainer = pl.Trainer(
        logger=False,
        enable_checkpointing=True,
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        callbacks=[
            ModelCheckpoint("checkpoints", "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True),
            Recorder(),
        ],
    )
    loaders = [
        data.build_dataloader(part, batch_size=6, num_workers=0, shuffle=i == 0)
        for i, part in enumerate((training, validation, test))
    ]
    trainer.fit(model, loaders[0], loaders[1])
    print(trainer.test(dataloaders=loaders[2], weights_only=False))
    Path("best").write_text(trainer.checkpoint_callback.best_model_path)
    models.save_model("model.pt", model)


def predict():
    loader = data.build_dataloader(splits()[2], shuffle=False, num_workers=0)
    model = models.MPNN.load_from_checkpoint(Path("best").read_text())
    trainer = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    from_file = models.load_model("model.pt")
    return [torch.cat(trainer.predict(one, loader, weights_only=False)) for one in (model, from_file)]


if __name__ == "__main__":
    main(fit, predict)
