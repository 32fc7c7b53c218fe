"""Machines that join and leave, simulated by torch's elastic agents on this machine: the run continues with the remaining ones."""

from __future__ import annotations

import collections
import os
import pickle
import signal
import time
from datetime import UTC, datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader

from fabricamp.callbacks import ModelCheckpoint
from tests.distributed.ranks import run_ranks
from tests.distributed.scripts import end, finish, start, wait_for_line
from tests.distributed.test_world_change import InOneProcess
from tests.small import Classifier, quiet_trainer
from tests.trainer.test_exact_resume import Samples

FORK = torch.multiprocessing.get_context("fork")
SIZE, BATCH, EPOCHS = 64, 4, 2
STEP = 16
RUN = "elastic"
BY_EVENTS = {
    "is_host": False,  # the test hosts the store
    "join_timeout": 250,
    "last_call_timeout": 1,  # only the remaining agent waits for it; wait_for_agent avoids it at the start
    # A slow agent is never removed; forget_agent removes a lost one.
    "keep_alive_interval": 10,
    "keep_alive_max_attempt": 1000,
}
"""Options of a rendezvous in which no agent decides by a clock, so slow agents change nothing."""


class Net(Classifier):
    """One rank is killed in its seventh step together with its agent, as if its machine was lost."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def training_step(self, batch, batch_idx):
        if "IS_LOST" in os.environ and self.global_step == 6:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / f"seen-{self.trainer.world_size}-{self.global_rank}").open("a") as file:
            for index in batch[2].tolist():
                file.write(f"{self.global_step} {index}\n")
        return super().training_step(batch[:2], batch_idx)


def work(folder, strategy, kind=Net, epochs=EPOCHS):
    """Runs the training of a worker; the same at every start."""
    torch.set_num_threads(1)
    trainer = quiet_trainer(
        devices="auto",
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        on_world_change="keep_global_batch",
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1)],
    )
    module = kind(folder)
    trainer.fit(module, DataLoader(Samples(SIZE), BATCH, shuffle=True), ckpt_path="auto")
    if trainer.is_global_zero:
        torch.save((trainer.global_step, trainer.world_size, module.state_dict()), folder / "end")


def start_agents(folder, strategy, port):
    """Starts an agent as torchrun does, in each of two processes; both have joined before the first worker starts."""
    first = os.environ["RANK"] == "0"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if first:
        wait_for_agent(port)
    else:
        os.environ["IS_LOST"] = "1"
    config = LaunchConfig(
        min_nodes=1 if first else 2,
        max_nodes=2,
        nproc_per_node=1,
        run_id=RUN,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs=BY_EVENTS,
        local_addr="127.0.0.1" if first else "127.0.0.2",
        max_restarts=2,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, work)(folder, strategy)


def agents_store():
    """Returns the store of the agents' rendezvous, hosted by the test's process, which outlives all agents."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def backend_at(port):
    return C10dRendezvousBackend(dist.TCPStore("127.0.0.1", port, wait_for_workers=False), RUN)


def wait_for_agent(port):
    """Returns once the other agent has joined; it has ``min_nodes=2`` and waits for this one.

    This agent has ``min_nodes=1``: if it joined first, it would wait for the other only for a fixed time, and then begin alone.
    """
    backend = backend_at(port)
    deadline = time.monotonic() + 200
    while backend.get_state() is None:
        assert time.monotonic() < deadline, "the other agent does not come"
        time.sleep(0.02)


def forget_agent(port, pid):
    """Sets the last heartbeat of a lost agent far into the past, so the others remove it at once and not after minutes."""
    backend = backend_at(port)
    written = False
    while not written:  # another agent may write its heartbeat in between
        state, token = backend.get_state()
        state = pickle.loads(state)
        (lost,) = [node for node in state.last_heartbeats if node.pid == pid]
        state.last_heartbeats[lost] = datetime.min.replace(tzinfo=UTC)
        _, _, written = backend.set_state(pickle.dumps(state), token)


def agent(folder, strategy, port):
    """Runs an agent in a separate process, because the second one is killed and ``run_ranks`` expects its ranks to end normally."""
    process = FORK.Process(target=start_agents, args=(folder, strategy, port))
    process.start()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        forget_agent(port, process.pid)
    return process.exitcode


def test_a_machine_that_is_lost_in_the_middle_of_a_run(tmp_path):
    """The remaining machine continues alone with the same samples per step; no sample is missed or trained on twice."""
    check_the_rest(tmp_path, "ddp")


def check_the_rest(folder, strategy):
    store = agents_store()
    codes = run_ranks(agent, 2, folder, strategy, store.port, backend=None, timeout=250.0)
    assert codes == [0, -signal.SIGKILL]
    steps, world, state = torch.load(folder / "end", weights_only=True)
    assert (steps, world) == (EPOCHS * SIZE // STEP, 1)
    (folder / "straight").mkdir()
    straight, module = quiet_trainer(max_epochs=EPOCHS), Net(folder / "straight")
    straight.fit(module, DataLoader(Samples(SIZE), STEP, sampler=InOneProcess(SIZE)))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    done = {world: samples_of(folder, world) for world in (1, 2)}
    began = min(done[1])
    assert began > 3
    for step in range(steps):
        order = InOneProcess(SIZE, step // 4)
        assert sorted(done[1 if step >= began else 2][step]) == sorted([*order][step % 4 * STEP :][:STEP]), step


def samples_of(folder, world):
    """Returns the samples of each step that ``world`` ranks made."""
    found = collections.defaultdict(list)
    for file in folder.glob(f"seen-{world}-*"):
        for line in file.read_text().splitlines():
            step, index = map(int, line.split())
            found[step].append(index)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["delayed_ddp", "fsdp"])
def test_a_machine_that_is_lost_under_other_strategies(strategy, tmp_path):
    check_the_rest(tmp_path, strategy)


SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.distributed.test_elastic import Net, work

class Waits(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if Path("enough").exists():
            self.trainer.should_stop = True

work(Path.cwd(), sys.argv[1], Waits, epochs=-1)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_on_a_machine_that_goes_and_one_that_comes(strategy, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    store, agents = agents_store(), []
    # If agents share their store with workers, no agent can join later: torch 2.13 writes the store's address only once.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "RES_OPTIONS": "attempts:0", "GLOO_SOCKET_IFNAME": "lo"}

    def torchrun(number, nodes="1:2"):
        options = {
            "nnodes": nodes,
            "nproc-per-node": 1,
            "max-restarts": 5,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"127.0.0.1:{store.port}",
            "rdzv-id": RUN,
            "local-addr": f"127.0.0.{number}",
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in BY_EVENTS.items()),
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        agents.append(start(tmp_path, "-m", "torch.distributed.run", *words, "train.py", strategy, **variables))

    try:
        torchrun(2, nodes="2:2")
        wait_for_agent(store.port)
        torchrun(1)
        lost, stays = agents
        wait_for_line(tmp_path / "seen-2-0", 60, 150.0, stays)
        end(lost)
        forget_agent(store.port, lost.pid)
        wait_for_line(tmp_path / "seen-1-0", 60, 150.0, stays)
        before = len((tmp_path / "seen-2-0").read_text().splitlines())
        torchrun(2)
        wait_for_line(tmp_path / "seen-2-0", before + 60, 150.0, stays)
        (tmp_path / "enough").touch()
        results = [finish(agent) for agent in agents[1:]]
    finally:
        for agent in agents:
            end(agent)
    assert [code for code, _, _ in results] == [0, 0], results
    steps, world, _ = torch.load(tmp_path / "end", weights_only=True)
    assert world == 2
    done = {world: samples_of(tmp_path, world) for world in (1, 2)}
    assert set(done[1]) | set(done[2]) == set(range(steps))
    joined = max(done[1]) + 1
    for step in (min(done[1]), *range(joined, steps)):  # the next attempt repeats a step that was begun
        order = [*InOneProcess(SIZE, step // 4)][step % 4 * STEP :][:STEP]
        assert sorted(done[1 if step < joined else 2][step]) == sorted(order), step
