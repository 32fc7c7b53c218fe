"""Trains a tiny diffusion model (DDPM) on handwritten digits.  It teaches one thing: how to train with an average of the weights.

``python train.py`` draws digits with the average that the callback EMA keeps, and with the weights of the last step.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from fabricamp import Trainer, TrainingModule, seed_everything
from fabricamp.callbacks import EMA, ModelCheckpoint

LEVELS = 100  # of noise: level 0 is almost a digit, level 99 almost pure noise


class Denoiser(nn.Module):
    """Predicts the noise in a batch of noisy digits, given the level of noise of each."""

    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 64)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        hidden = self.first(noisy)
        for block in self.blocks:
            hidden = hidden + block(hidden + self.level(level))
        noise: Tensor = self.last(hidden)
        return noise


class Diffusion(TrainingModule):
    signal: Tensor

    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Denoiser()
        # The cosine schedule: the share of the digit's variance that each level keeps.
        turn = torch.linspace(0, 1, LEVELS + 1)[1:] * torch.pi / 2
        self.register_buffer("signal", turn.cos().square().clamp(min=1e-4), persistent=False)

    def loss(self, digits: Tensor) -> Tensor:
        level = torch.randint(LEVELS, (len(digits),), device=digits.device)
        signal = self.signal[level].unsqueeze(1)
        noise = torch.randn_like(digits)
        noisy = signal.sqrt() * digits + (1 - signal).sqrt() * noise
        return F.mse_loss(self.net(noisy, level), noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Returns ``count`` new digits, as rows of 64 pixels: begins with noise, and removes a little of it at each level."""
        digits = torch.randn(count, 64, device=self.device)
        for level in reversed(range(LEVELS)):
            signal = self.signal[level]
            before = self.signal[level - 1] if level > 0 else torch.ones_like(signal)
            noise = self.net(digits, torch.full((count,), level, device=self.device))
            clean = ((digits - (1 - signal).sqrt() * noise) / signal.sqrt()).clamp(-1, 1)
            kept = signal / before
            mean = (before.sqrt() * (1 - kept) * clean + kept.sqrt() * (1 - before) * digits) / (1 - signal)
            spread = ((1 - before) / (1 - signal) * (1 - kept)).sqrt()
            digits = mean + spread * torch.randn_like(digits)
        return digits


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Returns the squared Frechet distance of two sets of digits, each taken as a normal distribution over its 64 pixels."""
    a, b = first.double().cpu(), second.double().cpu()
    root = torch.linalg.eigvals(a.T.cov() @ b.T.cov()).real.clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + a.var(0).sum() + b.var(0).sum() - 2 * root)


def draw(path: str, grids: dict[str, Tensor]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.9), layout="constrained")
    for axes, (title, digits) in zip(figure.subplots(1, len(grids)), grids.items(), strict=True):
        tiles = F.pad(digits[:36].cpu().view(6, 6, 8, 8), (1, 1, 1, 1), value=-1)
        grid = tiles.transpose(1, 2).reshape(60, 60)
        axes.imshow((8 * grid).round().numpy(), cmap="gray_r", vmin=-8, vmax=8, interpolation="nearest")
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=72)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few seconds")
    parser.add_argument("--picture", metavar="PATH", help="draw a grid of digits into this file")
    options = parser.parse_args()
    if options.picture and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    steps, count = (100, 300) if options.quick else (2000, 1000)

    seed_everything(0)
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # pixels from -1 to 1
    data = TensorDataset(digits)
    loader = DataLoader(data, batch_size=64, sampler=RandomSampler(data, num_samples=64 * steps // 10))
    module = Diffusion()
    untrained = module.sample(count)

    # At every step the average moves by 1 - decay towards the weights, so it covers about the last 1 / (1 - decay) steps.
    average = EMA(decay=0.95 if options.quick else 0.995)
    saved = ModelCheckpoint()
    trainer = Trainer(max_epochs=10, callbacks=[average, saved], default_root_dir="runs/diffusion")
    trainer.fit(module, loader)
    torch.manual_seed(1)  # both sets of weights begin with the same noise
    averaged = module.sample(count)  # after fit the module has the average

    # A checkpoint has both: the average as "state_dict", the weights of the last step as "current_model_state".
    checkpoint = torch.load(saved.best_model_path, weights_only=True)
    module.load_state_dict(checkpoint["current_model_state"])
    torch.manual_seed(1)
    latest = module.sample(count)

    print(f"Frechet distance to the real digits, before training: {frechet_distance(untrained, digits):.2f}")
    print(f"with the weights of the last step: {frechet_distance(latest, digits):.2f}")
    print(f"with the average of the weights: {frechet_distance(averaged, digits):.2f}")
    if options.picture:
        draw(options.picture, {"real digits": digits, "last weights": latest, "average of the weights": averaged})


if __name__ == "__main__":
    main()
