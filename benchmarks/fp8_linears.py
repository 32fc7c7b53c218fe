"""Measures from which size on a linear layer in FP8 is faster than in bf16: compiled, forward and backward, by size and recipe.

    python benchmarks/fp8_linears.py [--tokens 8192] [--recipes tensorwise,rowwise] [--seconds 100] [--out FILE]

Each layer follows a GELU, as in a block, so that the compiler can fuse the cast of the input with it.  GPU ms: events around passes
that were queued after a sleeping kernel, so launch gaps do not count; bf16 and FP8 alternately, medians.  "gain" is bf16's time
divided by FP8's.  The sizes at the end of the list are left out when the time is over.
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
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SIZES = (  # inputs, outputs
    (2048, 2048),
    (1024, 1024),
    (1024, 4096),
    (4096, 1024),
    (2048, 8192),
    (8192, 2048),
    (4096, 4096),
    (2048, 6144),
    (1024, 3072),
    (512, 2048),
    (2048, 512),
    (512, 512),
    (768, 768),
    (768, 3072),
    (3072, 768),
    (1536, 1536),
    (2048, 1024),
    (1024, 2048),
)


def layer_of(inputs: int, outputs: int, recipe: str | None) -> nn.Module:
    """Returns GELU and a linear layer in bf16, or with FP8 products by ``recipe``."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.GELU(), nn.Linear(inputs, outputs, dtype=torch.bfloat16, device="cuda"))
    if recipe is not None:
        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
    return layer


def pass_of(layer: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> Callable[[], None]:
    """Returns a compiled forward and backward of ``layer``."""
    compiled = torch.compile(layer, dynamic=False)

    def run() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        compiled(x).backward(upstream)

    return run


def gpu_ms(run: Callable[[], None], repeats: int = 10) -> float:
    """Returns the GPU time of one call of ``run`` in ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)  # the host queues the calls meanwhile
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def measured(inputs: int, outputs: int, tokens: int, recipes: list[str], rounds: int) -> dict[str, Any]:
    """Returns GPU ms of bf16 and each recipe for one size."""
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda").requires_grad_()
    upstream = torch.randn(tokens, outputs, dtype=torch.bfloat16, device="cuda")
    ways: dict[str, Callable[[], None]] = {}
    torch.compiler.reset()  # torch keeps a few variants of a layer's code, and each size is one per recipe
    for recipe in (None, *recipes):
        ways[recipe or "bf16"] = pass_of(layer_of(inputs, outputs, recipe), x, upstream)
        ways[recipe or "bf16"]()
        ways[recipe or "bf16"]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            times[name].append(gpu_ms(run))
    row: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "tokens": tokens}
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
    rows = []
    for inputs, outputs in SIZES:
        if time.perf_counter() - begun > options.seconds:
            break
        rows.append(measured(inputs, outputs, options.tokens, options.recipes.split(","), options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
