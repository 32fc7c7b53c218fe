"""Memory that ``Trainer.plan`` tells before a fit, beside what the fit takes on the GPU here: peaks allocated and reserved.

python benchmarks/memory.py [--networks gpt2,llama] [--kinds eager,blocks] [--seconds 600]

Each network trains three steps, eagerly and with ``compile="blocks"``; the plan is made before, without the GPU.  ``--seconds`` is
the time after which no further network begins.  Without a GPU only the plans are shown, for an H200.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models import Llama, resnet50
from examples.gpt.gpt import GPT
from fabricamp import Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["NETWORKS", "Network", "Task", "planned"]


class Samples(Dataset):
    """Samples of one shape each, made when they are read: tokens below ``classes``, or images with a class."""

    def __init__(self, count: int, shape: tuple[int, ...], classes: int, *, tokens: bool):
        self.count = count
        self.shape = shape
        self.classes = classes
        self.tokens = tokens

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index >= self.count:
            raise IndexError(index)
        if self.tokens:
            return (torch.randint(self.classes, self.shape),)
        return torch.randn(self.shape), torch.randint(self.classes, ())


class Task(TrainingModule):
    """Trains a network by its ``loss(network, batch)``."""

    def __init__(self, network: nn.Module, loss: Callable, optimizer: Callable):
        super().__init__()
        self.network = network
        self.loss = loss
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):  # noqa: D102
        return self.loss(self.network, batch)

    def configure_optimizers(self):  # noqa: D102
        return self.optimizer(self.parameters())


class VisionBlock(nn.Module):
    """Attention and a two-layer network over patches."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, patches, width) to the same shape."""
        batch, length, width = x.shape
        query, key, value = self.inward(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.outward(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.net(self.second(x))


class ViT(nn.Module):
    """ViT-B/16 over images of 224 x 224."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.Sequential(*(VisionBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 3, 224, 224) to (N, 1000)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


class Mlp(nn.Module):
    """Eight residual layers of 4,096."""

    def __init__(self, width: int = 4096, layers: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, width) to (N, 1000)."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Encoder(nn.Module):
    """A BERT-like encoder of torch's own layers, with a head over 30,522 words."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 30522):
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (batch, length) to (batch, length, words)."""
        return self.head(self.encoder(self.words(tokens)))


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, words: int = 10000, width: int = 1024):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.net = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (batch, length) to (batch, length, words)."""
        return self.head(self.net(self.words(tokens))[0])


def next_token(network, batch):
    """Returns the loss of a network that takes tokens and targets."""
    return network(batch[0][:, :-1], batch[0][:, 1:])


def words(network, batch):
    """Returns the loss of a network that returns logits of words."""
    tokens = batch[0]
    return F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def classes(network, batch):
    """Returns the loss of a classifier."""
    return F.cross_entropy(network(batch[0]), batch[1])


def adamw(parameters):
    """Returns torch's AdamW by its fused kernel."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def foreach_adamw(parameters):
    """Returns torch's AdamW as it is by default."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters):
    """Returns torch's SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def fused_adam(parameters):
    """Returns FusedAdam."""
    return FusedAdam(parameters, lr=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network with the shape of a sample, batch size, loss, opt level and optimizer."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    loss: Callable
    level: str
    optimizer: Callable
    classes: int = 1000
    tokens: bool = False
    kinds: tuple[str, ...] = ("eager", "blocks")

    def task(self) -> Task:
        """Returns the module to train."""
        return Task(self.make(), self.loss, self.optimizer)

    def loader(self) -> DataLoader:
        """Returns batches for four steps."""
        return DataLoader(
            Samples(4 * self.batch, self.shape, self.classes, tokens=self.tokens),
            batch_size=self.batch,
            pin_memory=False,
        )

    def trainer(self, kind: str, accelerator: str) -> Trainer:
        """Returns a Trainer of three steps."""
        return Trainer(
            accelerator=accelerator,
            devices=1,
            precision=self.level,
            max_steps=3,
            compile="blocks" if kind == "blocks" else False,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def _gpt() -> GPT:
    return GPT(50304, context=1024, layers=12, width=768, heads=12)


def _llama() -> Llama:
    return Llama(32000, 16, 2048, heads=16, inside=5632)


NETWORKS = {
    "gpt2": Network(
        make=_gpt, shape=(1025,), batch=8, loss=next_token, level="O4", optimizer=fused_adam, classes=50304, tokens=True
    ),
    "llama-1b": Network(
        make=_llama,
        shape=(2049,),
        batch=4,
        loss=next_token,
        level="O5",
        optimizer=fused_adam,
        classes=32000,
        tokens=True,
    ),
    "resnet50": Network(
        make=resnet50, shape=(3, 224, 224), batch=64, loss=classes, level="O1", optimizer=sgd, kinds=("eager",)
    ),
    "vit-b16": Network(make=ViT, shape=(3, 224, 224), batch=64, loss=classes, level="O4", optimizer=adamw),
    "mlp": Network(
        make=Mlp, shape=(4096,), batch=8192, loss=classes, level="O0", optimizer=foreach_adamw, kinds=("eager",)
    ),
    "encoder": Network(
        make=Encoder, shape=(513,), batch=16, loss=words, level="O1", optimizer=adamw, classes=30522, tokens=True
    ),
    "lstm": Network(
        make=Recurrent,
        shape=(257,),
        batch=32,
        loss=words,
        level="O0",
        optimizer=foreach_adamw,
        classes=10000,
        tokens=True,
        kinds=("eager",),
    ),
}


def planned(network: Network, kind: str, card: str | None) -> dict:
    """Returns the plan of a network, with the seconds that it took."""
    began = time.perf_counter()
    with torch.device("meta"):
        task = network.task()
    plan = network.trainer(kind, "cpu").plan(task, network.loader(), card=card)
    return {"allocated": plan.peak_allocated, "reserved": plan.peak_reserved, "seconds": time.perf_counter() - began}


def measured(network: Network, kind: str) -> dict:
    """Trains three steps on the GPU; returns its peaks."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):  # a billion first values take a CPU long
        task = network.task()
    with contextlib.redirect_stdout(io.StringIO()):
        network.trainer(kind, "gpu").fit(task, network.loader())
    result = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    del task
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table, and writes JSON to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--kinds", default="eager,blocks")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    rows = []
    print(
        f"{'network':10} {'kind':7} {'planned':>9} {'measured':>9} {'':>7} {'reserved':>9} {'measured':>9} {'':>7} {'plan s':>7}"
    )
    for kind in options.kinds.split(","):
        for name in options.networks.split(","):
            network = NETWORKS[name]
            if kind not in network.kinds or time.perf_counter() - began > options.seconds:
                continue
            row = {"network": name, "kind": kind, "level": network.level}
            try:
                row["planned"] = planned(network, kind, None if on_gpu else "H200")
                row["measured"] = measured(network, kind) if on_gpu else None
            except Exception as error:  # noqa: BLE001 - the other networks are worth their seconds
                row["error"] = f"{type(error).__name__}: {error}"
                print(f"{name:10} {kind:7} {row['error'][:200]}")
            else:
                print(line(row))
            rows.append(row)
            if options.out:
                device = torch.cuda.get_device_name() if on_gpu else "none"
                options.out.write_text(
                    json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
                )


def line(row: dict) -> str:
    """Returns a row of the table."""
    cells = [f"{row['network']:10} {row['kind']:7}"]
    for name in ("allocated", "reserved"):
        plan = row["planned"][name] / 2**30
        took = row["measured"][name] / 2**30 if row["measured"] else None
        cells += [f"{plan:9.3f}", f"{took:9.3f} {100 * (plan / took - 1):+6.1f}%" if took else f"{'':>9} {'':>7}"]
    return " ".join([*cells, f"{row['planned']['seconds']:7.1f}"])


if __name__ == "__main__":
    main()
