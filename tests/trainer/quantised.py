"""An optimizer whose momentum is a tensor of a class of its own, made of two others, as those of torchao's 8-bit optimizers."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Codes(Tensor):
    """Values in fp32, kept as whole numbers of 8 bits with one scale."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values):
        scale = values.abs().max().clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def values(self):
        return self.codes * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        if function is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            return cls(args[0].codes.to(device, copy=True), args[0].scale.to(device, copy=True))
        if function is torch.ops.aten.view.default:
            return cls(args[0].codes.view(args[1]), args[0].scale)
        values = tree_map(lambda one: one.values() if isinstance(one, cls) else one, (args, kwargs or {}))
        return function(*values[0], **values[1])


class Quantised(torch.optim.Optimizer):
    """SGD with such a momentum."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state["momentum"].values() if state else torch.zeros_like(parameter)
                after = 0.9 * before + parameter.grad
                state["momentum"] = Codes.of(after)
                parameter.add_(after, alpha=-group["lr"])


torch.serialization.add_safe_globals([Codes])
