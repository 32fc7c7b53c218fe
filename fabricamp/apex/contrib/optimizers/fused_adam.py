"""The old FusedAdam; its step takes gradients, a scale, and half parameters to write as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fabricamp.apex.optimizers._layout import StepInGroup
from fabricamp.errors import ConfigError
from fabricamp.optimizers import FusedAdam as Adam
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters


class FusedAdam(StepInGroup, Adam):
    """Adam with decoupled weight decay; ``max_grad_norm`` (0: no limit) clips by the norms passed to ``step``.

    eps is added after the bias correction.  ``use_mt`` and ``amp_scale_adjustment`` have no effect.

    >>> weight, half = torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.float16)
    >>> optimizer = FusedAdam([weight], lr=0.1)
    >>> optimizer.step(grads=[torch.full((2,), 8.0)], output_params=[half], scale=8.0)
    >>> half
    tensor([0.8999, 0.8999], dtype=torch.float16)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if eps_inside_sqrt:
            raise ConfigError("FusedAdam(eps_inside_sqrt=True) is not offered; leave it False, and eps at 1e-8")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay=weight_decay, amsgrad=amsgrad)
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)
        self.defaults["max_grad_norm"] = max_grad_norm

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Updates the parameters by ``grads`` (None: every ``.grad``) divided by ``scale``; returns the result of ``closure``.

        ``grads`` and ``output_params`` (they receive the rounded parameters) are lists with one entry per parameter, or lists of
        such lists, one per group.  ``grad_norms`` are the norms of each group's ``grads``, for the group's ``max_grad_norm``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copies = self._one_each(output_params)
        with torch.no_grad():
            # The step reads them by their addresses: they live until then.
            divided = self._divided(self._one_each(grads), scale, grad_norms)
            self.gather(divided, copies, None)
        self.steer(None)
        FusedOptimizer.step(self)
        return loss

    def _one_each(self, given: Any) -> list[Tensor] | None:
        """Returns a list with one entry per parameter, from such a list or a list of lists; None for None; raises ConfigError."""
        if given is None:
            return None
        entries = list(given)
        if entries and not isinstance(entries[0], Tensor):
            entries = [one for group in entries for one in group]
        count = sum(len(group["params"]) for group in self.param_groups)
        if len(entries) != count:
            raise ConfigError(f"FusedAdam.step got {len(entries)} tensors for {count} parameters; give one each")
        return entries

    def _divided(self, grads: list[Tensor] | None, scale: Any, grad_norms: Any) -> Sequence[Tensor | None]:
        """Returns the gradients divided by ``scale``, and clipped in groups with ``max_grad_norm`` above 0."""
        parameters = owned_parameters(self)
        rest = iter([one.grad for one in parameters] if grads is None else grads)
        result: list[Tensor | None] = []
        norms = list(grad_norms) if isinstance(grad_norms, (list, tuple)) else [grad_norms] * len(self.param_groups)
        for group, norm in zip(self.param_groups, norms, strict=True):
            divisor = scale
            if group["max_grad_norm"] > 0 and norm is not None:
                number = norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float32, device="cpu")
                excess = (number / scale + 1e-6) / group["max_grad_norm"]
                divisor = scale * excess.clamp(min=1.0)
            own = [next(rest) for _ in group["params"]]
            plain = not isinstance(divisor, Tensor) and divisor == 1.0
            result += own if plain else [None if one is None else one.float() / divisor for one in own]
        return result
