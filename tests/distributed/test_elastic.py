"""Machines that come and go, under torch's elastic agents on this one: the run goes on with those that are there."""

from __future__ import annotations

import collections
import os
import signal
import socket

import pytest
import torch
import torch.multiprocessing
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


class Net(Classifier):
    """One rank is killed in its seventh step with the agent that started it: all that a lost machine leaves."""

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
    """What a worker runs; the same at every start."""
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


def start_agents(folder, strategy, port, all_here):
    """An agent in each of two processes, as torchrun makes it; they begin at once, or one would not wait for the other."""
    first = os.environ["RANK"] == "0"
    if not first:  # the first one has the store that agents meet at
        os.environ["IS_LOST"] = "1"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    rendezvous = {
        "is_host": first,
        "join_timeout": 60,
        "last_call_timeout": 10,  # on a busy machine the second agent was seen to begin 5 s behind the first
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 3,
    }
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs=rendezvous,
        local_addr="127.0.0.1",
        max_restarts=2,
        monitor_interval=0.1,
        start_method="fork",
    )
    all_here.wait(60)
    elastic_launch(config, work)(folder, strategy)


def agent(*args):
    """The second agent is killed: it runs in a process of its own, so that ``run_ranks`` finds a good end."""
    process = FORK.Process(target=start_agents, args=args)
    process.start()
    process.join()
    return process.exitcode


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_machine_that_is_lost_in_the_middle_of_a_run(tmp_path):
    """The other one goes on by itself, with steps of as many samples, and none of them is missed or trained on twice."""
    check_the_rest(tmp_path, "ddp")


def check_the_rest(folder, strategy):
    codes = run_ranks(agent, 2, folder, strategy, free_port(), FORK.Barrier(2), backend=None, timeout=120.0)
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
    """The samples of each step that so many ranks made."""
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
    port, agents = free_port(), []
    # Agents that share a store let nobody join later: torch 2.13 writes its address once.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "RES_OPTIONS": "attempts:0", "GLOO_SOCKET_IFNAME": "lo"}

    def torchrun():
        # With fewer beats an agent that is late is off the list, and who joins then begins a run beside its.
        rendezvous = {
            "is_host": not agents,
            "last_call_timeout": 5,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
        }
        options = {
            "nnodes": "1:2",
            "nproc-per-node": 1,
            "max-restarts": 5,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"127.0.0.1:{port}",
            "rdzv-id": "elastic",
            "local-addr": "127.0.0.1",
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in rendezvous.items()),
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        agents.append(start(tmp_path, "-m", "torch.distributed.run", *words, "train.py", strategy, **variables))

    try:
        torchrun()
        torchrun()
        wait_for_line(tmp_path / "seen-2-0", 60, 150.0, agents[0])
        end(agents[1])
        wait_for_line(tmp_path / "seen-1-0", 60, 150.0, agents[0])
        before = len((tmp_path / "seen-2-0").read_text().splitlines())
        torchrun()
        wait_for_line(tmp_path / "seen-2-0", before + 60, 150.0, agents[0])
        (tmp_path / "enough").touch()
        results = [finish(agents[0]), finish(agents[2])]
    finally:
        for agent in agents:
            end(agent)
    assert [code for code, _, _ in results] == [0, 0], results
    steps, world, _ = torch.load(tmp_path / "end", weights_only=True)
    assert world == 2
    done = {world: samples_of(tmp_path, world) for world in (1, 2)}
    assert set(done[1]) | set(done[2]) == set(range(steps))
    joined = max(done[1]) + 1
    for step in (min(done[1]), *range(joined, steps)):  # what an attempt had begun is done again by the next one
        order = [*InOneProcess(SIZE, step // 4)][step % 4 * STEP :][:STEP]
        assert sorted(done[1 if step < joined else 2][step]) == sorted(order), step
