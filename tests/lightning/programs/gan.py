"""A GAN over points on a circle: two optimizers stepped by hand, pictures of samples in the logger."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger


class Generator(nn.Module):
    def __init__(self, latent_dim, width):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(latent_dim, width),
            nn.BatchNorm1d(width, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(width, 2),
        )

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, points):
        return self.model(points)


class GAN(LightningModule):
    def __init__(
        self, latent_dim: int = 8, width: int = 32, lr: float = 0.002, b1: float = 0.5, b2: float = 0.999, **kwargs
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim=latent_dim, width=width)
        self.discriminator = Discriminator(width=width)
        self.validation_z = torch.randn(8, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(points.shape[0], self.hparams.latent_dim).type_as(points)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(points.size(0), 1).type_as(points)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(points), valid)
        fake = torch.zeros(points.size(0), 1).type_as(points)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        lr, b1, b2 = self.hparams.lr, self.hparams.b1, self.hparams.b2
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(b1, b2))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(b1, b2))
        sched_d = torch.optim.lr_scheduler.StepLR(opt_d, step_size=1, gamma=0.9)
        return [opt_g, opt_d], [sched_d]

    def on_train_epoch_end(self):
        self.lr_schedulers().step()
        sample_points = self(self.validation_z.type_as(self.generator.model[0].weight))
        grid = sample_points.detach().view(1, 4, 4).sigmoid()
        self.logger.experiment.add_image("generated", grid, self.current_epoch)
        metrics = self.trainer.callback_metrics
        print(
            f"epoch {self.current_epoch} batch {self.trainer.fit_loop.total_batch_idx}",
            f"g {metrics['g_loss']:.9f} d {metrics['d_loss']:.9f} lr {self.lr_schedulers().get_last_lr()[0]:.8f}",
        )


class CircleDataModule(LightningDataModule):
    def __init__(self, batch_size: int = 16, num_workers: int = 0):
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage=None):
        angles = 6.28318 * torch.rand(128)
        self.points = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True)


def main(args: argparse.Namespace) -> None:
    seed_everything(42)
    model = GAN(**vars(args))
    dm = CircleDataModule(args.batch_size)
    logger = TensorBoardLogger(save_dir="logs", name="gan")
    trainer = Trainer(accelerator="auto", devices=1, max_epochs=3, logger=logger, log_every_n_steps=4)
    trainer.fit(model, dm)
    print("hparams", dict(sorted(model.hparams.items())))
    print(
        "weights",
        [f"{sum(p.double().sum() for p in net.parameters()):.12f}" for net in (model.generator, model.discriminator)],
    )
    print("samples", [f"{value:.8f}" for value in model(model.validation_z).flatten().tolist()[:6]])
    print("optimizers", [type(optimizer).__name__ for optimizer in trainer.optimizers], logger.version, logger.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--latent_dim", type=int, default=8)
    main(parser.parse_args([]))
