"""A step of a Loop executes no more lines of fabricamp than one of the Trainer, eager and as the replay of a graph.

A replay also looks at what the step's function reads.  The Trainer calls one callback after each batch, with the loss: what
``Loop.step`` returns.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, CudaGraph, Loop
from fabricamp.optimizers import FusedAdam
from tests.cuda_on_cpu.fits import card
from tests.own_loop.same import Net, new_net
from tests.small import quiet_trainer

__all__ = ["card"]

FILE = Path(__file__).parents[2] / "docs" / "render_step.py"
BEGIN, END = 40, 48
STEPS = END - BEGIN
SMOOTHING = 0.1


@pytest.fixture(scope="module")
def page():
    specification = importlib.util.spec_from_file_location("render_step", FILE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Batches:
    """Sixty batches; the lines between two of them are traced."""

    def __init__(self, tracer):
        self.tracer = tracer

    def __len__(self):
        return 60

    def __iter__(self):
        for number in range(60):
            if number == BEGIN:
                self.tracer.start()
            elif number == END:
                self.tracer.stop()
            yield torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)


class Last(Callback):
    """Keeps the loss, as a loop of one's own does."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.loss = outputs["loss"]


def of_trainer(page, **options):
    tracer = page.Tracer()
    quiet_trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[Last()], **options).fit(
        Net("fused_adam", 0), Batches(tracer)
    )
    return tracer.lines


def of_loop(page, **options):
    tracer = page.Tracer()
    model = new_net(0)
    with Loop(accelerator="cpu", devices=1, **options) as run:
        run.prepare(model, FusedAdam(model.parameters(), lr=0.01), clip=1.0)
        for batch in run.prepare_data(Batches(tracer)):
            run.step(lambda b: F.cross_entropy(model(b[0]), b[1], label_smoothing=SMOOTHING), batch)
    return tracer.lines


def test_an_eager_step_executes_no_more_lines(page):
    assert len(of_loop(page)) <= len(of_trainer(page))


def test_a_replay_executes_no_more_lines_beside_the_look_at_the_function(page, card):
    trainer, loop = (way(page, cuda_graph=CudaGraph(warmup=4)) for way in (of_trainer, of_loop))
    assert card.replays > 2 * END
    looks = [line for line in loop if looks_at_the_function(line.code)]
    assert len(loop) - len(looks) <= len(trainer)
    assert len(looks) <= 14 * STEPS  # none more for a large module, a library, or a number


def looks_at_the_function(code):
    return code.co_filename.endswith("step_function.py") or code.co_qualname.startswith("Loop._captured")
