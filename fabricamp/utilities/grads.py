"""Gradient norms, for logging."""

from __future__ import annotations

from torch import Tensor, nn

from fabricamp.errors import ConfigError
from fabricamp.gradients.norms import norms_of


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Returns the norm of each parameter's gradient, and of all gradients together, by name; empty if there are no gradients.

    Call it in ``on_before_optimizer_step``, where gradients are averaged and unscaled.  The values stay on the device:
    ``self.log_dict`` takes them as they are.  Raises :class:`ConfigError` if ``norm_type`` is not above 0.
    """
    order = float(norm_type)
    if not order > 0:
        raise ConfigError(f"grad_norm(norm_type={norm_type!r}): give a number above 0, or 'inf'")
    norms, total = norms_of({name: one.grad for name, one in module.named_parameters() if one.grad is not None}, order)
    found = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in norms.items()}
    return found if total is None else {**found, f"grad_{order}_norm_total": total}
