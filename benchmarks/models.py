"""Networks that several benchmarks share and torch does not include: ResNet-50, and a network of Llama 3 8B's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from fabricamp.ops import fused_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Layer", "Llama", "ResNet", "llama_8b", "resnet50", "tiny_resnet"]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with a norm, beside a shortcut; the 3x3 convolution has the stride."""

    def __init__(self, inside: int, width: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        outside = 4 * width
        self.first = nn.Conv2d(inside, width, 1, bias=False)
        self.first_norm = norm(width)
        self.second = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.second_norm = norm(width)
        self.third = nn.Conv2d(width, outside, 1, bias=False)
        self.third_norm = norm(outside)
        self.shortcut = None
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, inside, H, W) to (N, 4 width, H / stride, W / stride)."""
        hidden = F.relu(self.first_norm(self.first(x)), inplace=True)
        hidden = F.relu(self.second_norm(self.second(hidden)), inplace=True)
        hidden = self.third_norm(self.third(hidden))
        return F.relu(hidden + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """Four stages of bottleneck blocks over (N, 3, H, W) images; ``norm`` makes each normalisation from its channels."""

    def __init__(
        self,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        width: int = 64,
        classes: int = 1000,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.stem_norm = norm(width)
        layers, inside = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(inside, width << stage, stride, norm))
                inside = 4 * (width << stage)
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps (N, 3, H, W) to (N, classes)."""
        hidden = F.relu(self.stem_norm(self.stem(images)), inplace=True)
        hidden = self.stages(F.max_pool2d(hidden, 3, 2, padding=1))
        return self.head(hidden.mean((2, 3)))


def resnet50(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> ResNet:
    """Returns ResNet-50: 25.6 million parameters in 161 tensors."""
    return ResNet(norm=norm)


def tiny_resnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> ResNet:
    """Returns a ResNet with one block per stage and 8 channels, to test on a CPU that a script works."""
    return ResNet((1, 1, 1, 1), width=8, classes=10, norm=norm)


class Layer(nn.Module):
    """Causal attention in which four heads share a key and a value, then a gated network; an RMSNorm precedes each."""

    def __init__(self, width: int, heads: int, inside: int):
        super().__init__()
        self.heads, self.shared = heads, heads // 4
        size = width // heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * self.shared * size, bias=False)
        self.outward = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, inside, bias=False)
        self.up = nn.Linear(width, inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps (batch, length, width) to the same shape."""
        batch, length, width = hidden.shape
        x = self.attention_norm(hidden)
        query = rotated(self.query(x).view(batch, length, self.heads, -1).transpose(1, 2))
        key, value = self.key_value(x).view(batch, length, 2 * self.shared, -1).transpose(1, 2).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(query, rotated(key), value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.outward(mixed.transpose(1, 2).reshape(batch, length, width))
        x = self.norm(hidden)
        return hidden + self.down(F.silu(self.gate(x)) * self.up(x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embeddings: rotates pairs of values of (batch, heads, length, size) by position."""
    half = x.shape[-1] // 2
    rates = 500000.0 ** (torch.arange(half, device=x.device) / -half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Llama(nn.Module):
    """:class:`Layer` modules between an embedding and a head; a call with tokens and the next tokens returns the loss."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, inside: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Layer(width, heads, inside) for _ in range(layers)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy; ``tokens`` and ``targets`` are integers of (batch, length)."""
        scores = self.head(self.norm(self.layers(self.tokens(tokens))))
        return fused_cross_entropy(scores, targets, in_place=True)


def llama_8b(vocabulary: int = 128256, layers: int = 32, width: int = 4096) -> Llama:
    """Returns a network of Llama 3 8B's shape, 8.03 billion parameters; other sizes are in proportion."""
    return Llama(vocabulary, layers, width, heads=max(width // 128, 4), inside=width * 7 // 2)
