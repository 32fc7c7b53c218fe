"""The host never waits for work that is less than two steps old.

Three checks over 100 steps with clipping, at every opt level, with torch's fused AdamW and with FusedAdam.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, Trainer, TrainingModule
from fabricamp.callbacks import EMA, GradientMonitor
from fabricamp.loggers import CSVLogger
from fabricamp.optimizers import FusedAdam
from tests.inside import averaged_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

OPTIMIZERS = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    "fused": lambda parameters: FusedAdam(parameters, lr=1e-3, eps=1e-4),
}
WARM = 15  # also after the capture of a run with PL_TRAINER_CUDA_GRAPH=auto, which waits
STEPS = 100
FLUSH = 25
CALLS = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize", "CtxSynchronize", "Memcpy")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")
WAITS = {prefix + call for prefix in ("cuda", "cu") for call in CALLS}


@pytest.fixture(params=["O0", "O1", "O2", "O3", "O4", "O5"])
def precision(request):
    return request.param


@pytest.fixture(params=list(OPTIMIZERS))
def optimizer(request):
    return request.param


class Net(TrainingModule):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches():
    dataset = TensorDataset(torch.randn(32 * (WARM + STEPS), 1, 8, 8), torch.randint(0, 10, (32 * (WARM + STEPS),)))
    return DataLoader(dataset, batch_size=32, pin_memory=True)


def fit(precision, optimizer, *callbacks, logger=False):
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy="single",
        precision=precision,
        max_steps=WARM + STEPS,
        gradient_clip_val=1.0,
        log_every_n_steps=FLUSH,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=logger,
        callbacks=list(callbacks),
    )
    trainer.fit(Net(optimizer), batches())
    return trainer


class ErrorOnWait(Callback):
    """Makes torch raise an error at each of its synchronising calls."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == WARM:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == WARM + STEPS - 2:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, module, exception):
        torch.cuda.set_sync_debug_mode("default")


def test_silent_under_torchs_sync_debug_mode(precision, optimizer):
    assert fit(precision, optimizer, ErrorOnWait()).global_step == WARM + STEPS


@pytest.mark.parametrize(("precision", "optimizer"), [("O0", "torch"), ("O1", "torch"), ("O2", "fused")], indirect=True)
def test_averages_of_the_weights_are_silent_too(precision, optimizer):
    average = EMA(0.9)
    assert fit(precision, optimizer, average, ErrorOnWait()).global_step == WARM + STEPS
    assert 0 < averaged_steps(average) <= WARM + STEPS


@pytest.mark.parametrize(("precision", "optimizer"), [("O0", "torch"), ("O1", "torch"), ("O2", "fused")], indirect=True)
def test_norms_of_gradients_are_silent_too(precision, optimizer, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    callbacks = GradientMonitor(per_parameter=True), ErrorOnWait()
    assert fit(precision, optimizer, *callbacks, logger=logger).global_step == WARM + STEPS
    assert "grad_2.0_norm/net.0.weight" in (tmp_path / "run" / "metrics.csv").read_text()


class SleepFirst(Callback):
    """Queues two seconds of work, then checks that it still runs after the host has queued two steps."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == WARM:
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000_000)
            self.work = torch.cuda.current_stream().record_event()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == WARM + 1:
            self.ran_ahead = not self.work.query()
            torch.cuda.synchronize()


def test_two_steps_are_issued_behind_two_seconds_of_work(precision, optimizer):
    callback = SleepFirst()
    fit(precision, optimizer, callback)
    assert callback.ran_ahead


class Profiled(Callback):
    """Records a trace of the steps between two flushes."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2 * FLUSH + 3:
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            )
            self.profiler.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 3 * FLUSH - 3:
            # No wait here: the profiler's stop synchronises, after the last event of interest.
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))


def test_no_synchronising_call_between_two_flushes(precision, optimizer, tmp_path):
    path = tmp_path / "trace.json"
    fit(precision, optimizer, Profiled(path))
    events = json.loads(path.read_text())["traceEvents"]
    launches = [event for event in events if event.get("name", "").startswith(LAUNCHES)]
    assert len(launches) >= FLUSH - 5  # at least one launch in each step, of a kernel or of a graph
    end = max(event["ts"] for event in launches)
    waits = [event["name"] for event in events if event.get("name") in WAITS and event.get("ts", end) < end]
    # With dynamic scaling the host may wait for the step before the last one, and for nothing else.
    allowed = FLUSH if precision in {"O1", "O2"} else 0
    assert [name for name in waits if name != "cudaEventSynchronize"] == []
    assert len(waits) <= allowed
    # A copy from pageable memory waits too, whatever function makes it.
    assert [event["name"] for event in events if "Pageable" in event.get("name", "")] == []
