"""Fine-tunes a transformer.  It teaches one thing: a frozen backbone with small trained matrices beside its layers (LoRA).

``python train.py`` trains a language model of Hugging Face's ``transformers``, built from its configuration, on the source code of
Python's standard library.  It then freezes the model, searches a learning rate, and trains LoRA's matrices on Python's manual.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fabricamp import Trainer, TrainingModule, seed_everything
from fabricamp.tuner import Tuner
from fabricamp.tuner.lr_finder import LRFinder

BYTES = 64  # in a window; a byte is a token
RANK = 8


class LoRA(nn.Module):
    """A frozen layer, and beside it the product of two thin matrices, which is zero at first."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.frozen(hidden) + self.up(self.down(hidden))


def add_lora(network: nn.Module) -> None:
    """Freezes ``network``, and replaces each Linear of its blocks by one with LoRA."""
    network.requires_grad_(requires_grad=False)
    for block in network.get_submodule("model.layers").modules():
        linears = [(name, child) for name, child in block.named_children() if isinstance(child, nn.Linear)]
        if not isinstance(block, LoRA):
            for name, child in linears:
                setattr(block, name, LoRA(child))


class LanguageModel(TrainingModule):
    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network = network
        self.lr = lr  # the attribute that lr_find sets
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(input_ids=batch, labels=batch).loss  # nats per byte; the model shifts the labels itself
        self.losses.append(loss.detach())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.network(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr)


def windows(text: str) -> tuple[DataLoader, DataLoader]:
    """Returns loaders of training and test windows; every tenth window is for the test."""
    data = text.encode()
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()[: len(data) // BYTES * BYTES].view(-1, BYTES)
    held_out = torch.arange(len(tokens)) % 10 == 0
    training = DataLoader(tokens[~held_out], batch_size=16, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    return training, DataLoader(tokens[held_out], batch_size=64)  # type: ignore[arg-type]


def draw(path: str, search: LRFinder, losses: Tensor, before: float) -> None:
    """Draws the search for the learning rate, and the loss of fine-tuning with the rate found."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    search.plot(suggest=True, ax=left)
    # The search's running mean begins too small, as Lightning's does: its first points are below the picture.
    left.set(title="lr_find", xlabel="learning rate", ylabel="loss (nats per byte)", ylim=(before - 0.4, before + 0.4))
    mean = losses.unfold(0, 10, 10).mean(dim=1)
    right.plot(torch.arange(1, len(mean) + 1) * 10, mean, label="mean of ten steps")
    right.axhline(before, color="grey", linestyle=":", label="before")
    right.set(title="LoRA on the manual", xlabel="step", ylim=(None, before + 0.2))
    right.legend()
    figure.savefig(path, dpi=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run of a few seconds")
    parser.add_argument("--picture", metavar="PATH", help="draw the search and the loss into this file")
    options = parser.parse_args()
    if options.picture and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")

    seed_everything(0)
    code, _ = windows("\n".join(one.read_text() for one in sorted(Path(os.__file__).parent.glob("*.py"))))
    manual, manual_test = windows("\n".join(pydoc_data.topics.topics.values()))
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BYTES,
    )

    short = 0.15 if options.quick else 1.0

    def trainer(steps: int) -> Trainer:
        return Trainer(
            max_steps=int(steps * short),
            limit_test_batches=8,
            log_every_n_steps=10,
            default_root_dir="runs/finetune",
        )

    network = LlamaForCausalLM(config)
    trainer(600).fit(LanguageModel(network, lr=3e-3), code)

    add_lora(network)
    module = LanguageModel(network, lr=0.0)
    finetuning = trainer(300)
    (before,) = finetuning.test(module, manual_test, verbose=False)
    search = Tuner(finetuning).lr_find(module, manual, min_lr=1e-5, max_lr=1.0, num_training=50)
    module.losses.clear()
    finetuning.fit(module, manual)
    (after,) = finetuning.test(module, manual_test, verbose=False)

    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    print(f"trained parameters: {trained / sum(one.numel() for one in module.parameters()):.1%}")
    print(f"learning rate found: {module.lr:.1e}")
    print(f"loss on the manual before fine-tuning: {before['test_loss']:.3f}")
    print(f"loss on the manual after fine-tuning: {after['test_loss']:.3f}")
    if options.picture:
        draw(options.picture, search, torch.stack(module.losses).cpu(), before["test_loss"])


if __name__ == "__main__":
    main()
