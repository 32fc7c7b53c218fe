"""Half models, and master parameters in lists that the script keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fabricamp import ops
from fabricamp.errors import ConfigError
from fabricamp.precision.casting import cast_floating, own_tensors
from fabricamp.torch_private import AnyBatchNorm

clip_grad_norm = torch.nn.utils.clip_grad_norm_


class tofp16(nn.Module):  # noqa: N801  # apex's name
    """A module that casts its input to fp16."""

    def forward(self, value: Tensor) -> Tensor:
        """Returns ``value`` in fp16."""
        return value.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802  # apex's name
    """Casts every BatchNorm with weights in ``module`` to fp32, in place; returns ``module``."""
    for layer in module.modules():
        if isinstance(layer, AnyBatchNorm) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Returns ``network`` in fp16 with fp32 BatchNorms, preceded by a module that casts the input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating parameters (with gradients) and buffers of ``module`` itself, not of submodules, to ``dtype``."""
    for tensor in own_tensors(module):
        if not tensor.is_floating_point():
            continue
        gradient = tensor.grad
        tensor.grad = None
        tensor.data = tensor.data.to(dtype)
        tensor.grad = None if gradient is None else gradient.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts ``network`` to ``dtype`` in place, except BatchNorms with weights; returns ``network``."""
    for module in network.modules():
        if isinstance(module, AnyBatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """Wraps ``network`` in fp16 with fp32 BatchNorms; casts its positional inputs to fp16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        """Runs the network on ``inputs`` in fp16."""
        return self.network(*cast_floating(inputs, torch.float16))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the trained parameters and their fp32 masters; with ``flat_master`` one flat master for all."""
    model_params: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        masters: list[Tensor] = [nn.Parameter(parameter.detach().clone().float()) for parameter in model_params]
        return model_params, masters
    if len({parameter.dtype for parameter in model_params}) > 1:
        raise ConfigError(
            "flat_master=True needs parameters of one dtype; use model.half() without fp32 BatchNorms, or flat_master=False"
        )
    flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in model_params]).float())
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of a model to its masters, in their dtype."""
    if flat_master:
        gradient = master_params[0].grad
        assert gradient is not None
        gradient.copy_(torch.cat([_gradient(parameter).reshape(-1) for parameter in model_params]))
        return
    sources = []
    destinations = []
    for parameter, master in zip(model_params, master_params, strict=True):
        if parameter.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        sources.append(parameter.grad)
        destinations.append(master.grad)
    ops.copy_cast(sources, destinations)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies masters into the parameters of their model, rounded to the parameters' dtype."""
    masters = [master.detach() for master in master_params]
    if flat_master:
        pieces = masters[0].split([parameter.numel() for parameter in model_params])
        masters = [piece.view_as(parameter) for piece, parameter in zip(pieces, model_params, strict=True)]
    ops.copy_cast(masters, [parameter.detach() for parameter in model_params])


def to_python_float(t: Any) -> float:
    """Returns the value of a one-element tensor, or the first item of a sequence; waits for the device."""
    number: float = t.item() if hasattr(t, "item") else t[0]
    return number
