"""Classifies instruments, and teaches one thing: batches are waves, and the model itself makes the spectrograms on its device."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Trainer, TrainingModule, seed_everything

RATE, SAMPLES = 8000, 4000  # half a second
TIME = torch.arange(SAMPLES) / RATE
INSTRUMENTS = ("flute", "clarinet", "string", "bell", "drum")


def partials(pitch: Tensor, ratios: list[float], loudness: list[float], decay: list[float]) -> Tensor:
    """A sum of sines at ratios of the pitch, each with its loudness and its decay per second; a row per pitch."""
    sound = torch.zeros(len(pitch), SAMPLES)
    for ratio, level, fall in zip(ratios, loudness, decay, strict=True):
        phase = torch.rand(len(pitch), 1)
        sound += level * torch.exp(-fall * TIME) * torch.sin(2 * torch.pi * (ratio * pitch[:, None] * TIME + phase))
    return sound


def play(instrument: str, count: int) -> Tensor:
    """``count`` sounds of an instrument, each with a pitch, a loudness and a background noise of its own."""
    pitch = 200 * 2 ** (1.5 * torch.rand(count))  # an octave and a half from 200 Hz
    if instrument == "flute":  # few harmonics, a slow onset
        sound = partials(pitch, [1, 2, 3], [1, 0.4, 0.1], [0, 0, 0]) * (TIME * 10).clamp(max=1)
    elif instrument == "clarinet":  # odd harmonics
        sound = partials(pitch, [1, 3, 5, 7], [1, 0.7, 0.4, 0.2], [0, 0, 0, 0]) * (TIME * 20).clamp(max=1)
    elif instrument == "string":  # all harmonics; the high ones fade first
        sound = partials(pitch, [1, 2, 3, 4, 5, 6], [1, 0.8, 0.6, 0.5, 0.4, 0.3], [3, 5, 7, 9, 11, 13])
    elif instrument == "bell":  # partials that are no harmonics
        sound = partials(pitch, [1, 2.76, 5.4], [1, 0.7, 0.5], [2, 4, 6])
    else:  # a drum: a low tone under noise, both short
        sound = partials(pitch / 3, [1], [1], [12]) + torch.exp(-20 * TIME) * torch.randn(count, SAMPLES)
    return sound * (0.3 + 0.7 * torch.rand(count, 1)) + 0.3 * torch.rand(count, 1) * torch.randn(count, SAMPLES)


def make_sounds(count: int) -> TensorDataset:
    """``count`` waves of each instrument, and the instrument's number."""
    waves = torch.cat([play(instrument, count) for instrument in INSTRUMENTS])
    return TensorDataset(waves, torch.arange(len(INSTRUMENTS)).repeat_interleave(count))


class Listener(TrainingModule):
    """Three convolutions over the spectrogram."""

    window: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(256), persistent=False)
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((4, 1)),
            nn.Flatten(),
            nn.Linear(8 * width, len(INSTRUMENTS)),
        )

    def spectrogram(self, waves: Tensor) -> Tensor:
        """Returns the logarithm of the power at 129 frequencies and 32 times."""
        spectrum = torch.stft(waves, n_fft=256, hop_length=128, window=self.window, return_complex=True)
        return spectrum.abs().square().add(1e-3).log()

    def forward(self, waves: Tensor) -> Tensor:
        scores: Tensor = self.net(self.spectrogram(waves).unsqueeze(1))
        return scores

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        waves, instruments = batch
        loss = F.cross_entropy(self(waves), instruments)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        waves, instruments = batch
        correct = self(waves).argmax(dim=1) == instruments
        self.log("accuracy", correct.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def draw(path: str, module: Listener, sounds: TensorDataset) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("--picture needs matplotlib: pip install matplotlib") from error
    waves, instruments = sounds[torch.arange(0, len(sounds), len(sounds) // 10)]
    with torch.no_grad():
        heard = module.eval()(waves).argmax(dim=1)
        pictures = module.spectrogram(waves)
    figure, axes = plt.subplots(2, 5, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
    for axis, picture, truth, guess in zip(axes.T.flat, pictures, instruments, heard, strict=True):
        axis.imshow(
            picture.numpy(), vmin=2, vmax=8, origin="lower", aspect="auto", extent=(0, SAMPLES / RATE, 0, RATE / 2000)
        )
        color = "black" if truth == guess else "red"
        axis.set_title(f"{INSTRUMENTS[truth]}: heard {INSTRUMENTS[guess]}", fontsize=9, color=color)
    figure.supxlabel("seconds")
    figure.supylabel("kHz")
    figure.savefig(path, dpi=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sounds and epochs, for a test of the script")
    parser.add_argument("--picture", help="draw spectrograms and what was heard into this file")
    parser.add_argument("--folder", default="runs/audio", help="where logs and checkpoints go")
    options = parser.parse_args()

    seed_everything(1)
    train, unheard = make_sounds(60 if options.quick else 200), make_sounds(20 if options.quick else 100)
    module = Listener()
    trainer = Trainer(
        accelerator="cpu", max_epochs=4 if options.quick else 8, log_every_n_steps=5, default_root_dir=options.folder
    )
    trainer.fit(module, DataLoader(train, batch_size=20, shuffle=True), DataLoader(unheard, batch_size=100))
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy on {len(unheard)} sounds that training never heard: {accuracy:.1%}")
    if options.picture:
        draw(options.picture, module, unheard)


if __name__ == "__main__":
    main()
