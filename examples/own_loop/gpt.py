"""Trains a small GPT on Python's own source code in a loop of its own, as nanoGPT does, and goes on from its last file.

``python gpt.py`` prints the losses on text that is not trained on; ``--devices 2`` trains in two processes.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fabricamp

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = [one.unflatten(2, (HEADS, -1)).transpose(1, 2) for one in self.attention(self.norms[0](x)).chunk(3, 2)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(mixed)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return logits


def text(size: int) -> Tensor:
    """Returns bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    joined = b"".join(one.read_bytes() for one in files)[:size]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def windows(data: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Returns windows at random places, and the next byte at each place of them; by default of the run's random numbers."""
    begins = torch.randint(len(data) - CONTEXT - 1, (count, 1), generator=generator)
    rows = data[begins + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100, help="steps between two validations")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precision", default="O0")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="1")
    parser.add_argument("--cuda-graph", default=False, const=True, action="store_const")
    parser.add_argument("--folder", default="runs/own_loop/gpt")
    options = parser.parse_args()

    run = fabricamp.Loop(
        precision=options.precision,
        strategy=options.strategy,
        devices=options.devices,
        cuda_graph=options.cuda_graph,
        default_root_dir=options.folder,
        seed=0,
    )
    model = GPT()
    optimizer = fabricamp.optimizers.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.1)
    model, optimizer = run.prepare(model, optimizer, clip=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / 40, 0.5 + 0.5 * math.cos(math.pi * min(step / options.steps, 1.0)))
    )
    data = text(2_000_000)
    train, held_out = data[:-200_000], data[-200_000:]
    torch.manual_seed(run.rank)  # each rank draws windows of its own

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())

    run.restore("last", schedule=schedule)
    while run.global_step < options.steps:
        loss = run.step(loss_of, run.to_device(windows(train, options.batch_size)))
        schedule.step()
        if run.global_step % options.every == 0:
            model.eval()
            with torch.no_grad():
                batch = run.to_device(windows(held_out, 256, torch.Generator().manual_seed(1)))
                validation = run.forward(loss_of, batch)
            model.train()
            run.print(f"step {run.global_step}: loss {float(loss):.3f}, on other text {float(validation):.3f}")
            run.save("last", schedule=schedule, asynchronous=True)
    run.close()


if __name__ == "__main__":
    main()
