"""The largest relative difference between what two runs of a script wrote down (recorder.py)."""

import math
from pathlib import Path

import torch

SAME = 1e-6


class Difference:
    """The largest relative difference and its place; infinite if a value is missing on one side."""

    def __init__(self):
        self.largest = 0.0
        self.numbers = 0
        self.where = ""
        self.over = 0

    def add(self, relative, where):
        self.numbers += 1
        self.over += relative > SAME
        if relative > self.largest:
            self.largest, self.where = relative, where

    def numbers_of(self, one, other, where):
        """Compares two logged values, relative to the larger one; two equal infinities or two NaNs are equal."""
        if one == other or (math.isnan(one) and math.isnan(other)):
            self.add(0.0, where)
        elif math.isfinite(one) and math.isfinite(other):
            self.add(abs(one - other) / max(abs(one), abs(other)), f"{where}: {one!r} and {other!r}")
        else:
            self.add(math.inf, f"{where}: {one!r} and {other!r}")

    def tensors(self, one, other, where):
        """Compares two tensors, relative to the largest value in either."""
        if one.shape != other.shape or one.dtype != other.dtype:
            self.add(math.inf, f"{where}: {tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}")
            return
        one, other = one.double(), other.double()
        apart = (one - other).abs().nan_to_num(nan=math.inf)
        apart[(one == other) | (one.isnan() & other.isnan())] = 0
        if not apart.any():
            self.add(0.0, where)
            return
        scale = torch.maximum(one.abs(), other.abs()).nan_to_num(nan=0.0, posinf=0.0).max()
        self.add(float(apart.max() / scale), where)

    def trees(self, one, other, where):
        """Compares lists, dicts and tensors."""
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            self.tensors(one, other, where)
        elif isinstance(one, dict) and isinstance(other, dict):
            for name in sorted(one.keys() ^ other.keys()):
                self.add(math.inf, f"{where}: only one of the two has {name}")
            for name in one.keys() & other.keys():
                self.trees(one[name], other[name], f"{where} {name}")
        elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            if len(one) != len(other):
                self.add(math.inf, f"{where}: {len(one)} and {len(other)} entries")
            for number, pair in enumerate(zip(one, other, strict=False)):
                self.trees(*pair, f"{where} [{number}]")
        elif isinstance(one, (int, float)) and isinstance(other, (int, float)):
            self.numbers_of(float(one), float(other), where)
        elif one != other:
            self.add(math.inf, f"{where}: {one!r} and {other!r}")


def compared(one: Path, other: Path) -> Difference:
    """Compares all trainings and predictions in folder ``one`` with those in ``other``."""
    difference = Difference()
    names = {
        path.name
        for folder in (one, other)
        for path in folder.glob("*.pt")
        if path.name.startswith(("training-", "predictions"))
    }
    for name in sorted(names):
        if not ((one / name).exists() and (other / name).exists()):
            difference.add(math.inf, f"only one of the two wrote {name}")
            continue
        difference.trees(torch.load(one / name), torch.load(other / name), name.removesuffix(".pt"))
    return difference
