"""Replica groups without torchft and without processes: one group, and a simulated manager."""

import itertools
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback
from fabricamp.callbacks import LearningRateFinder
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.optimizers import FusedAdam
from fabricamp.strategies import FaultTolerant, fault_tolerant
from fabricamp.strategies.quorum import Connection, Quorum
from tests.small import Classifier, loader, quiet_trainer


class Manager:
    """Simulates torchft's manager with one group; ``events`` maps the number of a quorum to the state that another group sends."""

    def __init__(self, take, give, events=(), failures=()):
        self.take, self.give, self.events, self.failures = take, give, dict(events), set(failures)
        self.step, self.quorums, self.sums, self.error, self.hung_up = 0, [], 0, None, []
        self.devices = set()  # devices of the summed tensors

    def start_quorum(self, *, shrink_only):
        self.error = None
        self.quorums.append(shrink_only)
        if len(self.quorums) == 1:
            self.first = self.give()
        received = self.events.get(len(self.quorums))
        if received is not None:
            self.take(received)
            self.step = received["step"]

    def connection(self):
        return Connection(self, lambda: self.hung_up.append(self.sums), lambda: None)

    def allreduce(self, tensor, *, reduce_op):
        self.sums += 1
        self.devices.add(tensor.device.type)
        if self.sums in self.failures:
            tensor.fill_(torch.nan)
            self.error = RuntimeError("connection closed by peer")
        return self

    def wait(self):
        return self.error is None

    def should_commit(self):
        self.step += self.error is None
        return self.error is None

    def errored(self):
        return self.error

    def current_step(self):
        return self.step

    def num_participants(self):
        return 1

    def participating_rank(self):
        return 0

    def load_state_dict(self, state):
        self.step = state["step"]


def quorum_with(device=None, **options):
    made = []

    def connect(take, give):
        made.append(Manager(take, give, **options))
        return made[0].connection()

    return Quorum(connect, device), made[0]


class Made(list):
    """The managers of a test's fits; ``options`` are for the next one."""

    def __init__(self):
        super().__init__()
        self.options = {}

    def connect(self, take, give, **_):
        self.append(Manager(take, give, **self.options))
        return self[-1].connection()


@pytest.fixture
def managers(monkeypatch):
    made = Made()
    monkeypatch.setattr(fault_tolerant, "connect_torchft", made.connect)
    return made


def strategy(groups=1, group=0):
    return FaultTolerant(groups=groups, group=group, lighthouse="http://nowhere:1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"groups": 2}, r"REPLICA_GROUP_ID, which is not set"),
        ({"groups": 2, "group": 2}, r"give 0 to 1"),
        ({"groups": 0, "group": 0}, r"groups=0\) is not allowed; give a whole number from 1"),
        ({"groups": 2, "group": "first"}, r"group='first'\) is not allowed; give a whole number from 0"),
        ({"groups": 2, "group": 0, "timeout": 0}, r"timeout=0 has to be a number of seconds"),
    ],
)
def test_arguments_that_cannot_work(given, said, monkeypatch):
    monkeypatch.delenv("REPLICA_GROUP_ID", raising=False)
    with pytest.raises(ConfigError, match=said):
        FaultTolerant(**given)


def test_groups_by_torchfts_variables(monkeypatch):
    monkeypatch.setenv("REPLICA_GROUP_ID", "2")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "4")
    assert quiet_trainer(strategy="fault_tolerant").strategy.train_share == (2, 4)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError, match=r"pip install torchft"):
        quiet_trainer(strategy=strategy(), max_steps=1).fit(Classifier(), loader())


def test_without_a_lighthouse(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigError, match="TORCHFT_LIGHTHOUSE"):
        quiet_trainer(strategy=FaultTolerant(groups=1, group=0), max_steps=1).fit(Classifier(), loader())


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx), 4


class Forgetful(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx else None


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Manual, {}, "automatic optimization"),
        (Weighted, {}, "return the mean"),
        (Forgetful, {}, "every rank has to return a loss"),
        (Plateau, {}, "a schedule by steps or epochs"),
        (Classifier, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (Classifier, {"callbacks": [LearningRateFinder()]}, "search with 'single'"),
    ],
)
def test_what_is_refused(managers, kind, options, said):
    with pytest.raises(ConfigError, match=said):
        quiet_trainer(strategy=strategy(), max_steps=1, **options).fit(kind(), loader())


def test_graphs_and_several_processes_are_refused(monkeypatch):
    assert "leave cuda_graph out" in strategy().refuses_graph()
    with pytest.raises(ConfigError, match="'fault_tolerant' runs in one process"):
        quiet_trainer(strategy=strategy(), devices=2)


class Seen(Classifier):
    """Has a fused optimizer, a schedule and random numbers in its step; records each step's samples."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.seen.append(index.tolist())
        return super().training_step((torch.nn.functional.dropout(x, 0.2), y), batch_idx)

    def configure_optimizers(self):
        optimizer = FusedAdam(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def numbered(size=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 8, generator=generator)
    y = torch.randint(0, 3, (size,), generator=generator)
    return DataLoader(TensorDataset(x, y, torch.arange(size)), 2, shuffle=True)


LEVELS = [("O0", 1), ("O1", 2), ("O2", 2), ("O3", 1), ("O4", 2), ("O5", 1)]


@pytest.mark.parametrize(("precision", "accumulated"), LEVELS)
def test_one_group_trains_what_one_process_trains(managers, precision, accumulated):
    ends = []
    for given in ("single", strategy()):
        torch.manual_seed(0)
        module = Seen()
        options = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.5, "precision": precision}
        trainer = quiet_trainer(strategy=given, max_epochs=2, **options)
        trainer.fit(module, numbered())
        ends.append(module)
    assert ends[0].seen == ends[1].seen
    for name, value in ends[0].state_dict().items():
        assert torch.equal(value, ends[1].state_dict()[name]), name
    # One quorum per step, and two after the last step.
    assert managers[0].quorums == [False] * (2 * 12 // accumulated) + [True] * 2


class Given(Callback):
    """Keeps the state that a group gives to another one before its fourth step."""

    def __init__(self, managers):
        self.managers, self.kept = managers, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and self.kept is None:
            manager = self.managers[-1]
            start = manager.start_quorum

            def give_first(**options):
                start(**options)
                self.kept = self.kept or manager.give()

            manager.start_quorum = give_first


@pytest.mark.parametrize(("precision", "accumulated"), LEVELS)
def test_a_group_goes_on_with_the_state_of_another(managers, precision, accumulated):
    """Weights, optimizer, scaler and schedule equal the other group's bit for bit; the samples are from the group's own share."""
    options = {"accumulate_grad_batches": accumulated, "precision": precision, "max_epochs": 2}

    def fit(group, **more):
        torch.manual_seed(0)
        module = Seen()
        trainer = quiet_trainer(strategy=strategy(2, group), **options, **more)
        trainer.fit(module, numbered())
        return trainer, module

    given = Given(managers)
    straight, other = fit(0, callbacks=[given])
    assert given.kept["step"] == 4
    _, of_second = fit(1)
    managers.options["events"] = {1: given.kept}
    for group, seen in ((0, other.seen), (1, of_second.seen)):
        healed, module = fit(group)
        assert healed.global_step == straight.global_step
        assert module.seen == seen[3 * accumulated :]
        if group == 0:
            for name, value in other.state_dict().items():
                assert torch.equal(value, module.state_dict()[name]), name
            assert repr(healed.optimizers[0].state_dict()) == repr(straight.optimizers[0].state_dict())
    assert not {*itertools.chain(*other.seen[:6])} & {*itertools.chain(*of_second.seen[:6])}


def test_groups_that_begin_together_go_on_from_what_one_was_given(managers, tmp_path):
    trainer, module = quiet_trainer(strategy=strategy(), max_steps=3), Seen()
    trainer.fit(module, numbered())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    first = quiet_trainer(strategy=strategy(), max_steps=5)
    first.fit(Seen(), numbered(), ckpt_path=tmp_path / "three.ckpt")
    managers.options["events"] = {1: managers[-1].first}
    assert managers[-1].first["step"] == 0
    other, module = quiet_trainer(strategy=strategy(), max_steps=5), Seen()
    other.fit(module, numbered())
    assert (other.global_step, len(module.seen), other.ckpt_path) == (5, 2, str(tmp_path / "three.ckpt"))
    for name, value in first.lightning_module.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


def test_a_sum_that_failed_is_made_again_of_the_same_gradients():
    quorum, manager = quorum_with(failures={2, 3})
    quorum.join()
    flats = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    quorum.run(flats)
    assert [one.tolist() for one in flats] == [[1.0, 2.0], [3.0]]
    assert manager.quorums == [False, True, True]  # no group joins in between
    assert manager.hung_up == [2, 4]  # after both sums of each attempt
    quorum.begin()
    assert manager.quorums[3:] == [False]


def test_a_step_that_others_have_made_is_taken_from_them():
    late = {"step": 2, "last": [torch.tensor([5.0])], "state": None}
    quorum, manager = quorum_with(failures={1}, events={2: late})
    quorum.join()
    flat = torch.tensor([1.0])
    quorum.run([flat])
    assert flat.tolist() == [5.0]
    assert manager.sums == 1
    flat.fill_(7.0)
    quorum.run([flat])  # uses the quorum in which the others already wait
    assert (flat.item(), manager.quorums, quorum.steps) == (7.0, [False, True], 3)
    assert manager.give()["last"][0].item() == 7.0


def test_a_group_that_was_left_out_for_longer_ends():
    quorum, _ = quorum_with(events={2: {"step": 4, "last": [], "state": None}})
    quorum.join()
    quorum.run([torch.ones(1)])
    with pytest.raises(DistributedError, match="left out of 2 steps"):
        quorum.begin()


def test_sums_that_always_fail_end_the_run():
    quorum, _ = quorum_with(failures=range(100))
    quorum.join()
    with pytest.raises(DistributedError, match="failed 10 times in a row"):
        quorum.run([torch.ones(1)])


def test_who_comes_in_the_middle_of_a_step_gets_no_state():
    quorum, _ = quorum_with(events={1: {"step": 4, "last": [], "state": None}})
    with pytest.raises(DistributedError, match="between two steps"):
        quorum.join()


@pytest.mark.gpu
def test_what_lies_on_the_host_is_shared_through_the_gpu():
    """Groups with a GPU exchange over NCCL, which sums only tensors on a GPU."""
    quorum, manager = quorum_with(torch.device("cuda", 0))
    values = [torch.arange(5, dtype=torch.uint8), torch.randn(3, 2), torch.randn(3, 2, device="cuda").half().t()]
    before = [value.clone() for value in values]
    quorum.share(values)
    assert manager.devices == {"cuda"}
    assert all(map(torch.equal, values, before))


@pytest.mark.gpu
def test_the_last_sum_is_sent_from_the_host():
    """The last sum is copied to the host first: torchft copies from a GPU on a separate stream that waits for no other stream."""
    quorum, manager = quorum_with(torch.device("cuda", 0))
    quorum.join()
    own = torch.randn(1000, device="cuda")
    wanted = own.cpu()
    quorum.run([own])
    assert manager.sums == 1
    (sent,) = quorum._get_state()["last"]
    assert sent.device.type == "cpu"
    assert torch.equal(sent, wanted)
