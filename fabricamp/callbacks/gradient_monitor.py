"""Logs gradient norms and histograms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fabricamp.arguments.checks import check_kind
from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError
from fabricamp.gradients.norms import histogram_of, norms_of
from fabricamp.loggers.base import Logger
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import module_parameter

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class GradientMonitor(Callback):
    """Logs the norm of the gradients (averaged over ranks, unscaled, before clipping) every ``log_every_n_steps`` steps.

    Names are those of ``grad_norm``: ``grad_2.0_norm_total``, ``grad_2.0_norm/net.0.weight``; with several optimizers the
    second's total is ``grad_2.0_norm_total/1``.  In a step that is skipped for overflow the norms are inf or nan.  The host waits
    only for histograms.  Like any hook between backward and step, this one makes each step unscale gradients in a separate pass.

    Args:
        norm_type: which norm: 2, 1, or ``float("inf")`` for the largest value.
        per_parameter: logs the norm of each parameter's gradient too.
        histograms: gives TensorBoardLogger and WandbLogger a histogram of each parameter's gradient.

    Raises:
        ConfigError: for another ``norm_type``; if there is no logger, or none that takes histograms.

    Example:
        >>> monitor = GradientMonitor(per_parameter=True)
    """

    def __init__(self, norm_type: float = 2.0, *, per_parameter: bool = False, histograms: bool = False) -> None:
        super().__init__()
        check_kind(self, "a number", norm_type=norm_type)
        check_kind(self, "True or False", per_parameter=per_parameter, histograms=histograms)
        if not norm_type > 0:
            raise ConfigError(f"GradientMonitor(norm_type={norm_type!r}): give a number above 0, or float('inf')")
        self.norm_type = float(norm_type)
        self.per_parameter = per_parameter
        self.histograms = histograms

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Raises :class:`ConfigError` if no logger takes the values."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.fast_dev_run:
            return
        if not trainer.loggers:
            raise ConfigError("GradientMonitor needs a logger: Trainer(logger=True), or leave the callback out")
        kinds = [type(logger) for logger in trainer.loggers]
        if self.histograms and all(kind.log_histogram is Logger.log_histogram for kind in kinds):
            raise ConfigError(
                f"GradientMonitor(histograms=True): {', '.join(kind.__name__ for kind in kinds)} takes no histograms; give a "
                "TensorBoardLogger or a WandbLogger too, or leave histograms out"
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        """Logs norms and histograms if the step is logged."""
        if (trainer.global_step + 1) % (trainer.log_every_n_steps or math.inf):  # the same steps on every rank
            return
        own = {id(module_parameter(updated)) for updated in owned_parameters(optimizer)}
        gradients = {
            name: parameter.grad
            for name, parameter in pl_module.named_parameters()
            if id(parameter) in own and parameter.grad is not None
        }
        norms, total = norms_of(gradients, self.norm_type)
        if total is None:
            return
        number = next((index for index, other in enumerate(trainer.optimizers) if other is optimizer), 0)
        prefix = f"grad_{self.norm_type}_norm"
        values = {f"{prefix}_total" + (f"/{number}" if number else ""): total}
        if self.per_parameter:
            values |= {f"{prefix}/{name}": norm for name, norm in norms.items()}
        for name, value in values.items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)
        if self.histograms and trainer.is_global_zero:
            self._log_histograms(trainer, gradients)

    def _log_histograms(self, trainer: Trainer, gradients: dict[str, Tensor]) -> None:
        histograms = [histogram_of(gradient) for gradient in gradients.values()]
        device = histograms[0].low.device
        # All numbers in one tensor: the host waits once.
        rows = torch.stack([torch.cat([one.counts, torch.stack(one[1:])]).to(device) for one in histograms])
        for name, (*counts, low, high, total, squares) in zip(gradients, rows.tolist(), strict=True):
            if any(counts):
                trainer.delivery.log_histogram(
                    f"gradients/{name}", counts, (low, high), (total, squares), trainer.global_step
                )
