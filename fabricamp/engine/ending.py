"""How a run ends: by its limits, a signal, ``nan_policy="stop"`` or an exception.

:func:`releasing` is around every run, :func:`end_fit` ends a fit after its loop, :func:`leave_interrupted` ends the process after a
signal.  At the end of the file: :func:`explain`, which adds notes to errors of Python and torch.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fabricamp import launch
from fabricamp._utils.threads import THREAD_LIMITS
from fabricamp.engine.out_of_memory import note_of
from fabricamp.engine.report.run_file import folder_to_record_in, record_early_failure
from fabricamp.engine.report.run_summary import shown
from fabricamp.engine.saved.ckpt_path import model_checkpoints
from fabricamp.errors import CheckpointError, DistributedError, FabricampError, NonFiniteError, advice
from fabricamp.hooks import call_all, call_hook
from fabricamp.lightning.given import hand_back
from fabricamp.lightning.lending import detach
from fabricamp.module import TrainingModule
from fabricamp.ops.peer_memory import check_peers
from fabricamp.ops.shards import is_shard, local
from fabricamp.optimizers import modes
from fabricamp.precision.opt_levels import LEVELS
from fabricamp.precision.step_results import LossWatch
from fabricamp.state import REQUEUES
from fabricamp.watchdog import exit_code, hand_on, ignore_at_exit

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricamp.engine.loop import TrainingLoop
    from fabricamp.engine.report.run_summary import RunSummary
    from fabricamp.engine.session import Session
    from fabricamp.metrics import Metrics
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer import Trainer


_LOG = logging.getLogger("fabricamp")

_UNKNOWN_OPTION = re.compile(r"TrainingModule\.log\(\) got an unexpected keyword argument '(\w+)'")
_DTYPES_DIFFER = re.compile(r"same dtype|expected scalar type|Input type .* type .* should be the same")
_PAST_THE_END = re.compile(r"Tried to step \d+ times\. The specified number of total steps is (\d+)")
_FETCHES = str(Path("torch", "multiprocessing", "reductions.py"))
"""The file of torch that fetches the tensors of a batch from a worker."""
_CONVERTED = tuple(name for name, level in LEVELS.items() if level.cast_model_type is not None)
"""The opt levels at which parameters are half precision."""
_REDUCED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of weights that torch takes the norm of."""
_TRUE_NAMES = {torch.float64: "64-true", torch.float16: "16-true", torch.bfloat16: "bf16-true"}


@contextlib.contextmanager
def reading_states(optimizers: Sequence[Optimizer], resumed_from: object) -> Iterator[None]:
    """Turns a key that an optimizer misses in a run that was resumed, from a path or None, into a :class:`CheckpointError`.

    Files of other libraries and of earlier versions do not say whose state they hold.
    """
    try:
        yield
    except KeyError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        stepping = [one for one in optimizers if any(frame.f_locals.get("self") is one for frame in frames)]
        if resumed_from is None or not stepping:
            raise
        name = type(stepping[0]).__name__
        raise CheckpointError(
            f"{name} finds no {error} in the state that {resumed_from} has for it: this is the state of another "
            f"optimizer, or of another version of {name}; return the one that wrote it, or begin a new run with the weights: "
            "load_from_checkpoint(...) and fit without ckpt_path"
        ) from error


@contextlib.contextmanager
def releasing(trainer: Trainer, session: Session) -> Iterator[None]:
    """Releases the session's parts however the run ends; a signal before the first batch ends the run without an exception."""
    agreement = session.agreement
    try:
        yield
    except BaseException as error:
        agreement.note_exception()
        trainer.state.fail()
        if not agreement.abandoned:
            _fail(trainer, session, error)
            raise
        # A signal interrupted the run before its first batch; this rank's own error may only mean that another rank has left.
        agreement.wait_for_answers()  # no rank leaves before all know why
        trainer.state.stage = None
        trainer.state.interrupt(agreement.reason)
        _release_after(session, KeyboardInterrupt(agreement.reason))
    else:
        trainer.state.end()
        _close(trainer, session)
    finally:
        trainer.state.end()
        detach(session.run_context, session.source)
        hand_back((*trainer.callbacks, *trainer.loggers))


def _close(trainer: Trainer, session: Session) -> None:
    """Closes a run that ended without an error; restores the module even if ``teardown`` raises."""
    try:
        session.end(failed=False)
    except BaseException:
        trainer.state.fail()
        session.give_back(failed=True)
        raise
    session.give_back(failed=False)


def _fail(trainer: Trainer, session: Session, error: BaseException) -> None:
    explain(error, session.module, trainer.precision)
    if note := note_of(error, session):
        error.add_note(f"fabricamp: {note}")
    launch.record_failure(error, in_a_run=trainer.world_size > 1)
    earlier = session.watchdog.fail(error)  # the ranks that failed before this one
    if earlier:
        launch.record_failure(error)  # again: the error has a note now
        launch.record_others(before=earlier)
    state = trainer.state
    if isinstance(error, KeyboardInterrupt) or state.batches_done < state.agenda.committed:
        # Interrupted anywhere, perhaps within an update or a launch of several steps: this state must not be saved.
        state.stage = None
    _release_after(session, error)


def _release_after(session: Session, error: BaseException) -> None:
    folder = folder_to_record_in(session.trainer)  # now: a logger that has written nothing gives its folder back
    try:
        call_all(session.hooks.callbacks("on_exception"), error)
        if session.source.datamodule is not None:
            call_hook(session.source.datamodule, "on_exception", error)
    finally:
        session.end(failed=True)
        if session.early_record is not None:
            session.early_record.withdraw()  # a logger gives back a folder in which nothing else was written
        session.give_back(failed=True)
        record_early_failure(session, folder, error)


def end_fit(trainer: Trainer, loop: TrainingLoop, run_summary: RunSummary) -> None:
    """Ends a fit after its loop; an interrupted run gets ``on_exception``, and the resumed run calls the hooks at the end."""
    parts = loop.parts
    state = parts.state
    agreement = parts.agreement
    if agreement.came_late():
        call_all(parts.hooks.callbacks("on_exception"), KeyboardInterrupt(state.stop_request.interruption))
        return
    explanation = state.stop_request.explanation
    if explanation:
        call_all(parts.hooks.callbacks("on_exception"), NonFiniteError(explanation))
        if trainer.is_global_zero:
            _LOG.warning("%s; checkpoint: %s", explanation, _last_checkpoint(trainer) or "none")
    loop.end()
    if parts.precision.verdicts is not None:
        parts.precision.verdicts.drain()
    modes.evaluate(parts.optimizers, parts.precision)
    check_peers()
    call_all(parts.hooks("on_fit_end"))
    if not explanation:
        _tell_of_lost_weights(parts.module, parts.metrics, parts.strategy)
    # A signal during these hooks, or non-finite gradients, are logged by a separate line.
    if not agreement.came_late() and not state.stop_request.explanation:
        run_summary.end()


@torch.no_grad()
def _tell_of_lost_weights(module: nn.Module, metrics: Metrics, strategy: Strategy) -> None:
    """Warns, on rank 0, of weights that are nan at the end of a fit whose loss was not told to be: it need not be logged.

    Every rank calls it: the shards of all ranks are looked at.
    """
    trained = {
        name: one.detach()
        for name, one in module.named_parameters()
        if one.requires_grad and (type(one) is nn.Parameter or is_shard(one)) and one.dtype in _REDUCED
    }
    sharded = any(map(is_shard, trained.values()))
    told = isinstance(metrics.watch, LossWatch) and metrics.watch.told
    if not trained or (not sharded and (told or strategy.rank)):
        return
    parts = [local(one) for one in trained.values()]
    # torch has no norm of nothing, and a rank may have no element of a shard, or of any.
    with_elements = [part for part in parts if part.numel()]
    norms = iter(torch._foreach_norm(with_elements) if with_elements else ())
    zero = torch.zeros((), dtype=torch.float32, device=strategy.device)
    lost = torch.stack([next(norms).to(zero) if part.numel() else zero for part in parts]).isnan()
    if sharded:
        lost = strategy.reduce(lost.to(torch.int32), "max")
    names = [name for name, is_lost in zip(trained, lost.tolist(), strict=True) if is_lost]
    if names and not told and strategy.rank == 0:
        _LOG.warning(
            "%d of %d trained parameters are nan at the end (the first is %s), and so was the loss of a step or a gradient; "
            "Trainer(nan_policy='stop') or 'raise' ends a run at the first gradient that is not finite, keeps the weights from "
            "before and names the parameter",
            len(names),
            len(trained),
            names[0],
        )


def _last_checkpoint(trainer: Trainer) -> str:
    return next((callback.last_model_path for callback in model_checkpoints(trainer) if callback.last_model_path), "")


def leave_interrupted(trainer: Trainer) -> None:
    """Ends the process after a signal (exit code 143), and a script after Ctrl-C (130); returns to an interactive prompt."""
    reason = trainer.state.stop_request.interruption
    if not reason:
        return
    at_prompt = reason == "interrupted" and launch.interactive()
    if at_prompt and launch.in_call():  # the caller reports it
        return
    if trainer.is_global_zero:
        word = "Interrupted" if reason == "interrupted" else f"Ended by {reason}"
        path = _last_checkpoint(trainer)
        how = f'; ckpt_path="last" resumes from {shown(path)}' if path else ""
        _LOG.info("%s at step %d%s", word, trainer.global_step, how)
    if at_prompt:
        return
    if reason in REQUEUES:
        _requeue(trainer, reason)
    ignore_at_exit()
    raise SystemExit(exit_code(reason))


def _requeue(trainer: Trainer, reason: str) -> None:
    """Requeues the job; all ranks wait for that, since a launcher may end the others when the first one exits."""
    try:
        # submitit's own handler requeues the job, if there is one.
        if not hand_on(reason) and trainer.is_global_zero:
            message = launch.requeue_job()
            if message:
                _LOG.info(message)
    finally:
        with contextlib.suppress(DistributedError):
            trainer.strategy.barrier("the requeue")


def explain(error: BaseException, module: nn.Module, precision: str) -> None:
    """Adds notes on what to change to ``error``, unless its text has them; ``precision`` is a name such as "32-true" or "O2"."""
    for note in (
        _note_on_unknown_option(error),
        _note_on_dtypes(error, module, precision),
        _note_on_schedule_end(error),
        _note_on_dead_worker(error),
        _note_on_threads(error),
    ):
        if note:
            error.add_note(f"fabricamp: {note}")


def _note_on_unknown_option(error: BaseException) -> str:
    match = _UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
    if match is None:
        return ""
    known = list(inspect.signature(TrainingModule.log).parameters)[1:]
    return f"self.log has no argument {match[1]!r}{advice('self.log', match[1], known)}"


def _note_on_dtypes(error: BaseException, module: nn.Module, precision: str) -> str:
    text = str(error)
    differ = isinstance(error, RuntimeError) and _DTYPES_DIFFER.search(text) is not None
    if not differ or precision not in ("32-true", *_CONVERTED):
        return ""
    name = type(module).__name__
    other = next((parameter.dtype for parameter in module.parameters() if parameter.dtype in _TRUE_NAMES), None)
    if other is not None and precision in _CONVERTED:
        return (
            f"{name} is {other} at precision={precision!r}, and its modules, or copies of them, cast their inputs only in calls "
            "from a step (training_step and its like); in other hooks write trainer.precision_plugin.forward(net, x) for net(x)"
        )
    if other is not None:
        return (
            f"{name} has {other} parameters, and precision='32-true' converts neither them nor the batch; give "
            f"Trainer(precision={_TRUE_NAMES[other]!r}), which does, or build it in float32"
        )
    if precision == "32-true" and "double" in text.lower():
        return (
            f"{name}'s parameters are float32, and it was given float64, which is numpy's default; convert that with .float(), "
            "or give Trainer(precision='64-true')"
        )
    return ""


def _note_on_schedule_end(error: BaseException) -> str:
    match = _PAST_THE_END.search(str(error)) if isinstance(error, ValueError) else None
    if match is None:
        return ""
    return (
        f"a OneCycleLR of {match[1]} steps was stepped once more; build it with "
        f"total_steps=self.trainer.estimated_stepping_batches, or train with max_steps={match[1]}"
    )


def _note_on_threads(error: BaseException) -> str:
    is_pythons = isinstance(error, RuntimeError) and not isinstance(error, FabricampError)
    if not is_pythons or "can't start new thread" not in str(error):
        return ""
    return f"the system starts no thread: {THREAD_LIMITS}; a DataLoader needs threads for num_workers and pin_memory"


def _note_on_dead_worker(error: BaseException) -> str:
    """Explains a failed connection to a worker: the tensors of a batch are fetched from the worker that made it."""
    if not isinstance(error, OSError | EOFError):
        return ""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(file.endswith(_FETCHES) for file in files):
        return ""
    return (
        "a DataLoader worker exited unexpectedly before its batch was taken; where it was killed, it may have run out of "
        "memory; num_workers=0 shows an error of its own"
    )
