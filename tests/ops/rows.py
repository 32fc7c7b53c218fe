"""Rows of an update op in every mix of dtypes: parameters of difficult sizes and layouts, with gradients, state and copies."""

from __future__ import annotations

import itertools

import torch

from tests.ops.lists import FLOATS, TOLERANCE, tensors

MIXES = {
    "fp32": [(torch.float32, torch.float32, None)],
    "half masters": [(torch.float16, torch.float32, torch.float16), (torch.float32, torch.float32, None)],
    "everything": [(one, other, None) for one, other in itertools.product(FLOATS, FLOATS)],
    "bf16 copies": [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.float64, torch.float64, torch.float16)],
}
"""Dtypes of gradient, parameter and copy."""


class Rows:
    """Has ``averages`` in the parameters' layout and fp32 ``steps``; a test adds the other states of its op."""

    def __init__(self, device, mix, seed=0):
        self.gradients, self.parameters, self.copies = [], [], []
        for index, (gradient, parameter, copy) in enumerate(MIXES[mix]):
            own = tensors(device, parameter, seed=seed + index)
            self.parameters += own
            self.gradients += [one.to(gradient) for one in tensors(device, parameter, seed=seed + index + 50)]
            self.copies += [None if copy is None else torch.empty_like(one, dtype=copy) for one in own]
        self.wide = [torch.promote_types(one.dtype, torch.float32) for one in self.parameters]
        self.averages = self.zeros()
        self.steps = [torch.zeros((), device=device) for _ in self.parameters]

    def zeros(self):
        return [torch.zeros_like(one, dtype=dtype) for one, dtype in zip(self.parameters, self.wide, strict=True)]

    def twin(self):
        other = object.__new__(type(self))
        for name, values in vars(self).items():
            setattr(other, name, [one.clone() if isinstance(one, torch.Tensor) else one for one in values])
        return other

    @property
    def written(self):
        """All tensors that an update writes."""
        unread = ("gradients", "wide")
        columns = [values for name, values in vars(self).items() if name not in unread]
        return [one for values in columns for one in values if one is not None]

    def assert_near(self, other, fp64=2e-12):
        """Compares a row's state within its parameter's precision, because half parameters enter the state by weight decay."""
        for name, values in vars(self).items():
            if name in ("gradients", "wide"):
                continue
            for mine, theirs, parameter in zip(values, getattr(other, name), self.parameters, strict=True):
                if mine is None:
                    continue
                assert mine.dtype == theirs.dtype
                kind = mine.dtype if TOLERANCE[mine.dtype] > TOLERANCE[parameter.dtype] else parameter.dtype
                tolerance = fp64 if kind == torch.float64 else 4 * TOLERANCE[kind]
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
