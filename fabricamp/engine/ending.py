"""How a run ends: by its limits, a signal, ``nan_policy="stop"`` or an exception."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from fabricamp import launch
from fabricamp.callbacks._ckpt_path import model_checkpoints
from fabricamp.engine.explanations import explain
from fabricamp.errors import DistributedError, NonFiniteError
from fabricamp.hooks import call_all
from fabricamp.lightning.given import hand_back
from fabricamp.lightning.lending import detach
from fabricamp.ops.peer_memory import check_peers
from fabricamp.state import REQUEUES
from fabricamp.watchdog import exit_code, hand_on, ignore_at_exit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp.engine.loop import TrainingLoop
    from fabricamp.engine.session import Session
    from fabricamp.trainer import Trainer

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
