"""How a run ends: by its limits, a signal, ``nan_policy="stop"`` or an exception."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fabricamp import launch
from fabricamp.engine.ckpt_path import model_checkpoints
from fabricamp.errors import DistributedError, NonFiniteError, advice
from fabricamp.hooks import call_all
from fabricamp.lightning.given import hand_back
from fabricamp.lightning.lending import detach
from fabricamp.module import TrainingModule
from fabricamp.ops.peer_memory import check_peers
from fabricamp.state import REQUEUES
from fabricamp.watchdog import exit_code, hand_on, ignore_at_exit

if TYPE_CHECKING:
    from fabricamp.engine.loop import TrainingLoop
    from fabricamp.engine.session import Session
    from fabricamp.trainer import Trainer


# ~~~ from engine.explanations: Explains errors that Python or torch raised in a step: a note is added to the error, once training has failed by it.


_UNKNOWN_OPTION = re.compile(r"TrainingModule\.log\(\) got an unexpected keyword argument '(\w+)'")
_DTYPES_DIFFER = re.compile(r"same dtype|expected scalar type|Input type .* type .* should be the same")
_PAST_THE_END = re.compile(r"Tried to step \d+ times\. The specified number of total steps is (\d+)")
_FETCHES = str(Path("torch", "multiprocessing", "reductions.py"))
_CONVERTED = ("O2", "O3", "O5")
_TRUE_NAMES = {torch.float64: "64-true", torch.float16: "16-true", torch.bfloat16: "bf16-true"}


def explain(error: BaseException, module: nn.Module, precision: str) -> None:
    """Adds notes on what to change to ``error``, if its text does not say; ``precision`` is a name such as "32-true" or "O2"."""
    found = (
        _unknown_option(error),
        _dtypes_that_differ(error, module, precision),
        _schedule_at_its_end(error),
        _batch_of_a_dead_worker(error),
    )
    for words in itertools.chain(*found):
        error.add_note(f"fabricamp: {words}")


def _unknown_option(error: BaseException) -> Iterator[str]:
    found = _UNKNOWN_OPTION.search(str(error)) if isinstance(error, TypeError) else None
    if found is not None:
        known = list(inspect.signature(TrainingModule.log).parameters)[1:]
        yield f"self.log has no argument {found[1]!r}{advice('self.log', found[1], known)}"


def _dtypes_that_differ(error: BaseException, module: nn.Module, precision: str) -> Iterator[str]:
    words = str(error)
    differ = isinstance(error, RuntimeError) and _DTYPES_DIFFER.search(words) is not None
    if not differ or precision not in ("32-true", *_CONVERTED):
        return
    name = type(module).__name__
    other = next((one.dtype for one in module.parameters() if one.dtype in _TRUE_NAMES), None)
    if other is not None and precision in _CONVERTED:
        yield (
            f"{name} is {other} at precision={precision!r}, and its modules, or copies of them, cast what a step (training_step "
            "and its like) calls them with, nothing else; in other hooks write trainer.precision_plugin.forward(net, x) for net(x)"
        )
    elif other is not None:
        yield (
            f"{name} has {other} parameters, and precision='32-true' converts neither them nor the batch; give "
            f"Trainer(precision={_TRUE_NAMES[other]!r}), which does, or build it in float32"
        )
    elif precision == "32-true" and "double" in words.lower():
        yield (
            f"{name}'s parameters are float32, and it was given float64, which is numpy's default; convert that with .float(), "
            "or give Trainer(precision='64-true')"
        )


def _schedule_at_its_end(error: BaseException) -> Iterator[str]:
    found = _PAST_THE_END.search(str(error)) if isinstance(error, ValueError) else None
    if found is not None:
        yield (
            f"a OneCycleLR of {found[1]} steps was to make one more; build it with "
            f"total_steps=self.trainer.estimated_stepping_batches, or train with max_steps={found[1]}"
        )


def _batch_of_a_dead_worker(error: BaseException) -> Iterator[str]:
    """Explains a failed connection to a worker: the tensors of a batch are fetched from the worker that made it."""
    if not isinstance(error, OSError | EOFError):
        return
    if any(frame.f_code.co_filename.endswith(_FETCHES) for frame, _ in traceback.walk_tb(error.__traceback__)):
        yield (
            "a DataLoader worker exited unexpectedly before its batch was taken; where it was killed, it may have run out of "
            "memory; num_workers=0 shows an error of its own"
        )


_LOG = logging.getLogger("fabricamp")


@contextlib.contextmanager
def giving_back(trainer: Trainer, session: Session) -> Iterator[None]:
    """Releases the session's parts however the run ends; a signal before the first batch ends the run without an exception."""
    agreement = session.agreement
    try:
        yield
    except BaseException as error:
        agreement.leaving = True
        trainer.state.fail()
        if not agreement.abandoned:
            _fail(trainer, session, error)
            raise
        _abandon(trainer, session)
    else:
        trainer.state.end()
        _close(trainer, session)
    finally:
        trainer.state.end()
        detach(session.attachment, session.source)
        hand_back((*trainer.callbacks, *trainer.loggers))


def end_fit(trainer: Trainer, session: Session, loop: TrainingLoop) -> None:
    """Ends a fit after its loop; an interrupted run gets ``on_exception``, and the resumed run calls the hooks at the end."""
    state, hooks, agreement = trainer.state, session.hooks, session.agreement
    if agreement.came_late():
        call_all(hooks.callbacks("on_exception"), KeyboardInterrupt(state.interruption))
        return
    if state.stop_explanation:
        _tell_of_nonfinite(trainer, session)
    loop.end()
    if trainer.precision_plugin.verdicts is not None:
        trainer.precision_plugin.verdicts.drain()
    check_peers()
    call_all(hooks("on_fit_end"))
    if not agreement.came_late() and not state.stop_explanation:
        session.run_summary.end()


def leave_interrupted(trainer: Trainer) -> None:
    """Ends the process after a signal (exit code 143), and a script after Ctrl-C (130); returns to an interactive prompt."""
    reason = trainer.state.interruption
    goes_on = reason == "interrupted" and launch.interactive()
    if not reason or (goes_on and launch.in_call()):  # the caller reports it
        return
    if trainer.is_global_zero:
        _tell_of_interruption(trainer, "Interrupted" if reason == "interrupted" else f"Ended by {reason}")
    if goes_on:
        return
    if reason in REQUEUES:
        _requeue(trainer, reason)
    ignore_at_exit()
    raise SystemExit(exit_code(reason))


def _requeue(trainer: Trainer, reason: str) -> None:
    """Requeues the job; all ranks wait for that, since a launcher may end the others when the first one exits."""
    try:
        if not hand_on(reason) and trainer.is_global_zero and (said := launch.requeue_job()):
            _LOG.info(said)
    finally:
        with contextlib.suppress(DistributedError):
            trainer.strategy.barrier("the requeue")


def _tell_of_interruption(trainer: Trainer, word: str) -> None:
    path = next((one.last_model_path for one in model_checkpoints(trainer) if one.last_model_path), "")
    how = f'; ckpt_path="last" goes on from {path}' if path else ""
    _LOG.info("%s at step %d%s", word, trainer.global_step, how)


def _tell_of_nonfinite(trainer: Trainer, session: Session) -> None:
    explanation = trainer.state.stop_explanation
    call_all(session.hooks.callbacks("on_exception"), NonFiniteError(explanation))
    if trainer.is_global_zero:
        path = next((one.last_model_path for one in model_checkpoints(trainer) if one.last_model_path), "none")
        _LOG.warning("%s; checkpoint: %s", explanation, path)


def _close(trainer: Trainer, session: Session) -> None:
    """Closes a run that ended without an error; if its ``teardown`` raises, the module is restored all the same."""
    try:
        session.end(failed=False)
    except BaseException:
        trainer.state.fail()
        session.give_back(failed=True)
        raise
    session.give_back(failed=False)


def _fail(trainer: Trainer, session: Session, error: BaseException) -> None:
    explain(error, session.module, trainer.precision)
    launch.record_failure(error, in_a_run=trainer.world_size > 1)
    if before := session.watchdog.fail(error):
        launch.record_failure(error)  # again: the error has a note now
        launch.record_others(before=before)
    state = trainer.state
    if isinstance(error, KeyboardInterrupt) or state.batches_done < state.committed:
        # Interrupted anywhere, perhaps within an update or a launch of several steps: this state must not be saved.
        state.stage = None
    _give_back(session, error)


def _abandon(trainer: Trainer, session: Session) -> None:
    """Ends a run that a signal interrupted before its first batch; this rank's own error may be that another rank has left."""
    # No rank leaves before all know why.
    session.agreement.wait_for_answers()
    trainer.state.stage = None
    trainer.state.interrupt(session.agreement.reason)
    _give_back(session, KeyboardInterrupt(session.agreement.reason))


def _give_back(session: Session, error: BaseException) -> None:
    try:
        call_all(session.hooks.callbacks("on_exception"), error)
        if session.source.datamodule is not None:
            session.source.datamodule.on_exception(error)
    finally:
        session.end(failed=True)
        session.give_back(failed=True)
