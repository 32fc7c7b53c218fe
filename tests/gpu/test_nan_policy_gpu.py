"""On a GPU: sticky skips without a wait, the ring in pinned memory, names, and a captured update of an accumulation step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fabricamp import Callback, CudaGraph, NonFiniteError, OptLevel, Trainer, ops
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Clip, precision_from
from fabricamp.precision.loss_scaler import LAG
from fabricamp.state import NON_FINITE
from fabricamp.strategies.base import Strategy
from tests.inside import captured_groups, graph_update
from tests.small import Classifier, loader
from tests.windows import end_step, make_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01, eps=1e-4),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)).cuda()


class Run:
    def __init__(self, level, policy, make, **options):
        self.module = net()
        dynamic = level in ("O1", "O2")
        self.precision = precision_from(OptLevel(level, max_loss_scale=256.0, **options) if dynamic else level, policy)
        self.precision.convert_module(self.module)
        self.optimizer = make(self.module.parameters())
        self.precision.setup_optimizers(self.module, [self.optimizer], Strategy())
        self.x = torch.randn(32, 300, generator=torch.Generator().manual_seed(1)).cuda()
        self.told = []

    def backward(self):
        self.optimizer.zero_grad()
        loss = self.precision.forward(lambda: F.mse_loss(self.module(self.x).float(), self.x))
        self.precision.backward(loss)
        return loss

    def window(self, bad=None):
        loss = self.backward()
        if bad is not None:
            dict(self.module.named_parameters())[bad].grad.view(-1)[-1].fill_(float("inf"))
        make_step(self.precision, self.optimizer, clip=Clip(1.0), loss=loss)
        self.told.append(end_step(self.precision))

    def state(self):
        updated = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = [v for p in updated for v in self.optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        return [one.detach().clone() for one in [*self.module.parameters(), *updated, *state]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_sticky_and_named(level, optimizer):
    run = Run(level, "raise", OPTIMIZERS[optimizer])
    for _ in range(3):
        run.window()
    before = run.state()
    run.window("2.weight")
    for _ in range(3):
        run.window()
    assert all(map(torch.equal, before, run.state()))
    told = [*run.told[LAG:], *run.precision.verdicts.drain()]
    assert [verdict.ends_run for verdict in told] == [False] * 3 + [True] * 4
    assert [verdict.applied_steps for verdict in told] == [1, 2, 3, 3, 3, 3, 3]
    assert "of 2.weight were not finite at step 3 (loss " in run.precision.verdicts.explain(7)


@pytest.mark.parametrize("optimizer", ["adamw_fused", "FusedAdam"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_waits_for_nothing(level, optimizer):
    if (level, optimizer) == ("O3", "adamw_fused"):
        pytest.skip("torch keeps Adam's state in half there")
    run = Run(level, "stop", OPTIMIZERS[optimizer])
    for _ in range(6):
        run.window()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            run.window()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e9))  # about two seconds
    busy = torch.cuda.current_stream().record_event()
    for _ in range(2):
        run.window()
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_copy_goes_to_the_host(level):
    run = Run(level, None, OPTIMIZERS["FusedAdam"])
    for _ in range(6):
        run.window()
    loss = run.backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        make_step(run.precision, run.optimizer, clip=Clip(1.0), loss=loss)
        verdict = end_step(run.precision)
        torch.cuda.synchronize()
    names = [event.key for event in profiler.key_averages()]
    assert not [name for name in names if "DtoH" in name]
    assert verdict.applied
    assert run.precision.verdicts.drain()[-1].applied_steps == 7


def test_ring_and_mirror_hold_the_same_rows():
    run = Run("O2", None, OPTIMIZERS["FusedAdam"], scale_window=3)
    for index in range(9):
        run.window("4.bias" if index in (2, 3) else None)
    torch.cuda.synchronize()
    scaler = run.precision.verdicts.scaler
    assert scaler._host.is_pinned()
    assert torch.equal(scaler._ring.cpu(), scaler._host)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_captured_update_replays_with_another_lr(level):
    """Precision.step of one accumulation step: clip, multiplier, scale, ring and lr are read from device memory."""
    runs = [Run(level, None, OPTIMIZERS["FusedAdam"], scale_window=4) for _ in range(2)]
    captured, eager = runs
    for run in runs:
        for _ in range(3):
            run.window()
        run.loss = run.backward().detach().clone()
        holders = run.precision.gradients(run.optimizer).parameters
        run.gradients = [holder.grad.clone() for holder in holders]
        run.holders = holders

    def give(run):
        for holder, gradient in zip(run.holders, run.gradients, strict=True):
            holder.grad = gradient

    def update(run):
        give(run)
        make_step(run.precision, run.optimizer, clip=Clip(0.5), loss=run.loss)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update(captured)
        end_step(captured.precision)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            update(captured)
    torch.cuda.synchronize()
    update(eager)
    end_step(eager.precision)
    for step, lr in enumerate((0.01, 0.002, 0.03, 0.01, 0.005)):
        for run in runs:
            run.optimizer.param_groups[0]["lr"] = lr
            run.loss.fill_(float(step))
            for gradient in run.gradients:
                gradient.mul_(0.5)
                if step == 2:
                    gradient.view(-1)[0] = float("inf")
                elif step == 3:
                    gradient.copy_(torch.full_like(gradient, 0.01))
        give(captured)
        captured.optimizer.gather(
            captured.gradients, captured.precision._shared.params_of[captured.optimizer].copies
        )  # uploads the lr
        graph.replay()
        update(eager)
        end_step(eager.precision)
    torch.cuda.synchronize()
    for run in runs:
        run.optimizer.zero_grad()
    assert all(map(torch.equal, captured.state(), eager.state()))
    ours, theirs = captured.precision.verdicts.scaler, eager.precision.verdicts.scaler
    assert torch.equal(ours.state.words, theirs.state.words)
    assert torch.equal(ours._host, theirs._host)


def test_clip_alone_equals_torchs():
    own, twin = net(), net()
    for one, other in zip(own.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    torch.testing.assert_close(
        ops.clip_grad_norm_(own.parameters(), 0.5), nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    )
    for one, other in zip(own.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Spoils(Callback):
    def on_after_backward(self, trainer, module):
        if trainer.global_step == 4:
            module.net[2].weight.grad[0].fill_(float("nan"))


class Task(Classifier):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_through_the_trainer(level, optimizer, policy):
    module = Task(optimizer)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision=OptLevel(level, max_loss_scale=256.0) if level in ("O1", "O2") else level,
        nan_policy=policy,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[Spoils()],
    )
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="of net.2.weight were not finite at step 4"):
            trainer.fit(module, loader(64))
    else:
        trainer.fit(module, loader(64))
        assert (trainer.global_step, trainer.state.stop_reason) == (7, NON_FINITE)
        assert trainer.checkpoint_callback.last_model_path
    assert all(torch.isfinite(p).all() for p in module.parameters())


class Launches(Callback):
    """Records whether steps are replayed, and the number of launches of several steps."""

    replays, launches = False, 0

    def holds_at(self, global_step):
        return math.inf

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.replays = trainer.state.runs_as == "graph"
        groups = captured_groups(graph_update(trainer))
        self.launches = max(self.launches, sum(one.replays for one in groups.values()))


BAD = 25
"""The batch, of 40, with a NaN in its first sample; steps are replayed from the eleventh on."""


def stopped(graph, level, folder):
    """Runs a fit that ``nan_policy="stop"`` ends, and a fit that resumes from its checkpoint."""
    keeper, launches, batches = ModelCheckpoint(dirpath=folder), Launches(), loader(160)
    batches.dataset.tensors[0][4 * BAD] = float("nan")

    def fit(module, path=None):
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            precision=OptLevel(level, max_loss_scale=256.0) if level in ("O1", "O2") else level,
            nan_policy="stop",
            max_epochs=1,
            cuda_graph=graph,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            callbacks=[keeper, launches],
        )
        trainer.fit(module, batches, ckpt_path=path)
        return trainer, [one.detach().clone() for one in module.parameters()]

    trainer, weights = fit(Task("FusedAdam"))
    file = keeper.last_model_path
    saved = torch.load(file, weights_only=True, map_location="cuda")
    assert trainer.state.stop_reason == NON_FINITE
    assert (launches.replays, launches.launches > 0) == (bool(graph), isinstance(graph, CudaGraph))
    step, words = trainer.global_step, trainer.state.stop_explanation
    assert saved["global_step"] == step
    again, later = fit(Task("FusedAdam"), file)
    assert (again.global_step, again.state.stop_reason) == (40, "")
    return step, words, weights, saved["state_dict"], later


@pytest.mark.parametrize("level", LEVELS)
def test_a_stop_under_cuda_graphs_is_that_of_eager_steps(level, tmp_path):
    """A launch of several steps finishes first; all steps after the bad step are skipped, as in eager runs."""
    steps, words, weights, files, later = zip(
        *[
            stopped(graph, level, tmp_path / str(number))
            for number, graph in enumerate((False, True, CudaGraph(steps=4)))
        ],
        strict=True,
    )
    # The host learns of the bad step, the 26th, two steps later; launches of four end with the 27th and the 31st.
    assert steps == (BAD + 1 + LAG, BAD + 1 + LAG, 31)
    assert words[0] == words[1] == words[2]
    assert "net." in words[0]
    for found in (*weights, *files):
        values = [*found.values()] if isinstance(found, dict) else found
        assert all(torch.isfinite(one).all() for one in values)
    for other in (1, 2):
        assert all(map(torch.equal, weights[0], weights[other]))
        assert all(torch.equal(one, files[other][name]) for name, one in files[0].items())
    assert all(map(torch.equal, later[0], later[1]))
    assert not any(map(torch.equal, later[0], weights[0]))
