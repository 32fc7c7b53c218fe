"""A precision of one's own: which of its methods a fit calls, in which order and with what, and that its step is the one made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fabricamp import OptLevel
from fabricamp.checkpoint import read_checkpoint
from fabricamp.optimizers import FusedAdam
from fabricamp.precision import Clip, Conversion, OptimizerStep, Precision, StepStatus
from tests.own_parts import BATCHES, Saves, WithOptimizer, assert_same_weights, fit, moved, only
from tests.small import Classifier

CLIP = Clip(0.5, "norm")


class StaticScale(Precision):
    """Multiplies losses by a constant, which the update divides by; passes every call on, and notes it."""

    name = "static-scale"

    def __init__(self, scale=1024.0):
        self.scale = scale
        self.steps = 0
        self.calls = []

    def convert_module(self, module):
        self.calls.append(("convert_module", type(module).__name__))
        module.converted = True
        return Conversion(undo=lambda: self._undo(module), full_state=self._full_state)

    def _undo(self, module):
        self.calls.append(("undo",))
        del module.converted

    def _full_state(self, state):
        self.calls.append(("full_state",))
        return state

    def convert_input(self, batch):
        self.calls.append(("convert_input",))
        return super().convert_input(batch)

    def setup_optimizers(self, module, optimizers, strategy, *, accumulates=False):
        self.calls.append(("setup_optimizers", len(optimizers), accumulates))
        super().setup_optimizers(module, optimizers, strategy, accumulates=accumulates)

    def gradients(self, optimizer):
        self.calls.append(("gradients",))
        return super().gradients(optimizer)

    def forward(self, step, *args):
        self.calls.append(("forward", len(args)))
        return super().forward(step, *args)

    def backward(self, loss, loss_id=0, run=Tensor.backward, **options):
        self.calls.append(("backward", loss_id, sorted(options)))
        super().backward(loss * self.scale, loss_id, run, **options)

    def step_of(self, optimizer, strategy, clip):
        self.calls.append(("step_of", type(optimizer).__name__, clip))
        return UnscaledStep(self, optimizer, strategy, clip)

    def refresh_masters(self):
        self.calls.append(("refresh_masters",))
        super().refresh_masters()

    def state_dict(self):
        self.calls.append(("state_dict",))
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        self.calls.append(("load_state_dict", state["steps"]))
        super().load_state_dict(state)
        self.steps = state["steps"]


class UnscaledStep(OptimizerStep):
    """Divides the gradients by the scale of a :class:`StaticScale`, and notes each step."""

    def __init__(self, precision, optimizer, strategy, clip):
        super().__init__(precision, optimizer, strategy, clip)
        self.precision = precision

    def exchange(self):
        self.precision.steps += 1
        gradients = super().exchange()
        return gradients._replace(divisor=gradients.divisor * self.precision.scale)

    def run(self, loss):
        self.precision.calls.append(("run", self.clip, loss is not None))
        super().run(loss)

    def run_shown(self, loss, look, run=None):
        self.precision.calls.append(("run_shown", loss is not None, run is not None))
        super().run_shown(loss, look, run)

    def after(self):
        self.precision.calls.append(("after",))
        super().after()


class HostVerdicts:
    """What became of the steps of :class:`HostPrecision`, which knows it at once."""

    policy = None
    dynamic = False
    schedules_follow = True
    window_tensors = ()

    def __init__(self):
        self.scale = 1.0
        self.applied_steps = 0
        self.skipped_steps = 0
        self.applied = True
        self.calls = []

    def launch_end(self, loss):
        self.calls.append(("launch_end", loss is not None))
        self.loss = float("nan") if loss is None else float(loss.detach())

    def note_end(self):
        self.applied_steps += self.applied
        self.skipped_steps += not self.applied
        verdict = StepStatus(
            applied=self.applied,
            scale=self.scale,
            loss=self.loss,
            applied_steps=self.applied_steps,
            skipped_steps=self.skipped_steps,
        )
        self.calls.append(("note_end", verdict.applied, verdict.ends_run))
        self.applied = True
        return verdict

    def drain(self):
        self.calls.append(("drain",))
        return []

    def explain(self, global_step):
        return f"step {global_step}"


class HostStep(OptimizerStep):
    """Makes the whole step itself, on the host: looks, clips, updates, or skips."""

    def __init__(self, precision, optimizer, strategy, clip):
        super().__init__(precision, optimizer, strategy, clip)
        self.precision = precision

    def run(self, loss):
        self.run_shown(loss, lambda: self.clip)

    def run_shown(self, loss, look, run=None):
        self.precision.calls.append(("step", run is not None))
        gradients = self.exchange()
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        if gradients.tensors is not None:
            for parameter, value in zip(parameters, gradients.values(), strict=True):
                parameter.grad = value
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(gradients.divisor)
        clip = look()
        found = [one.grad for one in parameters if one.grad is not None]
        self.precision.verdicts.applied = all(bool(one.isfinite().all()) for one in found)
        if self.precision.verdicts.applied:
            if clip is not None and clip.algorithm == "norm":
                torch.nn.utils.clip_grad_norm_(parameters, clip.value)
            elif clip is not None:
                torch.nn.utils.clip_grad_value_(parameters, clip.value)
            (run or self.call or self.optimizer.step)()
        if loss is not None:
            self.precision.verdicts.launch_end(loss)


class HostPrecision(Precision):
    """Makes its steps on the host, where an overflow is known at once."""

    name = "host"

    def __init__(self):
        self.verdicts = HostVerdicts()
        self.calls = []

    def step_of(self, optimizer, strategy, clip):
        return HostStep(self, optimizer, strategy, clip)

    def state_dict(self):
        return {"applied": self.verdicts.applied_steps, "skipped": self.verdicts.skipped_steps}

    def load_state_dict(self, state):
        self.verdicts.applied_steps, self.verdicts.skipped_steps = state["applied"], state["skipped"]


class LoggedLevel(OptLevel):
    """An opt level with its calls noted."""

    def __init__(self, level="O2", **options):
        super().__init__(level, **options)
        self.calls = []

    def convert_module(self, module):
        self.calls.append(("convert_module",))
        return super().convert_module(module)

    def convert_input(self, batch):
        self.calls.append(("convert_input",))
        return super().convert_input(batch)

    def setup_optimizers(self, module, optimizers, strategy, *, accumulates=False):
        self.calls.append(("setup_optimizers", len(optimizers), accumulates))
        super().setup_optimizers(module, optimizers, strategy, accumulates=accumulates)

    def forward(self, step, *args):
        self.calls.append(("forward", len(args)))
        return super().forward(step, *args)

    def backward(self, loss, loss_id=0, run=Tensor.backward, **options):
        self.calls.append(("backward", loss_id))
        super().backward(loss, loss_id, run, **options)

    def step_of(self, optimizer, strategy, clip):
        self.calls.append(("step_of", clip))
        return super().step_of(optimizer, strategy, clip)

    def state_dict(self):
        self.calls.append(("state_dict",))
        verdicts = self.verdicts
        told = {} if verdicts is None else {"told": [verdicts.applied_steps, verdicts.skipped_steps, verdicts.scale]}
        return {**super().state_dict(), **told}

    def load_state_dict(self, state):
        self.calls.append(("load_state_dict", state.get("told")))
        super().load_state_dict(state)


PRECISION = ("forward", "backward", "run", "run_shown", "after")
MICRO_BATCH = [("forward", 2), ("backward", 0, [])]
STEP = [*MICRO_BATCH, *MICRO_BATCH, ("run", CLIP, True), ("after",)]
DROPPED = [("forward", 2), ("backward", 0, [])]
VALIDATION = [("forward", 2)] * 2


@pytest.mark.parametrize("make", [None, FusedAdam], ids=["torch", "fused"])
def test_a_precision_sees_every_call_of_a_fit(make, tmp_path):
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    precision, saves = StaticScale(), Saves(tmp_path / "mid.ckpt", 7)
    _, module = fit(WithOptimizer(make), saves, precision=precision)
    epoch = [*STEP * 2, *DROPPED, *VALIDATION]
    assert only(precision.calls, *PRECISION) == [
        ("forward", 0),
        *epoch * 2,
    ]  # configure_model comes through forward too
    assert only(
        precision.calls, "convert_module", "setup_optimizers", "step_of", "state_dict", "full_state", "undo"
    ) == [
        ("convert_module", "WithOptimizer"),
        ("setup_optimizers", 1, True),
        ("step_of", "FusedAdam" if make is FusedAdam else "SGD", CLIP),
        ("full_state",),
        ("state_dict",),
        ("undo",),
    ]
    assert only(precision.calls, "convert_input") == [("convert_input",)] * (2 * BATCHES + 4)
    assert ("gradients",) in precision.calls
    assert not hasattr(module, "converted")
    _, plain = fit(WithOptimizer(make))
    assert_same_weights(module, plain)  # a power of two
    assert moved(module)

    resumed = StaticScale()
    _, again = fit(WithOptimizer(make), precision=resumed, ckpt_path=tmp_path / "mid.ckpt")
    assert only(resumed.calls, "load_state_dict") == [("load_state_dict", 3)]
    assert resumed.steps == 4
    assert_same_weights(again, plain)


def test_a_precision_shows_gradients_to_hooks():
    class Shown(Classifier):
        def on_before_optimizer_step(self, optimizer):
            self.shown = [one.grad.clone() for one in self.parameters()]

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def backward(self, loss, *args, **kwargs):
            loss.backward(*args, **kwargs)

    precision = StaticScale()
    _, module = fit(Shown(), precision=precision, max_epochs=1, validates=False)
    _, plain = fit(Shown(), max_epochs=1, validates=False)
    assert only(precision.calls, "run", "run_shown", "after") == [("run_shown", True, True), ("after",)] * 2
    assert all(map(torch.equal, module.shown, plain.shown))
    assert_same_weights(module, plain)


def test_a_precision_takes_options_of_backward():
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    precision = StaticScale()
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": 1, "validates": False}
    _, module = fit(Manual(), precision=precision, partial_window="step", **options)
    _, plain = fit(Manual(), partial_window="step", **options)
    assert only(precision.calls, "backward") == [("backward", 0, ["retain_graph"])] * BATCHES
    assert only(precision.calls, "run", "after") == [("run", None, False), ("after",)] * BATCHES
    assert_same_weights(module, plain)


def test_a_precision_with_verdicts_of_its_own(caplog):
    class Overflows(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if self.global_step == 1 else loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    precision = HostPrecision()
    trainer, module = fit(Overflows(), precision=precision)
    assert [call[1:] for call in precision.verdicts.calls if call[0] == "note_end"] == [
        (True, False),
        (False, False),
        (True, False),
        (True, False),
    ]
    assert [call for call in precision.verdicts.calls if call[0] == "launch_end"] == [("launch_end", True)] * 4
    assert ("drain",) in precision.verdicts.calls
    assert (trainer.skipped_steps, trainer.global_step) == (1, 4)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 2**3)  # schedules follow what was applied
    assert (precision.verdicts.applied_steps, precision.verdicts.skipped_steps) == (3, 1)
    assert "1 step was skipped" in caplog.text
    assert precision.calls == [("step", False)] * 4

    _, module = fit(precision=HostPrecision())
    assert_same_weights(module, fit()[1])


def test_a_subclass_of_an_opt_level(tmp_path):
    precision, saves = LoggedLevel("O2", loss_scale="dynamic"), Saves(tmp_path / "mid.ckpt", 7)
    trainer, module = fit(WithOptimizer(FusedAdam), saves, precision=precision)
    micro_batch = [("forward", 2), ("backward", 0)]
    epoch = [*micro_batch * BATCHES, *VALIDATION]
    assert only(precision.calls, *PRECISION) == [("forward", 0), *epoch * 2]
    assert only(precision.calls, "convert_module", "setup_optimizers", "step_of", "state_dict") == [
        ("convert_module",),
        ("setup_optimizers", 1, True),
        ("step_of", CLIP),
        ("state_dict",),
    ]
    # The host reads what became of a step two steps later.
    assert read_checkpoint(tmp_path / "mid.ckpt")["amp"]["told"] == [1, 0, 65536.0]
    assert_same_weights(module, fit(WithOptimizer(FusedAdam), precision="O2")[1])
    verdicts = trainer.precision_plugin.verdicts
    assert (verdicts.policy, verdicts.dynamic, verdicts.scale) == (None, True, 65536.0)
    assert trainer.skipped_steps == 0

    resumed = LoggedLevel("O2", loss_scale="dynamic")
    _, again = fit(WithOptimizer(FusedAdam), precision=resumed, ckpt_path=tmp_path / "mid.ckpt")
    assert only(resumed.calls, "load_state_dict") == [("load_state_dict", [1, 0, 65536.0])]
    assert_same_weights(again, module)
