"""A GPT over bytes, and a text that every machine has: the source code of Python's own standard library."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import ConfigError, DataModule, TrainingModule
from fabricamp.errors import nearest
from fabricamp.ops import fused_cross_entropy
from fabricamp.optimizers import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 256
OPTIMIZERS = {"fused": FusedAdam, "torch": torch.optim.AdamW}


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.inward(hidden).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer network, each after a normalisation and added to its input."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = layers  # of the whole network: 2 * layers results are added up
        self.first_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.second_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.init_weights()

    def init_weights(self) -> None:
        """Gives the linear layers their first values; the Trainer calls it too, for blocks that were built on the meta device."""
        inward = 0.5 / self.width**0.5
        outward = 0.5 / (self.width * 2 * self.layers) ** 0.5
        for linear, std in (
            (self.attention.inward, inward),
            (self.attention.outward, outward),
            (self.wide, inward),
            (self.narrow, outward),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first_norm(hidden))
        return hidden + self.narrow(F.gelu(self.wide(self.second_norm(hidden))))


class Table(nn.Embedding):
    """An embedding with small first values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class GPT(nn.Module):
    """GPT-2's network with a head of its own; called with tokens and the tokens that follow them, it returns the loss.

    ``GPT(50257, context=512, layers=12, width=768, heads=12)`` is GPT-2-small: 162.6 million parameters.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int,
        layers: int,
        width: int,
        heads: int,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} cannot be shared by heads={heads}; give a multiple")
        # In place, because the logits are most of the memory and nothing else reads them.
        self.loss = loss or partial(fused_cross_entropy, in_place=True)
        self.tokens = Table(vocabulary, width)
        self.positions = Table(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, layers) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy (nats per token), in fp32; ``tokens`` and ``targets`` are integers (batch, length)."""
        return self.loss(self.scores(tokens), targets)

    def scores(self, tokens: Tensor) -> Tensor:
        """Returns the logits of what follows each token, (batch, length, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class LanguageModel(TrainingModule):
    """Learns to predict the next byte; ``optimizer`` is "fused" (FusedAdam) or "torch" (AdamW).

    ``meta`` builds the network without memory; under "fsdp" each process then gets memory for its shards alone.
    """

    def __init__(
        self,
        optimizer: str = "fused",
        lr: float = 3e-3,
        *,
        context: int = 128,
        layers: int = 3,
        width: int = 96,
        heads: int = 3,
        meta: bool = False,
    ) -> None:
        super().__init__()
        if optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer={optimizer!r} is not known{nearest(optimizer, OPTIMIZERS)} (known: fused, torch)"
            )
        self.save_hyperparameters()
        self.net: GPT | None = None
        self.sizes = {"context": context, "layers": layers, "width": width, "heads": heads}

    def configure_model(self) -> None:
        """Builds the network in each process, unless an earlier fit has built it."""
        if self.net is None:
            with torch.device("meta" if self.hparams.meta else "cpu"):
                self.net = GPT(BYTES, **self.sizes)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), batch_size=len(batch[0]))

    @torch.no_grad()
    def write(self, start: str, length: int = 200) -> str:
        """Returns ``start`` and ``length`` more bytes, each sampled from the network's prediction."""
        text = torch.tensor([list(start.encode())], device=self.device)
        for _ in range(length):
            scores = self.net.scores(text[:, -self.hparams.context :])[0, -1].float()
            text = torch.cat([text, torch.multinomial((scores / 0.7).softmax(dim=0), 1)[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [one for one in self.parameters() if one.dim() > 1]
        vectors = [one for one in self.parameters() if one.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = OPTIMIZERS[self.hparams.optimizer](groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=0.1,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: list[Tensor]) -> Tensor:
        windows = batch[0].long()
        return self.net(windows[:, :-1], windows[:, 1:])


class SourceText(DataModule):
    """The modules of the standard library as windows of ``context`` + 1 bytes; every tenth module is for the test.

    ``batch_size`` is that of all processes together, so that a run learns the same on one and on several.
    """

    def __init__(self, batch_size: int = 16, context: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context = context

    def setup(self, stage: str) -> None:
        modules = sorted(Path(os.__file__).parent.glob("*.py"))
        self.train = TensorDataset(self._windows([one for place, one in enumerate(modules) if place % 10]))
        self.test = TensorDataset(self._windows(modules[::10])[::5])  # a fifth of the windows is enough

    def train_dataloader(self) -> DataLoader:
        processes = self.trainer.world_size
        if self.batch_size % processes:
            raise ConfigError(
                f"batch_size={self.batch_size} cannot be shared by {processes} processes; give a multiple"
            )
        return DataLoader(
            self.train,
            batch_size=self.batch_size // processes,
            shuffle=True,
            drop_last=True,
            pin_memory=torch.cuda.is_available(),
        )

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=32)

    def _windows(self, modules: list[Path]) -> Tensor:
        text = bytearray(b"\n".join(module.read_bytes() for module in modules))
        size = self.context + 1
        return torch.frombuffer(text, dtype=torch.uint8)[: len(text) // size * size].view(-1, size)
