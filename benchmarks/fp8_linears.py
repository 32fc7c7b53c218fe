"""Measures from which width on blocks of linear layers are faster in FP8 than in bf16: compiled, forward and backward, by recipe.

    python benchmarks/fp8_linears.py [--tokens 8192] [--recipes tensorwise,rowwise] [--seconds 100] [--out FILE]

A block is a norm, a linear layer, GELU, a linear layer and the sum with its input, so the compiler can fuse the casts with what
comes before and after; two blocks follow each other.  GPU ms: events around passes that were queued after a sleeping kernel, so
launch gaps do not count; bf16 and FP8 alternately, medians.  "gain" is bf16's time divided by FP8's.  The sizes at the end of the
list are left out when the time is over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SIZES = (  # width of the block, and within it
    (1024, 4096),
    (2048, 2048),
    (2048, 8192),
    (1024, 1024),
    (1536, 6144),
    (768, 3072),
    (4096, 4096),
    (1536, 1536),
    (4096, 16384),
)


class Block(nn.Module):
    """Two linear layers with a norm, GELU and a sum."""

    def __init__(self, width: int, within: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, within)
        self.narrow = nn.Linear(within, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of ``x`` and the output of the layers."""
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def blocks_of(width: int, within: int, recipe: str | None) -> nn.Module:
    """Returns two blocks in bf16, or with FP8 products by ``recipe``."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(width, within), Block(width, within)).to("cuda", torch.bfloat16)
    if recipe is not None:
        convert_to_float8_training(blocks, config=Float8LinearConfig.from_recipe_name(recipe))
    return blocks


def pass_of(blocks: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> Callable[[], None]:
    """Returns a compiled forward and backward of ``blocks``."""
    compiled = torch.compile(blocks, dynamic=False, options={"deterministic": True})  # as the Trainer compiles

    def run() -> None:
        x.grad = None
        for parameter in blocks.parameters():
            parameter.grad = None
        compiled(x).backward(upstream)

    return run


def gpu_ms(run: Callable[[], None], repeats: int = 10) -> float:
    """Returns the GPU time of one call of ``run`` in ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)  # the host queues the calls meanwhile, about 1 ms each
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def measured(width: int, within: int, tokens: int, recipes: list[str], rounds: int) -> dict[str, Any]:
    """Returns GPU ms of bf16 and each recipe for one size."""
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda").requires_grad_()
    upstream = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    ways: dict[str, Callable[[], None]] = {}
    torch.compiler.reset()  # torch keeps a few variants of a module's code, and each size is one per recipe
    for recipe in (None, *recipes):
        run = pass_of(blocks_of(width, within, recipe), x, upstream)
        run()
        run()
        ways[recipe or "bf16"] = run
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            times[name].append(gpu_ms(run))
    row: dict[str, Any] = {"width": width, "within": within, "tokens": tokens}
    row.update({f"{name}_ms": round(statistics.median(each), 4) for name, each in times.items()})
    row.update({f"{name}_gain": round(row["bf16_ms"] / row[f"{name}_ms"], 3) for name in recipes})
    return row


def main() -> None:
    """Measures the sizes and prints a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recipes", default=",".join(RECIPES[:2]))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun = time.perf_counter()
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = []
    for width, within in SIZES:
        if time.perf_counter() - begun > options.seconds:
            break
        rows.append(measured(width, within, options.tokens, options.recipes.split(","), options.rounds))
        print(json.dumps(rows[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
