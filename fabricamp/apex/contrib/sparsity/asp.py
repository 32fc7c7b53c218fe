"""Automatic sparsity: masks in the model's buffers, applied before and after every step of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricamp.apex.contrib.sparsity.sparse_masklib import create_mask
from fabricamp.errors import ConfigError

_KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
_ATTENTION = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight")


class _Sparse(NamedTuple):
    """A pruned parameter; ``pruned`` keeps the values that the mask removed, for :meth:`ASP.restore_pruned_weights`."""

    name: str
    parameter: nn.Parameter
    mask: Tensor
    pruned: Tensor | None


class ASP:
    """Prunes a trained model to two zeros in every four weights, and keeps these zeros in further training; one model per process.

    ``ASP.prune_trained_model(model, optimizer)`` does all of it.  It prunes weights of linear and convolutional layers if they have
    a multiple of 8 output channels and a multiple of 16 input channels, as sparse tensor cores need.  Channels are not permuted.
    The masks are buffers of the layers, so that checkpoints contain them.
    """

    _sparse: ClassVar[list[_Sparse] | None] = None
    _calculate: ClassVar[Callable[[Tensor], Tensor]] = create_mask
    _verbosity: ClassVar[int] = 0
    _handles: ClassVar[list[Any]] = []
    _optimizer: ClassVar[Any] = None

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[Tensor], Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type[nn.Module]] = _KINDS,
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: dict[type[nn.Module], list[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Gives the layers of ``model`` masks of ones.

        ``mask_calculator`` is a pattern or a function from a weight to its mask; ``custom_layer_dict`` names the weights of other
        kinds of layers.  ``allow_permutation`` has no effect.
        """
        if cls._sparse is not None:
            raise ConfigError("ASP has a model already; it prunes one model a process")
        cls._verbosity = verbosity
        cls._calculate = (
            (lambda weight: create_mask(weight, mask_calculator))
            if isinstance(mask_calculator, str)
            else mask_calculator
        )
        custom = custom_layer_dict or {}
        kinds = (*whitelist, *custom)
        cls._sparse = []
        for name, layer in list(model.named_modules()):
            allowed = allowed_layer_names is None or name in allowed_layer_names
            if isinstance(layer, kinds) and allowed and name not in disallowed_layer_names:
                weights = custom.get(
                    type(layer), _ATTENTION if isinstance(layer, nn.MultiheadAttention) else ["weight"]
                )
                cls._sparse += cls._of_layer(name, layer, weights, keeps=allow_recompute_mask)

    @classmethod
    def _of_layer(cls, name: str, layer: nn.Module, weights: Sequence[str], *, keeps: bool) -> list[_Sparse]:
        found = []
        for weight in weights:
            parameter = getattr(layer, weight, None)
            if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
                continue
            if parameter.dim() < 2 or parameter.shape[0] % 8 or parameter.shape[1] % 16:
                cls._say(f"[ASP] {name}.{weight} of shape {tuple(parameter.shape)} is left dense", 1)
                continue
            layer.register_buffer(f"__{weight}_mma_mask", torch.ones_like(parameter))
            pruned = None
            if keeps:
                layer.register_buffer(f"__{weight}_mma_pruned_p", torch.zeros_like(parameter, device="cpu"))
                pruned = getattr(layer, f"__{weight}_mma_pruned_p")
            found.append(_Sparse(f"{name}.{weight}", parameter, getattr(layer, f"__{weight}_mma_mask"), pruned))
        return found

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Returns whether a model has masks."""
        return cls._sparse is not None

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: Optimizer) -> None:
        """Makes every step of ``optimizer`` mask the gradients before the update and the weights after it; call it once."""
        cls._of_model("init_optimizer_for_pruning")
        if cls._handles:
            raise ConfigError("ASP has an optimizer already; it masks the steps of one")
        cls._optimizer = optimizer
        cls._handles.append(optimizer.register_step_pre_hook(lambda *_: cls._mask_gradients()))
        cls._handles.append(optimizer.register_step_post_hook(lambda *_: cls._mask_weights()))

    @classmethod
    def _weights(cls, sparse: Sequence[_Sparse]) -> list[tuple[_Sparse, list[Tensor]]]:
        """Returns each of ``sparse`` with [weight], or with [weight, fp32 master] if amp rounds a master into the weight."""
        stash = getattr(cls._optimizer, "_amp_stash", None)
        pairs = [] if stash is None else stash.pairs()
        masters = {id(holder): target for holder, target in pairs if holder is not target}
        found = []
        for one in sparse:
            master = masters.get(id(one.parameter))
            found.append((one, [one.parameter] if master is None else [one.parameter, master]))
        return found

    @classmethod
    @torch.no_grad()
    def _mask_gradients(cls) -> None:
        for one, weights in cls._weights(cls._sparse or ()):
            for weight in weights:
                if weight.grad is not None:
                    weight.grad.mul_(one.mask)

    @classmethod
    @torch.no_grad()
    def _mask_weights(cls) -> None:
        for one, weights in cls._weights(cls._sparse or ()):
            for weight in weights:
                weight.mul_(one.mask)

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Computes the masks from the current weights, and sets the masked weights to 0."""
        for one, weights in cls._weights(cls._of_model("compute_sparse_masks")):
            if one.pruned is not None:
                _add(one.pruned, weights)
            one.mask.copy_(cls._calculate(one.parameter))
            if one.pruned is not None:
                one.pruned.copy_(weights[-1] * (1 - one.mask))
            for weight in weights:
                weight.mul_(one.mask)
            share = 100.0 * one.mask.mean(dtype=torch.float32).item()
            cls._say(f"[ASP] {one.name} of shape {tuple(one.parameter.shape)} keeps {share:.0f} % of its weights", 2)

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Makes the model dense again, with the weights that the masks removed; needs ``allow_recompute_mask=True``."""
        for one, weights in cls._weights(cls._of_model("restore_pruned_weights")):
            if one.pruned is None:
                raise ConfigError(
                    "ASP.restore_pruned_weights has no kept weights; give init_model_for_pruning(allow_recompute_mask=True)"
                )
            one.mask.fill_(1)
            _add(one.pruned, weights)
            one.pruned.zero_()

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Returns True if every mask removes half of its weights, False if all masks are ones; raises ConfigError otherwise."""
        shares = [one.mask.mean(dtype=torch.float32).item() for one in cls._of_model("is_sparsity_enabled")]
        dense, half = [share == 1.0 for share in shares], [share == 0.5 for share in shares]
        if not all(dense) and not all(half):
            raise ConfigError(
                "some of the model's masks are all ones and others are not; load a checkpoint with all masks"
            )
        return bool(shares) and all(half)

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: Optimizer) -> None:
        """Prunes ``model`` by its current weights, and keeps the zeros in every step of ``optimizer``."""
        cls.init_model_for_pruning(model, verbosity=2, allow_recompute_mask=False)
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(cls, *args: Any, **options: Any) -> None:
        """Does nothing: channels are not permuted."""

    @classmethod
    def reset(cls) -> None:
        """Forgets model and optimizer, so that another model can be pruned; the masks stay buffers of the first one."""
        for handle in cls._handles:
            handle.remove()
        cls._handles = []
        cls._sparse = cls._optimizer = None

    @classmethod
    def _of_model(cls, name: str) -> list[_Sparse]:
        if cls._sparse is None:
            raise ConfigError(f"ASP.{name} needs a model; call ASP.init_model_for_pruning(model) first")
        return cls._sparse

    @classmethod
    def _say(cls, line: str, verbosity: int) -> None:
        if cls._verbosity >= verbosity:
            print(line)


def _add(pruned: Tensor, weights: Sequence[Tensor]) -> None:
    """Adds the values that a mask removed to each weight."""
    for weight in weights:
        weight.add_(pruned.to(weight))
