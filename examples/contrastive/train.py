"""Learns digits without labels (SimCLR).  It teaches one thing: a metric that needs the whole validation set, not one batch.

``python train.py`` compares the k-nearest-neighbour accuracy of the embeddings before and after training.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Trainer, TrainingModule, seed_everything

LABELLED = 100  # digits whose labels the nearest-neighbour classifier knows; training uses no label


def augment(images: Tensor) -> Tensor:
    """Returns each image turned, resized, shifted and with noise, differently at every call."""
    count = len(images)
    turn = 0.25 * torch.randn(count, device=images.device)
    size = 1 + 0.12 * torch.randn(count, device=images.device)
    matrix = torch.zeros(count, 2, 3, device=images.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = size * turn.cos()
    matrix[:, 0, 1] = -size * turn.sin()
    matrix[:, 1, 0] = size * turn.sin()
    matrix[:, :, 2] = 0.12 * torch.randn(count, 2, device=images.device)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved + 0.1 * torch.randn_like(moved)


class SimCLR(TrainingModule):
    def __init__(self, lr: float = 2e-3, temperature: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * 16, 64)),
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (images,) = batch
        both = torch.cat([augment(images), augment(images)])
        views = F.normalize(self.projector(self.encoder(both)))
        similarity = views @ views.T / self.hparams.temperature
        similarity.fill_diagonal_(-torch.inf)  # no view is compared with itself
        partner = torch.arange(len(views), device=self.device).roll(len(images))
        loss = F.cross_entropy(similarity, partner)  # each view has to find the other view of its image
        self.log("train_loss", loss, prog_bar=True)
        return loss

    # The metric: the steps collect, and the end of the epoch computes.  Loader 0 has the labelled digits, loader 1 the others.

    def on_validation_epoch_start(self) -> None:
        self.embeddings: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.digits: tuple[list[Tensor], list[Tensor]] = ([], [])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        images, digits = batch
        self.embeddings[dataloader_idx].append(F.normalize(self.encoder(images)))
        self.digits[dataloader_idx].append(digits)

    def on_validation_epoch_end(self) -> None:
        labelled, others = (torch.cat(parts) for parts in self.embeddings)
        known, expected = (torch.cat(parts) for parts in self.digits)
        nearest = (others @ labelled.T).topk(3, dim=1).indices
        votes = F.one_hot(known[nearest], 10).sum(dim=1)
        self.log("knn_accuracy", (votes.argmax(dim=1) == expected).float().mean(), prog_bar=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.normalize(self.encoder(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def draw(path: str, clouds: dict[str, Tensor], digits: Tensor) -> None:
    """Draws the embeddings in the plane of t-SNE, which keeps neighbours together; a colour per digit."""
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    for axes, (title, embeddings) in zip(figure.subplots(1, len(clouds)), clouds.items(), strict=True):
        points = TSNE(random_state=0).fit_transform(embeddings.cpu().numpy())
        axes.scatter(*points.T, c=digits.numpy(), cmap="tab10", s=2)
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few seconds")
    parser.add_argument(
        "--picture", metavar="PATH", help="draw the embeddings before and after training into this file"
    )
    options = parser.parse_args()
    if options.picture and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")

    seed_everything(0)
    scans = load_digits()
    order = torch.randperm(len(scans.target))
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    digits = torch.tensor(scans.target)[order]
    unlabelled = DataLoader(TensorDataset(images), batch_size=256, shuffle=True, drop_last=True)
    labelled = DataLoader(TensorDataset(images[:LABELLED], digits[:LABELLED]), batch_size=LABELLED)
    others = DataLoader(TensorDataset(images[LABELLED:], digits[LABELLED:]), batch_size=256)
    module = SimCLR()
    trainer = Trainer(
        max_epochs=5 if options.quick else 40,
        check_val_every_n_epoch=5,
        log_every_n_steps=5,
        default_root_dir="runs/contrastive",
    )
    (before, _) = trainer.validate(module, [labelled, others], verbose=False)
    embeddings = {"before training": torch.cat(trainer.predict(module, others) or [])}
    trainer.fit(module, unlabelled, [labelled, others])
    (after, _) = trainer.validate(module, [labelled, others], verbose=False)
    embeddings["after training"] = torch.cat(trainer.predict(module, others) or [])

    print(f"k-NN accuracy before training: {before['knn_accuracy']:.1%}")
    print(f"k-NN accuracy after training: {after['knn_accuracy']:.1%}")
    if options.picture:
        draw(options.picture, embeddings, digits[LABELLED:])


if __name__ == "__main__":
    main()
