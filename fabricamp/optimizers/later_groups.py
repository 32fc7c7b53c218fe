"""Which learning-rate schedules are right for parameter groups that an optimizer gets after the schedule was made.

A schedule that multiplies the present rates lets a new group begin at its own.  One that sets every rate from numbers of its own
has none for a new group; and a warm-up by ``LinearLR`` or ``ConstantLR`` would divide the new rate by a factor that it never had.
"""

from __future__ import annotations

from bisect import bisect_right

from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from fabricamp.errors import ConfigError
from fabricamp.torch_private import inner_schedules, milestones_of

_SETS_EVERY_RATE = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    SWALR,
)
_CURE = (
    "take a schedule that multiplies the present rates (StepLR, MultiStepLR, ExponentialLR, PolynomialLR, CosineAnnealingLR), or "
    "give the optimizer these parameters as a group of their own in configure_optimizers, where frozen ones get no update, and "
    "only unfreeze them later (BaseFinetuning.make_trainable)"
)


def refuse_later_group(schedule: object, steps: float | None, when: str) -> None:
    """Raises :class:`ConfigError` if ``schedule`` would give a wrong rate, or fail, for a group added after ``steps`` of its steps.

    ``steps`` None means now; ``when`` says who adds the group, and when.  A schedule of another class than torch's is left to its
    author.
    """
    wrong = _wrong_after(schedule, steps)
    if wrong is None:
        return
    inner = "" if wrong is schedule else f" of its {type(wrong).__name__}"
    reason = "has no learning rate for it"
    if isinstance(wrong, lr_scheduler.LinearLR | lr_scheduler.ConstantLR):
        reason = "would raise its learning rate above the given one, because its warm-up has not ended"
    elif isinstance(wrong, lr_scheduler.SequentialLR):
        reason = "begins another schedule later, which has no learning rate for it"
    raise ConfigError(f"{when}, and {type(schedule).__name__} {reason}{inner}; {_CURE}")


def check_later_groups(schedule: object) -> None:
    """Raises :class:`ConfigError` if the optimizer has groups that its ``schedule`` was not made for, and cannot take now.

    A cosine's restart reads the rate with which a group began: for a new one, the present rate.
    """
    optimizer = getattr(schedule, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        return
    when = f"{type(optimizer).__name__} has {len(optimizer.param_groups)} parameter groups since a hook has added one"
    for part in [schedule, *inner_schedules(schedule)]:
        rates = getattr(part, "base_lrs", None)
        if not isinstance(rates, list) or len(rates) >= len(optimizer.param_groups):
            continue
        refuse_later_group(schedule, None, when)
        if isinstance(part, lr_scheduler.CosineAnnealingLR):
            rates += [group["lr"] for group in optimizer.param_groups[len(rates) :]]
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) and len(schedule.min_lrs) < len(optimizer.param_groups):
        refuse_later_group(schedule, None, when)


def _wrong_after(schedule: object, steps: float | None) -> object | None:
    """Returns the schedule, or the one within it, that is wrong for a group added after ``steps``; None if all are right."""
    wrong: object | None = None
    if isinstance(schedule, lr_scheduler.SequentialLR):
        milestones = milestones_of(schedule)
        done = schedule.last_epoch if steps is None else steps
        if bisect_right(milestones, done) < len(milestones):
            wrong = schedule
        else:
            wrong = _wrong_after(
                inner_schedules(schedule)[-1], None if steps is None else steps - (milestones or [0])[-1]
            )
    elif isinstance(schedule, lr_scheduler.ChainedScheduler):
        wrong = next(
            (one for part in inner_schedules(schedule) if (one := _wrong_after(part, steps)) is not None), None
        )
    elif isinstance(schedule, lr_scheduler.LinearLR | lr_scheduler.ConstantLR):
        done = schedule.last_epoch if steps is None else steps
        wrong = schedule if done < schedule.total_iters else None
    elif isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        wrong = schedule if schedule.default_min_lr is None else None  # min_lr was given as a list
    elif isinstance(schedule, _SETS_EVERY_RATE):
        wrong = schedule
    return wrong
