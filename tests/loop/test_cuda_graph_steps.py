"""Several steps in one launch, without a GPU: the length of a launch, its batches, learning rates, step statuses and hooks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from fabricamp import Callback, ConfigError, CudaGraph, OptLevel
from fabricamp.arguments.cadence import Cadence, Every
from fabricamp.callbacks import (
    EMA,
    AsyncCheckpoint,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from fabricamp.callbacks.base import waits_between_steps
from fabricamp.data import Feed, ResidentLoader
from fabricamp.engine.entries import CallbackHolds, Flush, Stop, Validation
from fabricamp.engine.graph.group_update import GroupReader
from fabricamp.engine.graph.lr_table import LrTable
from fabricamp.engine.graph.refusals import group_refusal
from fabricamp.engine.optimizer_setup import SchedulerConfig
from fabricamp.engine.schedules import Schedules
from fabricamp.engine.update import Update
from fabricamp.errors import CheckpointError
from fabricamp.optimizers import FusedAdam
from fabricamp.precision.loss_scaler import LossScaler
from fabricamp.precision.step_results import StepResults
from fabricamp.state import RunState
from fabricamp.strategies import DDP, FSDP, Environment
from fabricamp.strategies.base import Strategy
from tests.inside import session
from tests.small import Classifier, loader, quiet_trainer


def test_steps_are_a_whole_number():
    assert CudaGraph(steps=8).steps == 8
    assert CudaGraph(steps=8, warmup=5).one_by_one() == CudaGraph(warmup=5)
    for wrong in (0, 1.0, True, "8"):
        with pytest.raises(ConfigError, match=r"CudaGraph\(steps="):
            CudaGraph(steps=wrong)


# -- the length of a launch -------------------------------------------------------------------------------------------------------


def parts_of(**given):
    """Returns the parts of a fit whose agenda has the entries that bound a launch."""
    options = {"log_every_n_steps": 50, "max_steps": -1, "min_steps": 0, "check_val_every_n_epoch": 1}
    others = {"val_check_interval": 1.0, "limit_val_batches": 1, "fast_dev_run": 0}
    length = given.pop("length", math.inf)
    holds = given.pop("holds", [])
    parts = SimpleNamespace(
        state=RunState(),
        settings=SimpleNamespace(**{**options, **others, **given}),
        length=length,
        metrics=None,
        requests=None,
    )
    parts.validate = parts.strategy = None
    if "val_check_interval" in given:
        parts.validate = bool
    parts.feed = SimpleNamespace(length=length)
    agenda = parts.state.agenda
    agenda.add(Flush(parts, None), Validation(parts, bool), Stop(parts, None, bool), CallbackHolds(parts, holds))
    agenda.begin(parts.state, float)
    return parts


PLANS = st.fixed_dictionaries(
    {
        "most": st.integers(2, 9),
        "log": st.integers(1, 30),
        "max_steps": st.integers(1, 90) | st.just(-1),
        "min_steps": st.integers(0, 40),
        "epoch": st.integers(1, 40),
        "validate": st.integers(1, 40) | st.just(math.inf),
        "check_val_every_n_epoch": st.integers(1, 3) | st.none(),
        "times": st.none() | st.builds(Every, steps=st.integers(0, 20)),
        "save": st.integers(0, 25),
        "begin": st.integers(0, 60),
    }
)


@settings(max_examples=150, deadline=None)
@given(PLANS)
def test_no_boundary_falls_inside_a_launch_and_all_steps_are_made(plan):
    """Tests a run of up to three epochs from any position; the test computes independently what happens between two steps."""
    most, length = plan["most"], plan["epoch"]
    names = {name: plan[name] for name in ("max_steps", "min_steps", "check_val_every_n_epoch", "times")}
    across = plan["check_val_every_n_epoch"] is None
    every = plan["validate"]
    if across and every == math.inf:
        every = 7
    if every == math.inf or (every > length and not across):
        every = length
    names["val_check_interval"] = every
    if names.pop("times") is not None:
        names["val_check_interval"] = f"{plan['times'].steps} steps" if plan["times"].steps else "1 epoch"
    cadence = Cadence(plan["save"], None)
    holds = [lambda step: max(cadence.next_look, step + 1)]
    parts = parts_of(log_every_n_steps=plan["log"], length=length, holds=holds, **names)
    state = parts.state
    begin = min(plan["begin"], 3 * length - 1, plan["max_steps"] - 1 if plan["max_steps"] > 0 else 10**6)
    state.global_step = state.batches_done = begin
    state.epoch, state.batch_idx = divmod(begin, length)
    cadence.start(begin)
    reader = reader_of(parts, most)
    end = min(3 * length, plan["max_steps"] if plan["max_steps"] > 0 else 10**6)

    def is_boundary(step):
        epoch, batch = divmod(step - 1, length)
        if plan["times"] is not None:
            validates = plan["times"].steps and step % plan["times"].steps == 0
        elif across:
            validates = step % every == 0
        else:
            validates = not (epoch + 1) % plan["check_val_every_n_epoch"] and (batch + 1) % every == 0
        saves = plan["save"] and step % plan["save"] == 0
        limits = step in (plan["max_steps"], plan["min_steps"], end) or batch + 1 == length
        return step % plan["log"] == 0 or validates or saves or limits

    while state.global_step < end:
        count = reader.launch_size()
        assert count in (1, most)
        places = range(state.global_step + 1, state.global_step + count + 1)
        assert not any(is_boundary(step) for step in places[:-1])
        if count == 1 and not any(is_boundary(state.global_step + ahead) for ahead in range(1, most)):
            raise AssertionError("a launch would have fitted")
        for step in places:
            state.global_step = state.batches_done = step
            state.epoch, state.batch_idx = divmod(step, length)
            if step >= cadence.next_look:
                cadence.is_due(step, Strategy())
    assert state.global_step == end


@pytest.mark.parametrize("length", [math.inf, 7])
def test_a_loader_of_unknown_length_or_a_short_one_is_read_step_by_step(length):
    assert reader_of(parts_of(length=length), 8).launch_size() == 1
    assert reader_of(parts_of(length=length), 7).launch_size() == (7 if length == 7 else 1)


# -- the batches of a launch ------------------------------------------------------------------------------------------------------


def reader_of(parts, most, generator=None):
    rng_state = (generator or torch.Generator()).get_state
    return GroupReader(parts, most, ready=lambda: True, key_of=len, rng_state=rng_state)


def read(batches, most, *, limit=math.inf):
    """Returns for each batch what the loop sees: the batch, whether it is the last, its group, and the committed batches."""
    parts = parts_of()
    parts.feed = Feed(batches, limit=limit)
    reader = reader_of(parts, most)
    state, seen = parts.state, []
    for batch in reader.read(parts.feed.starting_at(0)):
        group = reader.take()
        seen.append((batch, parts.feed.last, group and group.key, state.committed))
        state.batch_idx += 1
        state.batches_done += 1
        state.global_step += 1
    assert not parts.feed.last
    return seen


def test_the_last_batch_is_told_at_its_own_place():
    first, second = [(0, 4), *[(None, 4)] * 3], [(4, 8), *[(None, 8)] * 3]
    groups = [(4 if one == 0 else None, 4) for one, _ in first], [(4 if one == 4 else None, 8) for one, _ in second]
    expected = [*groups[0], *groups[1], (None, 8), (None, 8)]
    assert read(list(range(10)), 4) == [(number, number == 9, *expected[number]) for number in range(10)]
    assert read(list(range(10)), 4, limit=8) == [(number, number == 7, *expected[number]) for number in range(8)]


def test_a_loader_that_draws_where_steps_draw_is_an_error():
    generator = torch.Generator()
    parts = parts_of()
    parts.feed = Feed(
        ResidentLoader(torch.zeros(9, 2), batch_size=1, transform=lambda x: x + torch.rand(2, generator=generator))
    )
    with pytest.raises(ConfigError, match="reading a batch draws random numbers on the GPU"):
        next(reader_of(parts, 4, generator).read(parts.feed.starting_at(0)))


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 6:
            raise ValueError("sample 6")
        return index


def test_an_error_of_the_loader_comes_at_its_batch():
    seen = []
    parts = parts_of()
    parts.feed = Feed(torch.utils.data.DataLoader(Failing(), batch_size=None))
    reader = reader_of(parts, 4)

    def loop():
        for batch in reader.read(parts.feed.starting_at(0)):
            group = reader.take()
            seen.append((int(batch), group and group.batches))
            parts.state.batch_idx += 1

    with pytest.raises(ValueError, match="sample 6"):
        loop()
    assert seen == [(0, [0, 1, 2, 3]), (1, None), (2, None), (3, None), (4, None), (5, None)]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "nested"])
def test_batches_that_are_gathered_at_once_are_those_of_one_by_one(form):
    x, y = torch.arange(42.0).view(21, 2), torch.arange(21)
    given = {"tensor": x, "tuple": (x, y), "dict": {"x": x, "y": y}, "nested": {"in": (x, {"y": y})}}[form]
    alone, together = (ResidentLoader(given, batch_size=4, shuffle=True, transform=lambda one: one) for _ in range(2))
    together.gather_together(3)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert type(one) is type(other)
    (first, second, *_) = list(together) if form == "tensor" else (x[:4].clone(), x[4:8].clone())
    before = second.clone()
    first.mul_(torch.ones(2, requires_grad=True))  # a separate tensor for autograd
    assert not second.requires_grad
    assert torch.equal(second, before)


# -- the loop ---------------------------------------------------------------------------------------------------------------------


class Together(Update):
    """An Update that reads its batches as for launches of four steps."""

    def __init__(self, parts):
        super().__init__(parts)
        self.groups = 0
        self._reader = reader_of(parts, 4)

    def read(self, batches):
        return self._reader.read(batches)

    def run_batch(self, batch, batch_idx, last):
        self.groups += self._reader.take() is not None
        return super().run_batch(batch, batch_idx, last)


@pytest.fixture
def together(monkeypatch):
    made = []
    monkeypatch.setattr("fabricamp.engine.session.Update", lambda parts: made.append(Together(parts)) or made[-1])
    return made


class Asks(Callback):
    """Requests a stop after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.should_stop = True


def test_a_request_to_stop_and_a_signal_wait_for_the_end_of_a_launch(together):
    trainer = quiet_trainer(max_epochs=3, callbacks=[Asks(2)])
    trainer.fit(Classifier(), loader(64))
    assert trainer.global_step == 4

    class Interrupts(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                session(trainer).agreement.request("SIGTERM")

    trainer = quiet_trainer(max_epochs=3, callbacks=[Interrupts()])
    with pytest.raises(SystemExit):
        trainer.fit(Classifier(), loader(64))
    assert trainer.global_step == 8


@pytest.mark.parametrize(("step", "files"), [(2, 0), (4, 1)])
def test_an_error_within_a_launch_leaves_no_checkpoint(step, files, together, tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == step:
                raise ValueError("a hook")

    keeper = ModelCheckpoint(dirpath=tmp_path, save_on_exception=True)
    trainer = quiet_trainer(max_epochs=1, callbacks=[Fails(), keeper], enable_checkpointing=True)
    with pytest.raises(ValueError, match="a hook"):
        trainer.fit(Classifier(), loader(64))
    assert len(list(tmp_path.glob("*.ckpt"))) == files


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2, "val_check_interval": 7},
        {"max_epochs": 2, "limit_train_batches": 13},
        {"max_steps": 22, "log_every_n_steps": 5},
        {"max_epochs": 2, "val_check_interval": "6 steps"},
    ],
)
def test_limits_validations_and_schedules_come_where_they_come_step_by_step(options, together, monkeypatch):
    class Places(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.seen.append((trainer.global_step, batch_idx))

        def on_validation_end(self, trainer, module):
            self.seen.append(("validated", trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    runs = []
    for plain in (False, True):
        if plain:
            monkeypatch.undo()
        places, module = Places(), Classifier()
        trainer = quiet_trainer(callbacks=[places], **options)
        trainer.fit(module, loader(64), loader(8))
        runs.append((places.seen, {name: one.tolist() for name, one in module.state_dict().items()}))
    assert runs[0] == runs[1]
    assert len(together) == 1
    assert together[0].groups > 2


def test_what_cannot_be_done_within_a_launch_is_an_error(together, tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    class Skips(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if batch_idx == 5 else None

    with pytest.raises(CheckpointError, match="after step 1, within a launch of several steps"):
        quiet_trainer(max_epochs=1, callbacks=[Saves()]).fit(Classifier(), loader(64))
    with pytest.raises(ConfigError, match="on_train_batch_start returned -1"):
        quiet_trainer(max_epochs=1, callbacks=[Skips()]).fit(Classifier(), loader(64))


class Reads(Callback):
    """Records the samples of each batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rows.append(batch[0][:, 0].tolist())


def test_samples_that_are_drawn_far_ahead_are_drawn_again_where_a_run_goes_on(together, tmp_path):
    """With replacement torch draws 32 samples at a time, so after a launch the next launch's samples are drawn already."""
    data = TensorDataset(torch.arange(768.0).view(768, 1).expand(768, 8), torch.zeros(768, dtype=torch.int64))

    def fit(path=None):
        drawn = RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(5))
        reads, graph = Reads(), CudaGraph(steps=4, required=False)
        keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1)
        given = {"callbacks": [reads, keeper], "enable_checkpointing": True, "cuda_graph": graph, "max_epochs": 1}
        quiet_trainer(**given).fit(Classifier(), DataLoader(data, batch_size=64, sampler=drawn), ckpt_path=path)
        return reads.rows

    whole = fit()
    (file,) = tmp_path.glob("*step=4.ckpt")
    assert fit(file) == whole[4:]


# -- hooks that may run late ------------------------------------------------------------------------------------------------------


class Early(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        """Reads weights."""


class Late(Early):
    def holds_at(self, global_step):
        return math.inf


class EarlyAgain(Late):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        """Reads weights, in a class without ``holds_at``."""


@pytest.mark.parametrize(
    ("callback", "waits"),
    [
        (Callback(), False),
        (Early(), True),
        (Late(), False),
        (EarlyAgain(), True),
        (EMA(), True),
        (LambdaCallback(on_train_batch_end=print), True),
        (ProgressBar(), False),
        (ThroughputMonitor(), False),
        (Timer("00:00:00:01"), False),
        (LearningRateMonitor(), False),
        (ModelCheckpoint(every_n_train_steps=3), False),
        (AsyncCheckpoint(every_n_train_steps=3), False),
    ],
)
def test_a_class_says_beside_its_hooks_how_late_they_may_be(callback, waits):
    assert waits_between_steps(callback) is waits


def test_a_checkpoint_holds_where_it_saves():
    checkpoint = ModelCheckpoint(every_n_train_steps=6)
    checkpoint._start_at(8)
    assert checkpoint.holds_at(8) == 12
    assert checkpoint.holds_at(12) == 13


class Parts:
    """The parts of a fit on a GPU that the refusals read."""

    def __init__(
        self,
        module=None,
        *,
        ranks=1,
        accumulate=1,
        length=10,
        schedulers=(),
        optimizer=None,
        transfers=False,
        strategy=None,
    ):
        self.module = module or Classifier()
        self.precision = OptLevel("O0")
        self.strategy = strategy or (Strategy() if ranks == 1 else DDP())
        self.strategy.environment = Environment(world_size=ranks)
        self.optimizers = [(optimizer or FusedAdam)(self.module.parameters())]
        make = torch.optim.lr_scheduler.StepLR
        self.schedulers = [SchedulerConfig(make(self.optimizers[0], 1), **one) for one in schedulers]
        self.settings = SimpleNamespace(most_accumulated=accumulate)
        self.feed = SimpleNamespace(length=length, hooks_between=transfers)
        self.hooks = SimpleNamespace(module=lambda name: [1] if name in type(self.module).__dict__ else [])


class Hooked(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Reads weights."""


class Stepping(Classifier):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


BY_STEP = {"schedulers": [{"interval": "step"}]}


@pytest.mark.parametrize(
    ("parts", "callbacks", "words"),
    [
        ({}, [Late(), ProgressBar()], ""),
        ({"schedulers": [{"interval": "step"}]}, [], ""),
        ({"ranks": 2}, [], "several processes"),
        ({"strategy": FSDP()}, [], "strategy 'fsdp' launches step by step"),
        ({"accumulate": 2}, [], "accumulate_grad_batches above 1"),
        ({"transfers": True}, [], "the hooks that transfer a batch"),
        ({"length": math.inf}, [], "the loader does not say how many batches"),
        ({}, [Late(), Early()], r"Early.on_train_batch_end may look at each step's weights; override holds_at"),
        ({"module": Hooked()}, [], r"Hooked.on_train_batch_end may look"),
        ({"module": Stepping()}, [], ""),
        ({"module": Stepping(), **BY_STEP}, [], "lr_scheduler_step runs after each step"),
        ({"schedulers": [{"interval": "step", "reduce_on_plateau": True}]}, [], "a schedule that watches a value"),
        (
            {"optimizer": lambda ones: torch.optim.SGD(ones, lr=0.1), **BY_STEP},
            [],
            "SGD.step runs after each replay, outside of the graph: its lr is a number",
        ),
        (
            {"optimizer": torch.optim.AdamW},
            [],
            "AdamW.step runs after each replay, outside of the graph: it reads numbers",
        ),
        ({"optimizer": lambda ones: torch.optim.SGD(ones, lr=torch.tensor(0.1), fused=True), **BY_STEP}, [], ""),
        (
            {"optimizer": lambda ones: FusedAdam(ones, lr=torch.tensor(0.1)), **BY_STEP},
            [],
            "FusedAdam has a tensor as its lr",
        ),
    ],
)
def test_what_is_refused_before_the_first_batch(parts, callbacks, words):
    reason = group_refusal(Parts(**parts), callbacks)
    assert reason.startswith(words.replace("\\", "")) if words else not reason


# -- step statuses and learning rates ---------------------------------------------------------------------------------------------


def close(scaler, finite):
    scaler.state.finite.fill_(int(finite))
    return scaler.end_step(torch.tensor(1.0))


@pytest.mark.parametrize("windows", [0, 1, 3, 4, 11])
def test_a_wider_ring_tells_the_same_verdicts_and_is_saved_as_ever(windows):
    flags = [number % 3 != 2 for number in range(windows + 9)]
    plain, wide = LossScaler(window=3), LossScaler(window=3)
    for flag in flags[:windows]:
        assert close(plain, flag) == close(wide, flag)
    wide.resize_ring(9)
    assert wide.ring.shape[0] == 9
    for flag in flags[windows:]:
        torch.testing.assert_close(wide.state_dict(), plain.state_dict(), rtol=0, atol=0, equal_nan=True)
        assert close(plain, flag) == close(wide, flag)
    later = LossScaler(window=3)
    later.resize_ring(12)
    later.load_state_dict(wide.state_dict())
    for flag in flags:
        assert close(plain, flag) == close(later, flag) == close(wide, flag)
    assert plain.overflow == later.overflow == wide.overflow
    assert later.slot_of(later.overflow) == later.overflow.step % 12


SCHEDULES = {
    "step": lambda one: torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5),
    "lambda": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.5, total_steps=41, cycle_momentum=False),
    "one behind the other": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [
            torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(one, 30),
        ],
        milestones=[6],
    ),
}


class Schedule:
    """An optimizer with its learning rate on the device, its schedule, and the accumulation steps of a run, as in an Update."""

    def __init__(self, name, frequency, *, follows):
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))
        self.state = RunState()
        config = SchedulerConfig(SCHEDULES[name](self.optimizer), interval="step", frequency=frequency)
        self.optimizer.step()
        self.schedules = Schedules([config], Classifier(), None, self.state)
        self.verdicts = StepResults(LossScaler(window=5), None, dynamic=True) if follows else None

    @property
    def rate(self):
        return self.optimizer.param_groups[0]["lr"].item()

    def launch(self, finite):
        if self.verdicts is not None:
            self.verdicts.scaler.state.finite.fill_(int(finite))
            self.verdicts.launch_end(torch.tensor(1.0))

    def note(self):
        self.state.global_step += 1
        if self.verdicts is None:
            self.schedules.advance(self.state.global_step)
        elif (verdict := self.verdicts.note_end()) is not None and verdict.applied:
            self.schedules.advance(verdict.applied_steps)


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_of_a_launch_are_those_of_single_steps(name, follows, frequency):
    """Overflows, also two in a row, in launches of five with single steps between; also checks the host's rates after each step."""
    finite = [number % 7 not in (3, 4) for number in range(40)]
    plain = Schedule(name, frequency, follows=follows)
    expected, behind = [], []
    for flag in finite:
        expected.append(plain.rate)
        plain.launch(flag)
        plain.note()
        behind.append(plain.rate)
    one = Schedule(name, frequency, follows=follows)
    if one.verdicts is not None:
        one.verdicts.resize_ring(5)
    rates = LrTable(one.optimizer, one.schedules, one.state, one.verdicts, 5)
    found, seen, step = [], [], 0
    for count in (1, 5, 5, 1, 1, 5, 5, 1, 5, 5, 5, 1):
        flags = finite[step : step + count]
        step += count
        if count == 1:
            found.append(one.rate)
            one.launch(flags[0])
        else:
            assert rates.is_valid()
            rates.predict()
            rates.begin()
            for number, flag in enumerate(flags):
                rates.write(number)
                found.append(one.rate)
                one.launch(flag)
                rates.note_applied(number)
            rates.restore()
        for _ in flags:
            one.note()
            seen.append(one.rate)
        if count > 1:
            rates.check()
    assert found == expected
    assert seen == behind
    assert len(set(expected)) > 3


def test_a_schedule_that_is_a_method_of_the_module_copies_no_module():
    class Warms(Classifier):
        def factor(self, step):
            return (step + 1) / 8

        def __deepcopy__(self, memory):
            raise AssertionError

    module, one = Warms(), Schedule("step", 1, follows=False)
    config = SchedulerConfig(torch.optim.lr_scheduler.LambdaLR(one.optimizer, module.factor), interval="step")
    one.schedules = Schedules([config], module, None, one.state)
    rates = LrTable(one.optimizer, one.schedules, one.state, None, 3)
    rates.predict()
    for number in range(3):
        rates.write(number)
        assert one.rate == pytest.approx(0.1 * (number + 1) / 8)


@pytest.mark.parametrize("is_number", [False, True])
def test_a_schedule_that_cannot_be_foreseen_is_an_error(is_number, monkeypatch):
    one = Schedule("step", 1, follows=False)
    if is_number:
        monkeypatch.setattr(
            "fabricamp.engine.graph.lr_table._numbers_of", lambda _: lambda groups: [groups[0]["lr"].item()]
        )
    clock = one.state  # outside of the schedule, so no copy of the schedule contains it
    config = SchedulerConfig(
        torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda _: 1 / (1 + clock.global_step)), interval="step"
    )
    one.schedules = Schedules([config], Classifier(), None, one.state)
    rates = LrTable(one.optimizer, one.schedules, one.state, None, 3)
    rates.predict()
    for _ in range(3):
        one.note()
    with pytest.raises(ConfigError, match="a schedule gave other learning rates"):
        rates.check()
