"""A SchNet for energies and forces, as in SchNetPack's tutorials, on clusters with a spring between each two atoms."""

from pathlib import Path

import ase
import numpy as np
import pytorch_lightning as pl
import torch
import torch.utils.data.dataloader
import torchmetrics
from pytorch_lightning.loggers import CSVLogger
from recorder import Records, main

torch.utils.data.dataloader.T_co = (
    torch.utils.data.dataset._T_co
)  # torch 2.13 renamed it; SchNetPack's annotations import it

import schnetpack as spk
from schnetpack import transform
from schnetpack.data import AtomsDataModule, ASEAtomsData

TRANSFORMS = (
    transform.ASENeighborList(cutoff=5.0),
    transform.RemoveOffsets("energy", remove_mean=True, remove_atomrefs=False),
    transform.CastTo32(),
)


class Recorder(Records, pl.Callback):
    pass


def clusters(count=40):
    generator = np.random.default_rng(2)
    place = np.array([[0.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]])
    for _ in range(count):
        positions = place + 0.1 * generator.normal(size=place.shape)
        between = positions[:, None] - positions
        energy = 0.25 * (between**2).sum()
        forces = -between.sum(1)
        yield ase.Atoms("OHH", positions), {"energy": np.array([energy]), "forces": forces}


def write():
    dataset = ASEAtomsData.create(
        "clusters.db", distance_unit="Ang", property_unit_dict={"energy": "eV", "forces": "eV/Ang"}
    )
    systems, values = zip(*clusters(), strict=True)
    dataset.add_systems(property_list=list(values), atoms_list=list(systems))


def data():
    return AtomsDataModule(
        "clusters.db",
        batch_size=5,
        num_train=24,
        num_val=8,
        num_test=8,
        transforms=list(TRANSFORMS),
        num_workers=0,
        distance_unit="Ang",
        property_units={"energy": "eV", "forces": "eV/Ang"},
    )


def task():
    representation = spk.representation.SchNet(
        n_atom_basis=8,
        n_interactions=2,
        radial_basis=spk.nn.GaussianRBF(n_rbf=8, cutoff=5.0),
        cutoff_fn=spk.nn.CosineCutoff(5.0),
    )
    model = spk.model.NeuralNetworkPotential(
        representation=representation,
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[
            spk.atomistic.Atomwise(n_in=8, output_key="energy"),
            spk.atomistic.Forces(energy_key="energy", force_key="forces"),
        ],
        postprocessors=[transform.CastTo64(), transform.AddOffsets("energy", add_mean=True, add_atomrefs=False)],
    )
    outputs = [
        spk.task.ModelOutput(
            name=name, loss_fn=torch.nn.MSELoss(), loss_weight=weight, metrics={"MAE": torchmetrics.MeanAbsoluteError()}
        )
        for name, weight in (("energy", 0.01), ("forces", 0.99))
    ]
    return spk.task.AtomisticTask(
        model=model,
        outputs=outputs,
        optimizer_cls=torch.optim.AdamW,
        optimizer_args={"lr": 5e-3},
        scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau,
        scheduler_args={"patience": 1},
        scheduler_monitor="val_loss",
        warmup_steps=3,
    )


def fit():
    pl.seed_everything(4)
    write()
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        inference_mode=False,
        callbacks=[
            spk.train.ModelCheckpoint(
                model_path="best_model", dirpath="checkpoints", save_top_k=1, monitor="val_loss", save_last=True
            ),
            Recorder(),
        ],
    )
    trainer.fit(task(), datamodule=data())
    print(sorted(path.name for path in Path().iterdir()))


def predict():
    model = torch.load("best_model", weights_only=False, map_location="cpu")
    convert = spk.interfaces.AtomsConverter(neighbor_list=TRANSFORMS[0], dtype=torch.float32)
    results = [model(convert(atoms)) for atoms, _ in list(clusters())[:4]]
    return [{name: one[name].detach() for name in ("energy", "forces")} for one in results]


if __name__ == "__main__":
    main(fit, predict)
