"""Known problems of CUDA graphs: earlier streams, other threads, changed accumulation, and errors that only a comparison finds."""

from __future__ import annotations

import gc
import threading
from typing import ClassVar

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from fabricamp import Callback, ConfigError, CudaGraph
from fabricamp.callbacks import GradientAccumulationScheduler
from fabricamp.engine.graph import graphs
from tests.gpu.test_cuda_graph import Net, captured, equal, fit, images, same
from tests.inside import captured_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("precision", "optimizer"), [("O0", "fused"), ("O0", "torch"), ("O2", "fused"), ("O5", "sgd")])
def test_windows_whose_length_changes_over_epochs(precision, optimizer):
    """A new number of micro-batches drops the old graphs; each epoch ends with a short accumulation step."""

    class Roles(Callback):
        found: ClassVar[list] = []

        def on_train_epoch_end(self, trainer, module):
            update = captured(trainer)
            if update is not None:
                self.found.append(
                    {(role.accumulate, step.replays > 3) for (_, role), step in captured_steps(update).items()}
                )

    schedule, options = {0: 2, 2: 1, 3: 4}, {"max_epochs": 5, "gradient_clip_val": 0.5}
    roles = Roles()
    runs = []
    for graph in (False, CudaGraph(warmup=4)):
        callbacks = [GradientAccumulationScheduler(schedule), roles]
        runs.append(fit(graph, precision, Net(optimizer), images(31), callbacks=callbacks, **options))
    assert runs[1][0].global_step == 16 + 16 + 31 + 8 + 8
    assert roles.found == [{(2, True)}] * 2 + [{(1, True)}] + [{(4, True)}] * 2
    same(*runs)


class Loop:
    """The graph of an earlier run in a reference cycle, which only the garbage collector frees."""

    def __init__(self):
        self.itself, self.graph = self, torch.cuda.CUDAGraph()
        values = torch.zeros(4, device="cuda")
        with torch.cuda.graph(self.graph):
            values += 1


def test_a_graph_of_an_earlier_run_is_not_let_go_within_a_capture():
    gc.collect()
    gc.freeze()  # so that these frequent collections do not scan the objects of other tests
    earlier = [Loop() for _ in range(8)]

    class Collected(Net):
        def training_step(self, batch, batch_idx):
            if torch.cuda.is_current_stream_capturing() and earlier:
                earlier.clear()
                assert len([[] for _ in range(5000)]) == 5000  # enough new objects to trigger a collection
            return super().training_step(batch, batch_idx)

    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(100, 1, 1)
    try:
        runs = [fit(graph, "O0", Collected()) for graph in (False, CudaGraph(warmup=4))]
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert not earlier
    assert gc.isenabled() == enabled
    same(*runs)


def test_runs_one_after_the_other_share_their_streams():
    """cuBLAS never frees its workspaces, up to 32 MiB for each stream and thread that used it."""
    reserved, streams = [], []
    for _ in range(4):
        fit(CudaGraph(warmup=4), "O0", Net(), max_epochs=3)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
        streams.append({one.cuda_stream for one in graphs._FREE[torch.device("cuda", 0)]})
    assert streams[1:] == streams[:1] * 3
    assert max(reserved[1:]) - reserved[0] < 2**21
    assert not streams[0] & {
        torch.cuda.Stream().cuda_stream for _ in range(64)
    }  # torch's pool does not give these streams to others


class Otherwise(Net):
    """Computes something else while it is captured."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1.5 if torch.cuda.is_current_stream_capturing() else loss


@pytest.mark.parametrize(("precision", "accumulate"), [("O0", 1), ("O1", 3), ("O2", 1), ("O2", 3)])
def test_a_first_replay_with_other_bits_leaves_the_run_as_it_was(precision, accumulate):
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulate}
    with pytest.raises(ConfigError, match="a replay differs bitwise from an eager step, first in"):
        fit(CudaGraph(warmup=4), precision, Otherwise(), **options)
    runs = [fit(graph, precision, Otherwise(), **options) for graph in (False, "auto")]
    assert "differs bitwise" in captured(runs[1][0]).why_eager
    same(*runs)


class Draws(Net):
    """Also draws from its own generator."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator("cuda").manual_seed(5)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.rand((), generator=self.own, device="cuda")

    def validation_step(self, batch, batch_idx):
        noise = torch.rand(batch[0].shape, generator=self.own, device="cuda")
        self.log("val_loss", F.cross_entropy(self.net(batch[0] + noise), batch[1]))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_generator_of_the_module_draws_what_it_draws_in_eager_steps(accumulate):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "val_check_interval": 10}
    runs = [
        fit(graph, "O1", Draws(), validation=images(12), **options)
        for graph in (False, CudaGraph(warmup=4), CudaGraph(warmup=4, check_every=3))
    ]
    for run in runs[1:]:
        same(runs[0], run)
        assert torch.equal(runs[0][1].own.get_state(), run[1].own.get_state())


class Writes(Net):
    """Writes in place: in training to a tensor in a plain attribute, in validation to a buffer too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.average = torch.zeros((), device="cuda")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.average.mul_(0.9).add_(loss.detach())
        return loss * (1 + 0.1 * self.average)

    def validation_step(self, batch, batch_idx):
        self.seen.add_(1)
        self.average.add_(0.01)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_comparison_puts_back_all_that_a_step_writes_to(accumulate):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "val_check_interval": 10}
    runs = [
        fit(graph, "O1", Writes(), validation=images(12), **options)
        for graph in (False, CudaGraph(warmup=4), CudaGraph(warmup=4, check_every=3))
    ]
    for run in runs[1:]:
        same(runs[0], run)
        assert equal(runs[0][1].average, run[1].average)


def test_a_later_check_finds_what_no_graph_sees():
    """A hook changes the content of a list that the step reads."""

    class Listed(Net):
        def __init__(self):
            super().__init__()
            self.factors = [1.0]

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.factors[0]

    class Rebinds(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.factors[0] = 1.0 if batch_idx < 20 else 2.0

    options = {"max_epochs": 1, "callbacks": [Rebinds()]}
    with pytest.raises(ConfigError, match="a replay differs bitwise from an eager step"):
        fit(CudaGraph(warmup=4, check_every=5), module=Listed(), **options)
    every = CudaGraph(warmup=4, check_every=1, required=False)
    same(*(fit(graph, "O1", Listed(), accumulate_grad_batches=2, **options) for graph in (False, every)))


def test_nodes_of_an_earlier_backward_hold_another_stream():
    """AccumulateGrad nodes keep the stream of their creation, and a program may hold nodes of a backward before the fit."""

    def run(graph):
        module = Net().cuda()
        held = [get_gradient_edge(one) for one in module.parameters()]
        module.net(torch.ones(2, 1, 8, 8, device="cuda")).sum().backward()
        module.zero_grad()
        found = fit(graph, module=module, max_epochs=1)
        assert len(held) == 6
        return found

    same(run(False), run("auto"))
    try:
        same(run(False), run(True))
    except ConfigError as error:
        assert "something that cannot be captured" in str(error)  # noqa: PT017 - either is right


def test_other_threads_pin_memory_and_ask_events_meanwhile():
    done = threading.Event()
    rounds = []

    def work():
        graphs = torch.cuda.Stream()
        while not done.is_set():
            with torch.cuda.stream(graphs):
                held = torch.ones(1000 + len(rounds)).pin_memory().to("cuda", non_blocking=True)
                event = torch.cuda.Event()
                event.record(graphs)
                while not event.query():
                    pass
            rounds.append(held.numel())

    eager = fit(False, max_epochs=2)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = fit(CudaGraph(warmup=4), max_epochs=2)
    finally:
        done.set()
        thread.join()
    same(eager, found)
    assert len(rounds) > 10
