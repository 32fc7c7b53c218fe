"""Plug-ins as third parties wrote them against fabricamp 0.1.0 (commit 92a6732), from its pages and the faces of its base classes.

This file is never edited: it stays as it was written against that commit, whatever is renamed or moved since.  What it imports,
overrides, calls and reads has to work in every later version; ``test_plugins.py`` says what each plug-in has to see.

Each plug-in notes its calls in ``calls``: tuples of the method's name and what it was given.
"""

import contextlib
import itertools
import json
import math
import os
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from fabricamp import Callback, DataModule, DelayedDDP, OptLevel
from fabricamp.callbacks import EMA, BaseFinetuning, BasePredictionWriter, ModelCheckpoint, ProgressBar
from fabricamp.checkpoint.record import Part, Section
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.loggers import CSVLogger, Logger
from fabricamp.loggers.row_file import RowFileLogger
from fabricamp.loggers.run_folder import RunFolderLogger
from fabricamp.ops import Rule, Steering
from fabricamp.ops.rules import function_of
from fabricamp.optimizers import FusedAdam, FusedOptimizer
from fabricamp.precision import Clip, Conversion, Precision, Verdict
from fabricamp.precision.casting import cast_floating
from fabricamp.profilers import Profiler
from fabricamp.strategies import DDP, Strategy
from fabricamp.strategies.base import ShardPlan
from fabricamp.strategies.process_group import ProcessGroupStrategy

# -- strategies -----------------------------------------------------------------------------------------------------------------


class LocalSGD(ProcessGroupStrategy):
    """The recipe of docs/architecture.md: ranks train by themselves and average their parameters every few micro-batches."""

    name = "local_sgd"

    def __init__(self, every=8):
        super().__init__()
        self.every = every
        self.calls = []

    def wrap_module(self, module, step, *, automatic, accumulates=False):
        count = itertools.count(1)

        def averaging(*batch):
            if next(count) % self.every == 0:
                self.calls.append(("averages",))
                with torch.no_grad():  # through .data the masters of O2 would not see it
                    for parameter in module.parameters():
                        parameter.copy_(self.reduce(parameter.detach()))
            return step(*batch)

        return averaging


class LoggedStrategy(Strategy):
    """One process; passes every call on, and notes it."""

    name = "logged"

    def __init__(self):
        super().__init__()
        self.calls = []

    def setup_environment(self, environment, device):
        self.calls.append(("setup_environment", environment.rank, environment.world_size, device.type))
        super().setup_environment(environment, device)

    def attach(self, session):
        self.calls.append(("attach",))
        super().attach(session)

    def shard_module(self, module, plan):
        assert isinstance(plan, ShardPlan)
        self.calls.append(("shard_module", plan.accumulates, plan.filled_later))
        return super().shard_module(module, plan)

    def unshard_module(self, module, *, whole=True):
        self.calls.append(("unshard_module", whole))
        super().unshard_module(module, whole=whole)

    def place_module(self, module):
        self.calls.append(("place_module", type(module).__name__))
        super().place_module(module)

    def share_module(self, module):
        self.calls.append(("share_module", type(module).__name__))
        super().share_module(module)

    def share_buffers(self, module):
        self.calls.append(("share_buffers", type(module).__name__))
        super().share_buffers(module)

    def settle_module(self, module):
        self.calls.append(("settle_module", type(module).__name__))
        super().settle_module(module)

    def wrap_module(self, module, step, *, automatic, accumulates=False):
        self.calls.append(("wrap_module", automatic, accumulates))
        wrapped = super().wrap_module(module, step, automatic=automatic, accumulates=accumulates)

        def counted(batch, batch_idx):
            self.calls.append(("step", batch_idx))
            return wrapped(batch, batch_idx)

        return counted

    def rewrap_module(self, step):
        self.calls.append(("rewrap_module",))
        return super().rewrap_module(step)

    def setup_optimizers(self, optimizers):
        self.calls.append(("setup_optimizers", len(optimizers)))
        return super().setup_optimizers(optimizers)

    @contextlib.contextmanager
    def no_sync(self):
        self.calls.append(("no_sync",))
        with super().no_sync():
            yield

    def refuses_graph(self):
        self.calls.append(("refuses_graph",))
        return super().refuses_graph()

    def note_window(self, *, begun):
        self.calls.append(("note_window", begun))
        super().note_window(begun=begun)

    def whole_gradients(self):
        self.calls.append(("whole_gradients",))
        return super().whole_gradients()

    def places_of_whole_gradients(self):
        self.calls.append(("places_of_whole_gradients",))
        return super().places_of_whole_gradients()

    def take_whole_gradients(self, stacked):
        self.calls.append(("take_whole_gradients",))
        super().take_whole_gradients(stacked)

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", memory is not None))
        return super().reduce_gradients(memory)

    def reduce(self, value, reduce_op="mean"):
        self.calls.append(("reduce", reduce_op))
        return super().reduce(value, reduce_op)

    def broadcast(self, value, src=0):
        self.calls.append(("broadcast", src))
        return super().broadcast(value, src)

    def all_gather(self, value):
        self.calls.append(("all_gather",))
        return super().all_gather(value)

    def all_gather_object(self, value):
        self.calls.append(("all_gather_object",))
        return super().all_gather_object(value)

    def on_rank_zero(self, action):
        self.calls.append(("on_rank_zero",))
        return super().on_rank_zero(action)

    def agree(self, problem):
        self.calls.append(("agree",))
        super().agree(problem)

    def module_state(self, module):
        self.calls.append(("module_state",))
        return super().module_state(module)

    def barrier(self, name=""):
        self.calls.append(("barrier",))
        super().barrier(name)

    def join(self, state):
        self.calls.append(("join",))
        return super().join(state)

    def begin_step(self):
        self.calls.append(("begin_step",))
        super().begin_step()

    def end_steps(self):
        self.calls.append(("end_steps",))
        super().end_steps()

    def teardown(self):
        self.calls.append(("teardown",))
        super().teardown()


class ComesAndGoes(LoggedStrategy):
    """One that processes may join: it is told of each step."""

    name = "comes_and_goes"
    heals = True


class HalfGradients(Strategy):
    """Divides the gradients by two, where the update divides anyway."""

    name = "half_gradients"
    asks_for_parameters = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", len(memory.parameters), len(memory.tensors)))
        gradients = super().reduce_gradients(memory)
        return gradients._replace(divisor=gradients.divisor * 2)


class OwnGradients(Strategy):
    """Hands over tensors of its own, and a flag for each."""

    name = "own_gradients"
    asks_for_parameters = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients",))
        local = memory.local()
        parameters = memory.parameters
        found = [one.grad for one in parameters] if local is IN_PLACE else local.values()
        tensors = [None if one is None else one.clone() for one in found]
        present = torch.tensor([float(one is not None) for one in tensors])
        tensors = [torch.zeros_like(one) if own is None else own for one, own in zip(parameters, tensors, strict=True)]
        return Gradients(tensors=tensors, divisor=1.0, present=present)


class OwnAverage(ProcessGroupStrategy):
    """Averages each gradient by itself at the end of a window."""

    name = "own_average"
    asks_for_parameters = True

    def __init__(self):
        super().__init__(timeout=120)
        self.calls = []
        self.local = 0

    def wrap_module(self, module, step, *, automatic, accumulates=False):
        self.calls.append(("wrap_module", automatic, accumulates))
        self.share_module(module)
        return super().wrap_module(module, step, automatic=automatic, accumulates=accumulates)

    @contextlib.contextmanager
    def no_sync(self):
        self.local += 1
        yield

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", memory is not None))
        if memory.tensors:
            for one in memory.tensors:
                one.copy_(self.reduce(one))
        else:
            for one in memory.parameters:
                if one.grad is not None:
                    one.grad.copy_(self.reduce(one.grad))
        return memory.local()

    def refuses_graph(self):
        return "own_average is not captured; leave cuda_graph out"


class LoggedDelayedDDP(DelayedDDP):
    """DelayedDDP with its calls noted."""

    name = "logged_delayed_ddp"

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def share_module(self, module):
        self.calls.append(("share_module",))
        super().share_module(module)

    def share_buffers(self, module):
        self.calls.append(("share_buffers",))
        super().share_buffers(module)

    def wrap_module(self, module, step, *, automatic, accumulates=False):
        self.calls.append(("wrap_module", automatic, accumulates))
        return super().wrap_module(module, step, automatic=automatic, accumulates=accumulates)

    def rewrap_module(self, step):
        self.calls.append(("rewrap_module",))
        return super().rewrap_module(step)

    def no_sync(self):
        self.calls.append(("no_sync",))
        return super().no_sync()

    def note_window(self, *, begun):
        self.calls.append(("note_window", begun))
        super().note_window(begun=begun)

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", memory is not None))
        return super().reduce_gradients(memory)

    def refuses_graph(self):
        return super().refuses_graph()

    def teardown(self):
        self.calls.append(("teardown",))
        super().teardown()


class LoggedDDP(DDP):
    """DDP with its calls noted; the wrapped step is looked at too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def wrap_module(self, module, step, *, automatic, accumulates=False):
        self.calls.append(("wrap_module", automatic, accumulates))
        return super().wrap_module(module, step, automatic=automatic, accumulates=accumulates)

    def no_sync(self):
        self.calls.append(("no_sync",))
        return super().no_sync()

    def note_window(self, *, begun):
        self.calls.append(("note_window", begun))
        super().note_window(begun=begun)

    def settle_module(self, module):
        self.calls.append(("settle_module",))
        super().settle_module(module)

    def reduce_gradients(self, memory=None):
        self.calls.append(("reduce_gradients", memory is not None))
        return super().reduce_gradients(memory)


# -- precisions -----------------------------------------------------------------------------------------------------------------


class Bf16Inputs(Precision):
    """The recipe of docs/architecture.md: full precision over inputs that were rounded to bfloat16."""

    name = "bf16-inputs"

    def convert_input(self, batch):
        return cast_floating(cast_floating(batch, torch.bfloat16), torch.float32)


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
        assert isinstance(strategy, Strategy)
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

    def step(self, optimizer, gradients=IN_PLACE, clip=None, run=None, loss=None, look=None):
        given = (run is not None, loss is not None, look is not None)
        self.calls.append(("step", clip, *given))
        self.steps += 1
        gradients = gradients._replace(divisor=gradients.divisor * self.scale)
        super().step(optimizer, gradients, clip, run, loss, look)

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


class HostVerdicts:
    """What became of the windows of :class:`HostPrecision`, which knows it at once."""

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

    def close_window(self, loss):
        self.launch_close(loss)
        return self.note_closed()

    def launch_close(self, loss):
        self.calls.append(("launch_close", loss is not None))
        self.loss = float("nan") if loss is None else float(loss.detach())

    def note_closed(self):
        self.applied_steps += self.applied
        self.skipped_steps += not self.applied
        verdict = Verdict(
            applied=self.applied,
            scale=self.scale,
            loss=self.loss,
            applied_steps=self.applied_steps,
            skipped_steps=self.skipped_steps,
        )
        self.calls.append(("note_closed", verdict.applied, verdict.ends_run))
        self.applied = True
        return verdict

    def drain(self):
        self.calls.append(("drain",))
        return []

    def explain(self, global_step):
        return f"step {global_step}"


class HostPrecision(Precision):
    """Makes the whole step itself, on the host: looks, clips, updates, or skips."""

    name = "host"

    def __init__(self):
        self.verdicts = HostVerdicts()
        self.calls = []

    def step(self, optimizer, gradients=IN_PLACE, clip=None, run=None, loss=None, look=None):
        assert clip is None or isinstance(clip, Clip)
        self.calls.append(("step", clip, run is not None, look is not None))
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if gradients.tensors is not None:
            for parameter, value in zip(parameters, gradients.values(), strict=True):
                parameter.grad = value
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(gradients.divisor)
        if look is not None:
            clip = look()
        found = [one.grad for one in parameters if one.grad is not None]
        if not all(one.isfinite().all() for one in found):
            self.verdicts.applied = False
            return
        if clip is not None and clip.algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, clip.value)
        elif clip is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip.value)
        (run or optimizer.step)()

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

    def step(self, optimizer, gradients=IN_PLACE, clip=None, run=None, loss=None, look=None):
        self.calls.append(("step", clip, run is not None, look is not None))
        super().step(optimizer, gradients, clip, run, loss, look)

    def state_dict(self):
        self.calls.append(("state_dict",))
        verdicts = self.verdicts
        told = {} if verdicts is None else {"told": [verdicts.applied_steps, verdicts.skipped_steps, verdicts.scale]}
        return {**super().state_dict(), **told}

    def load_state_dict(self, state):
        self.calls.append(("load_state_dict", state.get("told")))
        super().load_state_dict(state)


# -- callbacks ------------------------------------------------------------------------------------------------------------------


class EveryHook(Callback):
    """Overrides all that a callback has."""

    def __init__(self, tag="own"):
        self.tag = tag
        self.count = 0
        self.calls = []

    @property
    def state_key(self):
        return self._generate_state_key(tag=self.tag)

    def accepts_state_of(self, key):
        self.calls.append(("accepts_state_of",))
        return key.startswith("EveryHook") or super().accepts_state_of(key)

    def state_dict(self):
        self.calls.append(("state_dict",))
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.calls.append(("load_state_dict", state_dict["count"]))
        self.count = state_dict["count"]

    def holds_at(self, global_step):
        self.calls.append(("holds_at", global_step))
        return math.inf

    @contextlib.contextmanager
    def evaluation_context(self, trainer, pl_module):
        self.calls.append(("evaluation_context", "begins"))
        with super().evaluation_context(trainer, pl_module):
            yield
        self.calls.append(("evaluation_context", "ends"))

    def setup(self, trainer, pl_module, stage):
        self.calls.append(("setup", stage))

    def teardown(self, trainer, pl_module, stage):
        self.calls.append(("teardown", stage))

    def on_fit_start(self, trainer, pl_module):
        self.calls.append(("on_fit_start",))

    def on_fit_end(self, trainer, pl_module):
        self.calls.append(("on_fit_end",))

    def on_sanity_check_start(self, trainer, pl_module):
        self.calls.append(("on_sanity_check_start",))

    def on_sanity_check_end(self, trainer, pl_module):
        self.calls.append(("on_sanity_check_end",))

    def on_train_start(self, trainer, pl_module):
        self.calls.append(("on_train_start",))

    def on_train_end(self, trainer, pl_module):
        self.calls.append(("on_train_end",))

    def on_train_epoch_start(self, trainer, pl_module):
        self.calls.append(("on_train_epoch_start",))

    def on_train_epoch_end(self, trainer, pl_module):
        self.calls.append(("on_train_epoch_end",))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.calls.append(("on_train_batch_start", batch_idx))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls.append(("on_train_batch_end", batch_idx))

    def on_validation_start(self, trainer, pl_module):
        self.calls.append(("on_validation_start",))

    def on_validation_end(self, trainer, pl_module):
        self.calls.append(("on_validation_end",))

    def on_validation_epoch_start(self, trainer, pl_module):
        self.calls.append(("on_validation_epoch_start",))

    def on_validation_epoch_end(self, trainer, pl_module):
        self.calls.append(("on_validation_epoch_end",))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("on_validation_batch_start", batch_idx, dataloader_idx))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("on_validation_batch_end", batch_idx, dataloader_idx))

    def on_test_start(self, trainer, pl_module):
        self.calls.append(("on_test_start",))

    def on_test_end(self, trainer, pl_module):
        self.calls.append(("on_test_end",))

    def on_test_epoch_start(self, trainer, pl_module):
        self.calls.append(("on_test_epoch_start",))

    def on_test_epoch_end(self, trainer, pl_module):
        self.calls.append(("on_test_epoch_end",))

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("on_test_batch_start", batch_idx, dataloader_idx))

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("on_test_batch_end", batch_idx, dataloader_idx))

    def on_predict_start(self, trainer, pl_module):
        self.calls.append(("on_predict_start",))

    def on_predict_end(self, trainer, pl_module):
        self.calls.append(("on_predict_end",))

    def on_predict_epoch_start(self, trainer, pl_module):
        self.calls.append(("on_predict_epoch_start",))

    def on_predict_epoch_end(self, trainer, pl_module):
        self.calls.append(("on_predict_epoch_end",))

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("on_predict_batch_start", batch_idx, dataloader_idx))

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append(("on_predict_batch_end", batch_idx, dataloader_idx))

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.calls.append(("on_before_zero_grad",))

    def on_before_backward(self, trainer, pl_module, loss):
        self.calls.append(("on_before_backward",))

    def on_after_backward(self, trainer, pl_module):
        self.calls.append(("on_after_backward",))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.calls.append(("on_before_optimizer_step",))

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.calls.append(("on_save_checkpoint",))

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.calls.append(("on_load_checkpoint",))

    def on_exception(self, trainer, pl_module, exception):
        self.calls.append(("on_exception",))


STATE = (
    "agreed ahead batch_idx batches_done capturing closed_at committed dataloader_idx epoch epoch_ended evaluated fn "
    "global_step hold_at hold_evaluated interruption num_dataloaders open_batches passed peak_bytes runs_as scope "
    "should_stop skipped_before stage started status stop_error stop_explanation stop_reason validated_at validations"
).split()


class ReadsState(Callback):
    """Reads the counters of a run, and what a trainer and its parts show, behind each micro-batch."""

    def __init__(self):
        self.seen = []
        self.last = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = trainer.state
        self.last = {name: getattr(state, name) for name in STATE}
        counters = (state.global_step, state.batch_idx, state.batches_done, state.open_batches, state.epoch)
        verdicts = trainer.precision_plugin.verdicts
        told = None if verdicts is None else (verdicts.applied_steps, verdicts.skipped_steps, verdicts.scale)
        self.seen.append((counters, told, trainer.strategy.world_size))


class StopsBy(Callback):
    """Asks for the end of training by the run's state."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.state.ask("it is enough")


class NamedCheckpoint(ModelCheckpoint):
    """Names and counts its files."""

    CHECKPOINT_JOIN_CHAR = "_"
    CHECKPOINT_EQUALS_CHAR = "."
    CHECKPOINT_NAME_LAST = "newest"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 2

    def __init__(self, dirpath=None, **options):
        super().__init__(dirpath, **options)
        self.calls = []

    @property
    def state_key(self):
        return f"named {super().state_key}"

    def accepts_state_of(self, key):
        self.calls.append(("accepts_state_of",))
        return key.startswith("named") or super().accepts_state_of(key)

    def format_checkpoint_name(self, metrics, filename=None, ver=None):
        self.calls.append(("format_checkpoint_name", filename, ver, int(metrics["step"])))
        path = super().format_checkpoint_name(metrics, filename, ver)
        folder, file = os.path.split(path)
        return os.path.join(folder, f"run_{file}")

    def known_files(self):
        return {os.path.basename(one) for one in super().known_files()}

    def setup(self, trainer, pl_module, stage):
        self.calls.append(("setup", stage))
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer, pl_module):
        self.calls.append(("on_train_start",))
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls.append(("on_train_batch_end", batch_idx))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def holds_at(self, global_step):
        self.calls.append(("holds_at", global_step))
        return super().holds_at(global_step)

    def on_validation_end(self, trainer, pl_module):
        self.calls.append(("on_validation_end",))
        super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        self.calls.append(("on_train_epoch_end",))
        super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.calls.append(("on_train_end",))
        super().on_train_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.calls.append(("on_save_checkpoint", checkpoint["global_step"]))
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def state_dict(self):
        self.calls.append(("state_dict",))
        return {**super().state_dict(), "saves": self.saves}

    def load_state_dict(self, state_dict):
        self.calls.append(("load_state_dict", state_dict["saves"]))
        super().load_state_dict(state_dict)

    @property
    def saves(self):
        return sum(call[0] == "on_save_checkpoint" for call in self.calls)


class SlowEMA(EMA):
    """Updates when it likes to."""

    def __init__(self, decay):
        super().__init__(decay)
        self.calls = []

    def should_update(self, step_idx=None, epoch_idx=None):
        self.calls.append(("should_update", step_idx, epoch_idx))
        return step_idx is not None and step_idx % 2 == 1


class LateLayers(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def freeze_before_training(self, pl_module):
        self.calls.append(("freeze_before_training",))
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        self.calls.append(("finetune_function", epoch))
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class KeepsPredictions(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.calls = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.calls.append(("write_on_batch_end", tuple(prediction.shape), batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.calls.append(("write_on_epoch_end", len(predictions), batch_indices))


class OwnBar(ProgressBar):
    """Shows fewer metrics."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def get_metrics(self, trainer, pl_module):
        self.calls.append(("get_metrics",))
        return {
            "own": 1.5,
            **{key: value for key, value in super().get_metrics(trainer, pl_module).items() if key != "v_num"},
        }


# -- checkpoints ----------------------------------------------------------------------------------------------------------------


class Notebook(Section):
    """A part of a run's state, one for all ranks."""

    name = "notebook"

    def __init__(self):
        self.lines = []
        self.calls = []

    def save(self):
        self.calls.append(("save",))
        return {"own.notebook": list(self.lines)}

    def restore(self, checkpoint, path):
        self.calls.append(("restore", path))
        self.lines = list(checkpoint["own"]["notebook"])


class Draws(Section):
    """One that each rank has for itself."""

    name = "draws"
    per_rank = True

    def __init__(self, rank):
        self.rank = rank
        self.value = torch.full((2,), float(rank))

    def save(self):
        return {"own.draws": self.value.clone(), "own.rank": self.rank}

    def restore(self, checkpoint, path):
        self.value = checkpoint["own"]["draws"][self.rank]
        if checkpoint["own"]["rank"] != list(range(len(checkpoint["own"]["rank"]))):
            raise ValueError("ranks are in another order")


def part_of(part):
    """Whatever has a state_dict, as a part of a run's state."""
    return Part("a counter", "own.counter", part)


# -- optimizers -----------------------------------------------------------------------------------------------------------------


@dataclass
class SignRule(Rule):
    """Along the sign of a momentum."""

    kernel = "third_party_sign"
    states = ("exp_avg",)
    cells = ("steps",)

    lr: float
    beta: float = 0.9

    def scalars(self):
        return (self.lr, self.beta)

    def step(self, gradients, parameters, states, cells):
        (averages,), (steps,) = states, cells
        torch._foreach_mul_(averages, self.beta)
        torch._foreach_add_(averages, gradients, alpha=1 - self.beta)
        for parameter, average, count in zip(parameters, averages, steps, strict=True):
            count.add_(1)
            parameter.add_(average.sign(), alpha=-float(self.lr))


third_party_sign = function_of(SignRule)


class FusedSign(FusedOptimizer):
    """An optimizer over :class:`SignRule`."""

    rule = SignRule

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    def _rule(self, group):
        return SignRule(group["lr"], group["beta"])


class LookingRule(SignRule):
    """Looks at what an update is made by."""

    seen = []

    def gradients(self, rows, parameters, steering):
        multiplier = None if steering.state is None else float(steering.state.multiplier)
        LookingRule.seen.append(("gradients", multiplier, steering.limit, steering.skips))
        return super().gradients(rows, parameters, steering)

    def measure(self, rows, steering):
        LookingRule.seen.append(("measure",))
        return super().measure(rows, steering)

    def reference(self, rows, steering):
        assert isinstance(steering, Steering)
        LookingRule.seen.append(("reference", len(rows.parameters), steering.norm is not None))
        super().reference(rows, Steering(steering.state, steering.limit, steering.skips, norm=steering.norm))


class LookingSign(FusedSign):
    """Notes how a Precision steers it."""

    rule = LookingRule

    def __init__(self, params, lr=1e-2, beta=0.9):
        self.calls = []
        super().__init__(params, lr, beta)

    def _rule(self, group):
        return LookingRule(group["lr"], group["beta"])

    def _measure(self, steering):
        self.calls.append(("_measure", steering.limit, steering.skips))
        return {
            **super()._measure(steering),
            **{part: torch.ones((), dtype=torch.float64) for part in [torch.device("cpu")]},
        }

    def gather(self, gradients=None, *options, **named):
        self.calls.append(("gather", gradients is not None))
        super().gather(gradients, *options, **named)

    def statistics(self, scale, divisor=1.0):
        self.calls.append(("statistics", divisor))
        return super().statistics(scale, divisor)

    def steer(self, state, *, limit=None, skips=True):
        self.calls.append(("steer", state is not None, limit, skips))
        super().steer(state, limit=limit, skips=skips)

    def step(self, closure=None):
        self.calls.append(("step",))
        return super().step(closure)

    def zero_grad(self, set_to_none=None):
        self.calls.append(("zero_grad",))
        super().zero_grad(set_to_none)


class NoisyAdam(FusedAdam):
    """A subclass of one of fabricamp's own."""

    def __init__(self, params, **options):
        self.calls = []
        super().__init__(params, **options)

    def steer(self, state, *, limit=None, skips=True):
        self.calls.append(("steer", limit, skips))
        super().steer(state, limit=limit, skips=skips)

    def step(self, closure=None):
        self.calls.append(("step",))
        return super().step(closure)


# -- loggers, profilers and data ------------------------------------------------------------------------------------------------


class JsonLines(Logger):
    """The recipe of docs/architecture.md: one line of JSON per flush."""

    def __init__(self, path):
        self.file = open(path, "a")

    def log_metrics(self, metrics, step):
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")

    def save(self):
        self.file.flush()

    def barrier(self, step):
        self.file.flush()
        os.fsync(self.file.fileno())


class EveryLog(Logger):
    """Overrides all that a logger has."""

    name = "every"
    version = 7

    def __init__(self, folder):
        self.save_dir = str(folder)
        self.calls = []
        self.rows = []

    @property
    def log_dir(self):
        return os.path.join(self.save_dir, "every")

    def run_folders(self):
        self.calls.append(("run_folders",))
        return super().run_folders()

    def identity(self):
        self.calls.append(("identity",))
        return 7

    def join(self, identity):
        self.calls.append(("join", identity))

    def give_back(self):
        self.calls.append(("give_back",))

    def begin(self):
        self.calls.append(("begin",))

    def log_metrics(self, metrics, step=None):
        self.calls.append(("log_metrics", step))
        self.rows.append({"step": self._at(step), **self._named(metrics)})

    def log_hyperparams(self, params, metrics=None):
        self.calls.append(("log_hyperparams", dict(params)))

    def log_graph(self, model, input_array=None):
        self.calls.append(("log_graph",))

    def log_histogram(self, name, counts, limits, sums, step):
        self.calls.append(("log_histogram", name, step))

    def after_save_checkpoint(self, checkpoint_callback):
        self.calls.append(("after_save_checkpoint", os.path.basename(checkpoint_callback.best_model_path)))

    def save(self):
        self.calls.append(("save",))

    def barrier(self, step):
        self.calls.append(("barrier", step))

    def state_dict(self):
        self.calls.append(("state_dict",))
        return {"rows": len(self.rows)}

    def load_state_dict(self, state_dict):
        self.calls.append(("load_state_dict", state_dict["rows"]))

    def finalize(self, status):
        self.calls.append(("finalize", status))

    def close(self):
        self.calls.append(("close",))


class Tabs(RowFileLogger):
    """Rows with tabs between the values, in a file of the run's folder."""

    FILE = "metrics.tsv"
    MOST_WAITING = 1000

    def __init__(self, save_dir, **options):
        self.calls = []
        super().__init__(save_dir, **options)

    def log_metrics(self, metrics, step=None):
        self.calls.append(("log_metrics", step))
        super().log_metrics(metrics, step)

    def _row(self, metrics, step):
        self.calls.append(("_row",))
        return {**super()._row(metrics, step), "rounded": round(sum(metrics.values()), 3)}

    def _digest(self, rows, before):
        return zlib.crc32(_tabs(rows), before)

    def _extent(self, content, rows):
        self.calls.append(("_extent",))
        return {"bytes": content.size + len(_tabs(rows))}

    def _read(self):
        text = self.metrics_file.read_bytes()
        rows = [dict(pair.split("=") for pair in line.split("\t")) for line in text.decode().splitlines()]
        return rows, zlib.crc32(text)

    def _write(self, rows):
        self.calls.append(("_write", len(rows)))
        self._file.append(_tabs(rows))

    def _take_back(self, content, state_dict):
        self.calls.append(("_take_back",))
        size = state_dict["bytes"]
        if content.size > size and zlib.crc32(self.metrics_file.read_bytes()[:size]) == state_dict["digest"]:
            os.truncate(self.metrics_file, size)
            self._content = None


def _tabs(rows):
    return b"".join("\t".join(f"{key}={value}" for key, value in row.items()).encode() + b"\n" for row in rows)


class Steps(RunFolderLogger):
    """A run's folder with a file that a thread appends to."""

    MOST_WAITING = 1000

    def __init__(self, save_dir, name="steps", version=None, prefix=""):
        super().__init__(save_dir, name, version, prefix)
        self.calls = []

    def log_metrics(self, metrics, step=None):
        from fabricamp.loggers.backlog import Record

        self.calls.append(("log_metrics", step))
        self._backlog.add(Record(self._at(step), sorted(self._named(metrics))))

    def _look(self):
        path = self.folder / "steps.txt"
        return path.stat().st_size if path.exists() else 0

    def _append(self, records):
        self.calls.append(("_append", len(records)))
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "steps.txt").open("a") as file:
            file.writelines(f"{' '.join(one)}\n" for one in records)
        return self._look()

    def _sync(self):
        self.calls.append(("_sync",))


class Rounded(CSVLogger):
    """Fewer digits in the columns."""

    def __init__(self, save_dir, **options):
        super().__init__(save_dir, **options)
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append(("log_metrics", step))
        super().log_metrics({key: round(float(value), 2) for key, value in metrics.items()}, step)


class Actions(Profiler):
    """Counts actions."""

    def __init__(self, dirpath=None, filename=None):
        super().__init__(dirpath, filename)
        self.calls = []
        self.started = {}

    def setup(self, stage, local_rank=None, log_dir=None):
        self.calls.append(("setup", stage, local_rank))
        super().setup(stage, local_rank, log_dir)

    def watch(self, module):
        self.calls.append(("watch", type(module).__name__))

    def start(self, action_name):
        self.started[action_name] = self.started.get(action_name, 0) + 1

    def stop(self, action_name):
        self.started[f"{action_name} stops"] = self.started.get(f"{action_name} stops", 0) + 1

    def summary(self):
        return f"{len(self.started)} actions"

    def teardown(self, stage):
        self.calls.append(("teardown", stage))


class Digits(DataModule):
    """Loaders over a dataset, with a place to go on from."""

    def __init__(self, dataset, batch_size=4):
        super().__init__()
        self.save_hyperparameters(ignore="dataset")
        self.dataset = dataset
        self.calls = []

    def prepare_data(self):
        self.calls.append(("prepare_data",))

    def setup(self, stage):
        self.calls.append(("setup", stage))

    def teardown(self, stage):
        self.calls.append(("teardown", stage))

    def train_dataloader(self):
        self.calls.append(("train_dataloader",))
        return DataLoader(self.dataset, self.hparams.batch_size, sampler=Backwards(self.dataset))

    def val_dataloader(self):
        self.calls.append(("val_dataloader",))
        return DataLoader(self.dataset, self.hparams.batch_size)

    def test_dataloader(self):
        self.calls.append(("test_dataloader",))
        return DataLoader(self.dataset, self.hparams.batch_size)

    def predict_dataloader(self):
        self.calls.append(("predict_dataloader",))
        return DataLoader(self.dataset, self.hparams.batch_size)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(("on_before_batch_transfer", dataloader_idx))
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(("on_after_batch_transfer", dataloader_idx))
        return batch

    def state_dict(self):
        self.calls.append(("state_dict",))
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict):
        self.calls.append(("load_state_dict", state_dict["calls"] > 0))


class Backwards(Sampler):
    """From the last sample to the first; another number of samples is left out in each epoch."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return iter(range(len(self.dataset) - 1, -1, -1))
