"""self.log on a GPU: the host never waits, and a flush is delivered two steps later."""

import pytest
import torch

from fabricamp.metrics import Metrics
from fabricamp.state import RunState, Scope, TrainerFn
from fabricamp.strategies.base import Environment, Strategy
from tests.metrics.log_calls import log

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_steps_flushes_and_epochs_do_not_wait_for_the_device():
    device = torch.device("cuda", 0)
    state, strategy = RunState(), Strategy()
    state.begin(TrainerFn.FITTING)
    state.scope, state.batch = Scope.TRAIN_STEP, torch.zeros(4, device=device)
    strategy.setup_environment(Environment(), device)
    metrics = Metrics(state, strategy)
    seen = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 9):
            loss = torch.full((), float(step), device=device, requires_grad=True) * 2
            log(metrics, "loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            log(metrics, "half", loss.half())
            log(metrics, "host", torch.tensor(float(step)), on_step=True, on_epoch=True)
            log(metrics, "number", step, on_step=True, on_epoch=True, reduce_fx="sum")
            log(metrics, "least", loss, on_step=False, on_epoch=True, reduce_fx="min")
            metrics.poll(step)
            seen.append(metrics.logged.get("loss_step"))
            if step % 2 == 0:
                metrics.flush(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == [None, None, None, 4.0, 4.0, 8.0, 8.0, 12.0]
    assert metrics.end_train_epoch(8) == {"loss_epoch": 9.0, "host_epoch": 4.5, "number_epoch": 36.0, "least": 2.0}
    assert metrics.logged["half"] == 16.0
    assert metrics.logged["host_step"] == 8.0


def test_the_host_runs_ahead_of_a_busy_device():
    """The flush's copy is queued after seconds of work, and flushing and logging return at once."""
    device = torch.device("cuda", 0)
    state, strategy = RunState(), Strategy()
    state.begin(TrainerFn.FITTING)
    state.scope = Scope.TRAIN_STEP
    strategy.setup_environment(Environment(), device)
    metrics = Metrics(state, strategy)
    value = torch.ones((), device=device)
    log(metrics, "x", value)
    metrics.flush(0)  # allocates the pinned memory, which may wait
    metrics.drain()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    busy = torch.cuda.current_stream().record_event()
    log(metrics, "x", value + 1)
    metrics.flush(1)
    metrics.poll(2)
    assert not busy.query()
    metrics.poll(3)
    assert metrics.logged == {"x": 2.0}
