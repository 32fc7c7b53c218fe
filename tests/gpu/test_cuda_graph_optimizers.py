"""torch's optimizers as users write them, with ``cuda_graph=True``: the bits of eager steps, and nothing of theirs is rewritten."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, ConfigError, CudaGraph, OptLevel, TrainingModule
from fabricamp.precision import OptimizerStep
from tests.inside import captured_steps, graph_update
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
STEPS = 40
EPS = {"eps": 1e-4}  # the default is 0 in fp16, which the weights of O3 are
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, EPS),
    "AdamW fused": (torch.optim.AdamW, {"fused": True, **EPS}),
    "AdamW capturable": (torch.optim.AdamW, {"capturable": True, **EPS}),
    "AdamW tensor": (torch.optim.AdamW, {"capturable": True, "fused": True, "lr": "tensor", **EPS}),
    "Adam": (torch.optim.Adam, EPS),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "fused": True}),
    "SGD tensor": (torch.optim.SGD, {"momentum": 0.9, "lr": "tensor"}),
    "SGD fused tensor": (torch.optim.SGD, {"momentum": 0.9, "fused": True, "lr": "tensor"}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, **EPS}),
    "NAdam": (torch.optim.NAdam, EPS),
    "Adagrad": (torch.optim.Adagrad, EPS),
}


class Net(TrainingModule):
    """BatchNorm, dropout and OneCycleLR, which rewrites lr and betas or momentum in each step."""

    def __init__(self, optimizer, *, schedule=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 4),
        )
        self.make = optimizer
        self.schedule = schedule

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if not self.schedule:
            return optimizer
        cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=STEPS + 1, cycle_momentum=cycles and "alpha" not in optimizer.defaults
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def maker(name):
    cls, options = OPTIMIZERS[name]

    def make(parameters):
        given = {"lr": 0.01, **options}
        if given["lr"] == "tensor":
            given["lr"] = torch.tensor(0.01, device="cuda")
        return cls(parameters, **given)

    return make


class Watch(Callback):
    """Records gradients and losses as hooks see them, the numbers of replays, and what is in the groups beside the numbers."""

    def __init__(self):
        self.gradients, self.losses, self.options = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"])
        gradient = next(module.parameters()).grad
        self.gradients.append(None if gradient is None else gradient.clone())
        groups = trainer.optimizers[0].param_groups
        self.options.append([{key: type(value).__name__ for key, value in group.items()} for group in groups])

    def on_train_end(self, trainer, module):
        update = graph_update(trainer)
        self.update = update
        self.replays = 0 if update is None else sum(step.replays for step in captured_steps(update).values())


def batches(*, spikes=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * 8, 8, generator=generator)
    if spikes:
        x[8 * 3] = x[8 * 25] = float("inf")
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (STEPS * 8,), generator=generator)), batch_size=8)


def trained(make, graph, level="O0", *, schedule=True, spikes=False, module=None, callbacks=(), **options):
    watch = Watch()
    trainer = quiet_trainer(
        accelerator="gpu",
        devices=1,
        precision=level,
        max_epochs=1,
        cuda_graph=graph,
        callbacks=[watch, *callbacks],
        **options,
    )
    module = module or Net(make, schedule=schedule)
    torch.manual_seed(3)
    trainer.fit(module, batches(spikes=spikes))
    return trainer, module, watch


def equal(one, other):
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def same(one, other):
    (first, own, seen), (second, others, watched) = one, other
    for (name, left), right in zip(own.state_dict().items(), others.state_dict().values(), strict=True):
        assert equal(left, right), name
    for number, (left, right) in enumerate(zip(seen.losses, watched.losses, strict=True)):
        assert equal(left, right), number
    for left, right in zip(seen.gradients, watched.gradients, strict=True):
        assert (left is None) == (right is None)
        assert left is None or equal(left, right)
    states = [list(one.optimizers[0].state.values()) for one in (first, second)]
    for left, right in zip(*states, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert not isinstance(value, torch.Tensor) or equal(value, right[key]), key
    assert seen.options == watched.options
    assert first.skipped_steps == second.skipped_steps
    assert first.global_step == second.global_step == STEPS


GRAPH = CudaGraph(warmup=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_steps_with_onecycle_have_the_bits_of_eager_ones(level, name):
    make = maker(name)
    precision = OptLevel(level, scale_window=10) if level in ("O1", "O2") else level
    spikes = level in ("O1", "O2")  # steps that are skipped
    options = {"gradient_clip_val": 0.5, "spikes": spikes}
    eager = trained(make, False, precision, **options)
    graph = trained(make, GRAPH, precision, **options)
    same(eager, graph)
    assert graph[2].update.place.outside
    # A capturable optimizer is captured four times first, until it is known that betas change in each step.
    assert graph[2].replays >= STEPS - 20
    assert (eager[0].skipped_steps > 0) == spikes


class OwnStep(OptimizerStep):
    def run(self, loss):
        super().run(loss)


class OfOwnSteps(OptLevel):
    def step_of(self, optimizer, strategy, clip):
        return OwnStep(self, optimizer, strategy, clip)


def test_betas_that_change_in_each_step_are_refused_under_a_precision_with_a_step_of_its_own():
    with pytest.raises(ConfigError, match="changes in each step, and OfOwnSteps has a step of its own"):
        trained(maker("AdamW tensor"), CudaGraph(), OfOwnSteps("O0"))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_schedule_and_with_accumulation(accumulate, level, name):
    make = maker(name)
    options = {
        "schedule": False,
        "accumulate_grad_batches": accumulate,
        "nan_policy": "skip" if level == "O0" else None,
    }
    runs = [trained(make, graph, level, **options) for graph in (False, CudaGraph(warmup=4, check_every=5))]
    for _, _, watch in runs:
        assert len(watch.losses) == STEPS
    for (key, left), right in zip(runs[0][1].state_dict().items(), runs[1][1].state_dict().values(), strict=True):
        assert equal(left, right), key
    assert runs[1][2].replays > 10


class ForeignSGD(torch.optim.Optimizer):
    """An optimizer of another package: it keeps the last gradient, copied or not."""

    def __init__(self, parameters, *, copies):
        super().__init__(parameters, {"lr": 0.01})
        self.copies = copies

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                last = self.state[parameter].get("last")
                parameter.sub_(parameter.grad if last is None else parameter.grad + 0.5 * last, alpha=group["lr"])
                self.state[parameter]["last"] = parameter.grad.clone() if self.copies else parameter.grad


def test_an_optimizer_of_another_package():
    def copying(parameters):
        return ForeignSGD(parameters, copies=True)

    runs = [trained(copying, graph, "O5", schedule=False, gradient_clip_val=0.5) for graph in (False, GRAPH)]
    same(*runs)
    assert runs[1][2].replays > 30


def test_an_optimizer_that_keeps_gradients_is_refused():
    def keeping(parameters):
        return ForeignSGD(parameters, copies=False)

    with pytest.raises(ConfigError, match="ForeignSGD keeps a gradient in its state"):
        trained(keeping, GRAPH, schedule=False)
    runs = [trained(keeping, graph, schedule=False) for graph in (False, "auto")]
    same(*runs)
    assert "keeps a gradient" in runs[1][2].update.why_eager


class Sparse(Net):
    def __init__(self, make):
        super().__init__(make, schedule=False)
        self.table = nn.Embedding(4, 8, sparse=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + self.table(y), y), batch_idx)


def test_sparse_gradients_after_a_replay_are_refused():
    with pytest.raises(ConfigError, match="Adagrad steps after each replay, and a replay hands it no sparse gradients"):
        trained(None, GRAPH, module=Sparse(maker("Adagrad")))
    runs = [trained(None, graph, module=Sparse(maker("Adagrad"))) for graph in (False, "auto")]
    for left, right in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(left, right)


class Adds(Callback):
    """Unfreezes the head and gives it to the optimizer in the middle of the run, and changes numbers."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 15:
            module.head.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.head.parameters()), "lr": 0.02})
        if batch_idx == 28:
            trainer.optimizers[0].param_groups[0].update(lr=0.05, weight_decay=0.3)


class WithHead(Net):
    def __init__(self, make):
        super().__init__(make, schedule=False)
        self.head = nn.Linear(4, 4)
        self.head.requires_grad_(False)
        self.net.append(self.head)

    def configure_optimizers(self):
        return self.make([one for one in self.net.parameters() if one.requires_grad])


@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW fused"])
@pytest.mark.parametrize("level", LEVELS)
def test_parameters_and_numbers_that_change_in_a_run(level, name):
    make = maker(name)
    runs = [
        trained(make, graph, level, module=WithHead(make), callbacks=[Adds()], gradient_clip_val=0.5)
        for graph in (False, GRAPH)
    ]
    same(*runs)
    assert runs[1][2].replays > 5


class Losses(Callback):
    """Holds no step back, so steps may be launched together."""

    def holds_at(self, global_step):
        return math.inf

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Looks at nothing."""


def test_several_steps_a_launch_where_betas_change_in_each_step():
    """It is known only after a few captures, as the lr is a tensor."""

    def weights(graph):
        module = Net(maker("AdamW tensor"))
        options = {"accelerator": "gpu", "devices": 1, "max_epochs": 1, "cuda_graph": graph, "callbacks": [Losses()]}
        torch.manual_seed(3)
        quiet_trainer(log_every_n_steps=STEPS, **options).fit(module, batches())
        return list(module.parameters())

    with pytest.raises(
        ConfigError, match=r"CudaGraph\(steps=4\): AdamW has to step after each replay: a schedule or hook"
    ):
        weights(CudaGraph(warmup=4, steps=4))
    eager = weights(False)
    assert all(map(torch.equal, eager, weights(CudaGraph(warmup=4, steps=4, required=False))))


def test_auto_trains_with_a_plain_optimizer_and_says_how(caplog):
    caplog.set_level("INFO")
    _, _, watch = trained(maker("AdamW"), "auto")
    assert watch.replays > 20
    (line,) = [line for line in caplog.messages if "AdamW.step runs after each replay" in line]
    assert "The host launches the update in every step" in line


class Closing(torch.optim.SGD):
    """A user's class that calls its closure ``calls`` times, the first time at its beginning."""

    calls = 1

    def step(self, closure=None):
        self.seen = [*getattr(self, "seen", ()), closure().detach().clone()]
        for _ in range(1, self.calls):
            closure()
        return super().step()


def test_a_closure_returns_the_loss_of_the_replay():
    def make(parameters):
        return Closing(parameters, lr=0.01, momentum=0.9)

    runs = [trained(make, graph, schedule=False) for graph in (False, GRAPH)]
    same(*runs)
    (eager, *_), (replayed, *_) = runs
    losses = [torch.stack(trainer.optimizers[0].seen) for trainer in (eager, replayed)]
    assert len(losses[0]) == STEPS
    assert torch.equal(*losses)


def test_a_second_call_of_a_closure_is_refused():
    class Again(Closing):
        calls = 2

    def make(parameters):
        return Again(parameters, lr=0.01)

    for graph in (GRAPH, "auto"):
        with pytest.raises(
            ConfigError, match=r"Again\.step calls its closure a second time.*cuda_graph does not offer"
        ):
            trained(make, graph, schedule=False)
