"""Replica groups that are lost and return, under torchft over Gloo: one process each, ended by a signal and started again.

As a program it is one group: ``python -m tests.distributed.test_replica_groups '{"group": 0, ...}'``.
"""

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricamp import Callback, TrainingModule, seed_everything
from fabricamp.strategies import FaultTolerant
from tests.distributed.scripts import ROOT, end, finish, start
from tests.small import quiet_trainer

SIZE, BATCH = 48, 4
BEFORE, BEHIND = 10, 20
"""Number of steps of all groups before one is lost, and after its return."""
LOST = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def samples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 8, generator=generator)
    return TensorDataset(x, x[:, :1].sin(), torch.arange(SIZE))


def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


class Net(TrainingModule):
    def __init__(self, plan):
        super().__init__()
        self.layers = network()
        self.plan = plan
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.seen.append(index.tolist())
        self.meet_the_end("forward")
        return torch.nn.functional.mse_loss(self.layers(x).float(), y)

    def on_after_backward(self):
        self.meet_the_end("exchange")

    def on_before_optimizer_step(self, optimizer):
        self.meet_the_end("update")

    def meet_the_end(self, place):
        plan = self.plan
        if not plan["victim"]:
            return
        course = self.trainer.callbacks[0]
        if plan["place"] == place and course.all_at >= 0 and self.global_step == course.all_at + BEFORE:
            if place != "exchange":
                self.be_lost()
            elif len(self.seen) == plan["accumulated"]:  # at a random point of the following sum, or soon after it
                threading.Timer(random.uniform(0, 0.01), self.be_lost).start()

    def be_lost(self):
        Path("lost").write_text(repr(time.time()))
        os.kill(os.getpid(), LOST[self.plan["how"]])

    def configure_optimizers(self):
        return optimizer_of(self)


class Course(Callback):
    """Records each step, and saves the steps at which all groups were there, one was missing, and all were back."""

    def __init__(self, plan):
        self.groups, self.file = plan["groups"], Path(f"seen-{plan['group']}-{plan['life']}")
        self.all_at = self.fewer_at = self.back_at = -1

    def state_dict(self):
        return {"at": [self.all_at, self.fewer_at, self.back_at]}

    def load_state_dict(self, state):
        self.all_at, self.fewer_at, self.back_at = state["at"]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.state.open_batches:
            return
        step, here = trainer.global_step, trainer.strategy.participants
        with self.file.open("a") as file:
            file.write(json.dumps([step, here, time.time(), trainer.current_epoch, module.seen]) + "\n")
        module.seen = []
        if self.all_at < 0:
            self.all_at = step if here == self.groups else -1
        elif self.fewer_at < 0:
            self.fewer_at = step if here < self.groups else -1
        elif self.back_at < 0:
            self.back_at = step if here == self.groups else -1
        elif step == self.back_at + BEHIND:
            trainer.should_stop = True


def work(plan):
    """Runs one group."""
    logging.basicConfig(format="%(created)f %(message)s")
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    torch.manual_seed(plan["group"])  # each group has different initial weights
    module = Net(plan)
    strategy = FaultTolerant(
        groups=plan["groups"], group=plan["group"], timeout=plan["timeout"], quorum_timeout=plan["quorum_timeout"]
    )
    trainer = quiet_trainer(
        strategy=strategy,
        accelerator=plan.get("accelerator", "cpu"),
        devices=[plan["group"]] if plan.get("accelerator") == "gpu" else 1,
        precision=plan["precision"],
        accumulate_grad_batches=plan["accumulated"],
        gradient_clip_val=plan.get("clip", 0.5),
        max_epochs=-1,
        max_steps=plan.get("max_steps", -1),
        callbacks=[Course(plan)],
    )
    trainer.fit(module, DataLoader(samples(), BATCH, shuffle=True))
    ended = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": trainer.global_step,
    }
    torch.save(ended, f"end-{plan['group']}-{plan['life']}")


class Groups:
    """The processes of a run, and their lighthouse."""

    def __init__(self, folder, heartbeat_timeout_ms=1000, min_replicas=1, variables=(), **plan):
        from torchft.coordination import LighthouseServer

        self.folder, self.plan, self.victim = folder, plan, plan.pop("victim")
        self.variables = dict(variables)
        self.lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=min_replicas,
            join_timeout_ms=60_000,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )

    def start(self, group, life=0):
        plan = {**self.plan, "group": group, "life": life, "victim": group == self.victim and life == 0}
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {"TORCHFT_LIGHTHOUSE": self.lighthouse.address(), "PYTHONPATH": paths, **self.variables}
        return start(self.folder, "-m", "tests.distributed.test_replica_groups", json.dumps(plan), **variables)

    def seen(self, group, life=0):
        return [json.loads(line) for line in (self.folder / f"seen-{group}-{life}").read_text().splitlines()]


def lost_and_back(folder, **plan):
    """Runs the groups with one loss; returns records and output by group, and each group's final state."""
    groups, told = Groups(folder, **plan), {}
    processes = {number: groups.start(number) for number in range(plan["groups"])}
    lost = processes[plan["victim"]]
    try:
        if plan["how"] == "kill":
            assert finish(lost)[0] == -signal.SIGKILL
        # A group killed in its forward is certainly missing in that step, so nothing has to be waited for.
        if plan["how"] == "stop" or plan["place"] != "forward":
            wait_for_others(folder, groups, plan)
        if plan["how"] == "stop":
            os.kill(lost.pid, signal.SIGCONT)
            code, _, err = finish(lost)
            assert code != 0
            assert "if the others have continued without this group" in err or "left out of" in err
        processes[plan["victim"]] = groups.start(plan["victim"], life=1)
        for number, process in processes.items():
            code, out, told[number] = finish(process)
            assert code == 0, out + told[number]
    finally:
        for process in [lost, *processes.values()]:
            end(process)
        groups.lighthouse.shutdown()
    rows = {number: groups.seen(number) for number in processes}
    rows[plan["victim"]] += groups.seen(plan["victim"], life=1)
    ends = [
        torch.load(folder / f"end-{number}-{int(number == plan['victim'])}", weights_only=True, map_location="cpu")
        for number in processes
    ]
    return rows, told, ends


def wait_for_others(folder, groups, plan):
    """Waits until the others have made a step without the lost group, which might otherwise return before that."""
    other = (plan["victim"] + 1) % plan["groups"]
    deadline = time.monotonic() + 100
    while not (folder / "lost").exists() or groups.seen(other)[-1][1] == plan["groups"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def replayed(rows, first, accumulated):
    """Returns the weights of one process that starts at ``first`` and trains on each step's recorded samples."""
    module, data = network(), samples()
    module.load_state_dict(first)
    optimizer = optimizer_of(module)
    by_step = {}
    for group in sorted(rows):
        for step, participants, _, _, seen in rows[group]:
            by_step.setdefault(step, []).append((participants, seen))
    for step in sorted(by_step):
        made = by_step[step]
        assert {participants for participants, _ in made} == {len(made)}, step
        sums = [torch.zeros_like(one) for one in module.parameters()]
        for _, seen in made:
            optimizer.zero_grad()
            for indices in seen:
                x, y, _ = data[indices]
                (torch.nn.functional.mse_loss(module(x), y) / accumulated).backward()
            torch._foreach_add_(sums, [one.grad for one in module.parameters()])
        for total, one in zip(sums, module.parameters(), strict=True):
            one.grad = total / len(made)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return module.state_dict()


CASES = {
    "killed": {"groups": 2, "victim": 1, "precision": "O0", "accumulated": 2, "place": "forward", "how": "kill"},
    "the first one": {"groups": 2, "victim": 0, "precision": "O2", "accumulated": 2, "place": "update", "how": "kill"},
    "one of three": {"groups": 3, "victim": 1, "precision": "O1", "accumulated": 1, "place": "exchange", "how": "kill"},
    "held up": {"groups": 2, "victim": 1, "precision": "O0", "accumulated": 1, "place": "forward", "how": "stop"},
}


def plan_of(case):
    """Returns a case's plan: the others leave out a stopped group after ``timeout``, and it gives up after ``quorum_timeout``."""
    times = (
        {"timeout": 5, "quorum_timeout": 20} if CASES[case]["how"] == "stop" else {"timeout": 30, "quorum_timeout": 100}
    )
    return {**CASES[case], **times}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_group_that_is_lost_comes_back_with_the_weights_of_the_others(case, tmp_path):
    pytest.importorskip("torchft", reason="needs the package torchft")
    plan = plan_of(case)
    rows, _, ends = lost_and_back(tmp_path, **plan)
    check_ends(ends)
    check_samples(rows, plan)
    if plan["precision"] == "O0":
        check_weights(rows, ends[0]["weights"], plan)


@pytest.mark.slow
def test_groups_end_together_at_a_limit(tmp_path):
    pytest.importorskip("torchft", reason="needs the package torchft")
    plan = {"groups": 2, "precision": "O0", "accumulated": 1, "place": "", "max_steps": 40}
    plan |= {"timeout": 30, "quorum_timeout": 100}
    groups = Groups(tmp_path, victim=None, **plan)
    processes = [groups.start(0), groups.start(1)]
    try:
        for process in processes:
            code, out, err = finish(process)
            assert code == 0, out + err
    finally:
        for process in processes:
            end(process)
        groups.lighthouse.shutdown()
    ends = [torch.load(tmp_path / f"end-{number}-0", weights_only=True) for number in range(2)]
    assert [one["step"] for one in ends] == [40, 40]
    assert all(torch.equal(value, ends[1]["weights"][name]) for name, value in ends[0]["weights"].items())
    check_weights({0: groups.seen(0), 1: groups.seen(1)}, ends[0]["weights"], plan)


def check_ends(ends):
    """Checks that all groups end at the same step with the same bits."""
    for other in ends[1:]:
        assert other["step"] == ends[0]["step"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in ends[0]["weights"].items())
        momenta = [one["optimizer"]["state"] for one in (ends[0], other)]
        assert all(
            torch.equal(momenta[0][key]["momentum_buffer"], momenta[1][key]["momentum_buffer"]) for key in momenta[0]
        )


def check_samples(rows, plan):
    """Checks that each group made each step once, and that nobody trained on a missing group's share of an epoch."""
    for own in rows.values():
        steps = [row[0] for row in own]
        assert steps == sorted(set(steps))
    other = (plan["victim"] + 1) % plan["groups"]
    alone, epochs = {}, {}
    for _, participants, _, epoch, seen in rows[other]:
        alone[epoch] = alone.get(epoch, True) and participants < plan["groups"]
        epochs.setdefault(epoch, []).extend(index for indices in seen for index in indices)
    whole = [seen for epoch, seen in epochs.items() if alone[epoch]][:-1]
    assert all(len(seen) == len(set(seen)) == SIZE // plan["groups"] for seen in whole)


def check_weights(rows, ended, plan):
    torch.manual_seed(first_of(rows))
    module = torch.nn.Module()
    module.layers = network()
    first = {name.removeprefix("layers."): value for name, value in module.state_dict().items()}
    for name, value in replayed(rows, first, plan["accumulated"]).items():
        torch.testing.assert_close(ended[f"layers.{name}"], value, rtol=0, atol=1e-6)


def first_of(rows):
    """Returns the group that gave all groups their initial weights: the lowest of those that made the first step."""
    return min(rows, key=lambda group: (rows[group][0][0], group))


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
