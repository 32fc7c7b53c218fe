"""Networks in the structures whose first values differ in who fills what, and the two ways to fill them in one process."""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.strategies.fsdp_units import own_modules, units_of
from fabricamp.strategies.meta_init import FirstValues

__all__ = ["STRUCTURES", "by_units", "on_meta", "tensors", "whole"]

WIDTH, LAYERS, WORDS, LENGTH = 16, 3, 24, 12


class Inner(nn.Module):
    """A part whose method wants an argument of its owner; a call without is a TypeError."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))

    def init_weights(self, init_std):
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.trunc_normal_(self.down.weight, std=init_std)


class OwnerBlock(nn.Module):
    """Fills its parts with a standard deviation of its own."""

    def __init__(self, number):
        super().__init__()
        self.std = 0.02 / math.sqrt(2 * (number + 1))
        self.norm, self.part = nn.RMSNorm(WIDTH), Inner()

    def forward(self, x):
        return x + self.part(self.norm(x))

    def init_weights(self):
        self.norm.reset_parameters()
        self.part.init_weights(self.std)


class RootFillsAll(nn.Module):
    """The root's method fills all units, and computes a complex table that no checkpoint holds, where the old one is."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("turns", self.table(), persistent=False)
        self.layers = nn.ModuleDict({str(number): OwnerBlock(number) for number in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def table(self):
        rates = 1.0 / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        angles = torch.outer(torch.arange(LENGTH), rates)
        return torch.polar(torch.ones_like(angles), angles)

    def init_weights(self, buffer_device=None):
        with torch.device(buffer_device or self.turns.device):
            self.turns = self.table()
        nn.init.normal_(self.words.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.head.weight, std=WIDTH**-0.5, a=-3 * WIDTH**-0.5, b=3 * WIDTH**-0.5)

    def forward(self, tokens):
        x = self.words(tokens) * self.turns[: tokens.shape[1]].real.repeat(1, 2)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


class ScaleOne(nn.Module):
    """A norm with a method of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return self.weight * F.normalize(x, dim=-1)


class PlainBlock(nn.Module):
    def __init__(self, norm=ScaleOne):
        super().__init__()
        self.norm, self.up, self.down = norm(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class RootFillsTheTable(nn.Module):
    """The outermost ``reset_parameters`` fills a table alone; all weights are left to the layers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)
        self.net = nn.ModuleDict(
            {"words": nn.Embedding(WORDS, WIDTH), "h": nn.ModuleList(PlainBlock() for _ in range(LAYERS))}
        )
        cosine, sine = self.tables()
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def tables(self, device=None):
        angles = torch.outer(torch.arange(LENGTH, device=device), 1.0 / (1 + torch.arange(WIDTH, device=device)))
        return angles.cos(), angles.sin()

    def reset_parameters(self):
        self.cosine, self.sine = self.tables(device=self.cosine.device)

    def forward(self, tokens):
        x = self.net["words"](tokens) * self.cosine[: tokens.shape[1]] + self.sine[: tokens.shape[1]]
        for block in self.net["h"]:
            x = block(x)
        return self.head(x)


class AppliedThenZeroed(nn.Module):
    """The root applies a function to each layer, zeroes some, makes half tables where an embedding is, and halves the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock(nn.Identity) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("cosine", self.table(), persistent=False)

    def table(self):
        device = self.words.weight.device
        return torch.outer(torch.arange(LENGTH, device=device), torch.ones(WIDTH, device=device)).cos().bfloat16()

    def fill_one(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=min(1.0, math.sqrt(module.weight.size(0) / module.weight.size(1))) / 4)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=1.0)

    def init_weights(self):
        self.apply(self.fill_one)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.zeros_(block.down.weight)
        self.cosine = self.table()
        self.words.to(torch.bfloat16)

    def forward(self, tokens):
        x = (self.words(tokens) * self.cosine[: tokens.shape[1]]).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Flagged(nn.Module):
    """Modules and tensors are marked as initialized when they are built, and left out then; head and embedding are tied."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(PlainBlock(lambda: nn.LayerNorm(WIDTH)) for _ in range(LAYERS))
        self.tie()
        for module in self.modules():
            module._is_hf_initialized = True
        for tensor in self.parameters():
            tensor._is_hf_initialized = True

    def tie(self):
        self.head.weight = self.words.weight

    @torch.no_grad()
    def init_weights(self):
        for module in self.modules():
            if getattr(module, "_is_hf_initialized", False):
                continue
            if isinstance(module, nn.Linear | nn.Embedding) and not getattr(module.weight, "_is_hf_initialized", False):
                module.weight.data.normal_(mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
            if isinstance(module, nn.Embedding):
                module.weight.data[module.padding_idx].zero_()
            if isinstance(module, nn.LayerNorm):
                module.weight.data.fill_(1.0)
                module.bias.data.zero_()
            module._is_hf_initialized = True
        self.tie()

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stack(nn.Module):
    """Equal blocks of one kind; each with its number."""

    def __init__(self, block, methods=None, **parts):
        super().__init__()
        self.blocks = nn.ModuleList(block(number) for number in range(LAYERS))
        for name, part in parts.items():
            setattr(self, name, part())
        self.methods = methods or ()


def block_of(**methods):
    """Returns a class of blocks with these methods, beside two linear layers."""

    def build(self, number):
        nn.Module.__init__(self)
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

    return type("Part", (nn.Module,), {"__init__": build, "forward": forward, **methods})


def replaces_parameters(self):
    self.up.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)
    self.down.weight = nn.Parameter(self.down.weight.new_empty(WIDTH, 2 * WIDTH))
    nn.init.xavier_uniform_(self.down.weight)


def draws_elsewhere(self):
    """By NumPy, by Python, into ``.data``, and into memory of its own that is copied."""
    self.up.weight.data = torch.from_numpy(np.random.randn(2 * WIDTH, WIDTH)).float()
    self.up.bias.data.copy_(torch.tensor([random.random() for _ in range(2 * WIDTH)]))
    with torch.no_grad():
        self.down.weight.copy_(torch.empty(WIDTH, 2 * WIDTH).normal_())
        self.down.bias.copy_(torch.rand(WIDTH))


def orthogonal(self):
    nn.init.orthogonal_(self.up.weight)
    nn.init.sparse_(self.down.weight, 0.5)


def by_generator(self):
    nn.init.normal_(self.up.weight, generator=torch.Generator().manual_seed(7))
    nn.init.normal_(self.down.weight, generator=torch.Generator().manual_seed(7))


def scales_what_layers_draw(self):
    """Changes what the layers have drawn, as after a constructor; and makes a parameter from another one."""
    with torch.no_grad():
        self.down.weight.mul_(1 / math.sqrt(2 * LAYERS))
        self.up.bias.copy_(self.up.weight.norm(dim=1))


def in_parts(self):
    query, key = self.up.weight.chunk(2)
    nn.init.normal_(key, std=0.1)
    nn.init.normal_(query, std=0.01)
    torch._foreach_zero_([self.up.bias, self.down.bias])


def registers(self):
    if "steps" not in dict(self.named_buffers()):
        self.register_buffer("steps", torch.arange(4) + self.number)
    nn.init.normal_(self.up.weight)


class ReadsAcross(nn.Module):
    """The root copies one block's weights to the next."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock(nn.Identity) for _ in range(LAYERS))

    def init_weights(self):
        for block in self.blocks:
            for tensor in block.parameters():
                nn.init.normal_(tensor, std=0.1)
        with torch.no_grad():
            for block in self.blocks[1:]:
                block.up.weight.mul_(self.blocks[0].up.weight)


class Kinds(nn.Module):
    """Layers of torch with statistics, counters, hidden methods, and lists of their parameters; tensors of other dtypes."""

    def __init__(self, number=0):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH)])
        self.memory = nn.LSTM(WIDTH, WIDTH)
        self.one = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.register_buffer("full", torch.ones(2, dtype=torch.bool))
        self.register_buffer("bytes", torch.full((2,), 255, dtype=torch.uint8))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int64))

    def reset_parameters(self):
        nn.init.ones_(self.one)
        self.mask.copy_(torch.ones(4, 4, dtype=torch.bool).tril())
        self.full.fill_(True)
        self.bytes.fill_(255)


class OneGenerator(nn.Module):
    """The root draws for all units from a generator that it has."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock(nn.Identity) for _ in range(LAYERS))
        self.generator = torch.Generator("cpu").manual_seed(7)

    def init_weights(self):
        for tensor in self.parameters():
            nn.init.normal_(tensor, generator=self.generator)


STRUCTURES = {
    "root fills all, inner methods want arguments, complex table": RootFillsAll,
    "outermost reset_parameters fills a table alone": RootFillsTheTable,
    "root applies a function, then zeroes, half embedding": AppliedThenZeroed,
    "flags of transformers, tied embedding": Flagged,
    "parameters replaced": functools.partial(Stack, block_of(init_weights=replaces_parameters)),
    "numpy, python, data, copies": functools.partial(Stack, block_of(init_weights=draws_elsewhere)),
    "orthogonal, sparse": functools.partial(Stack, block_of(init_weights=orthogonal)),
    "generators of its own": functools.partial(Stack, block_of(init_weights=by_generator)),
    "one generator for all units": OneGenerator,
    "scales what layers draw": functools.partial(Stack, block_of(init_weights=scales_what_layers_draw)),
    "parts of a tensor": functools.partial(Stack, block_of(reset_parameters=in_parts)),
    "registers buffers": functools.partial(Stack, block_of(init_weights=registers)),
    "reads across units": ReadsAcross,
    "torch's layers": functools.partial(Stack, Kinds),
    "torch's transformer": lambda: nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True),
}


def on_meta(build):
    with torch.device("meta"):
        return build()


def tensors(module):
    """Returns parameters and buffers by name, those that are shared by each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def first_values(module, seed, device="cpu"):
    wanted = [name for name, one in tensors(module).items() if one.is_meta]
    return FirstValues(module, torch.device(device), seed, wanted)


def whole(build, seed=3, device="cpu"):
    """Returns the module with all tensors filled at once, and the names of those without values."""
    module = on_meta(build)
    values = first_values(module, seed, device)
    values.fill(list(module.modules()))
    return module, values.unfilled


def by_units(build, seed=3, device="cpu"):
    """The same, filled unit by unit."""
    module = on_meta(build)
    values = first_values(module, seed, device)
    found = units_of(module, "auto")
    for unit in found:
        values.fill(own_modules(unit, found))
    return module, values.unfilled
