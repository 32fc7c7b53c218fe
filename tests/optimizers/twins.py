"""A small module with its gradients, parameters of real sizes, and comparisons, for the tests of several optimizers."""

from __future__ import annotations

import torch
from torch import nn


def net(device, dtype=torch.float32):
    """Some layers of several layouts, always the same weights."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 1)
    return nn.Sequential(*layers).to(device, dtype).to(memory_format=torch.channels_last)


def gradients(module, step, scale=1.0, contiguous=False):
    """Gives every parameter the gradient of ``step``, in the parameter's own layout or contiguous."""
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        value = value.to(parameter.device, parameter.dtype)
        parameter.grad = value if contiguous else torch.empty_like(parameter).copy_(value)


def assert_same(one, other, tolerance=1e-6):
    for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def same_bits(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


def captured(step):
    """Captures ``step`` after two runs of it on a side stream, and returns the graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    return graph


def large(device="cuda"):
    """Parameters of real sizes, with gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 300_000, (40,), generator=generator).tolist()
    made = [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]
    for one in made:
        one.grad = torch.randn(one.shape, generator=generator).to(device)
    return made
