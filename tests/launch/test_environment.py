"""Rank and world size from the variables of torchrun and SLURM, and refused combinations."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabricamp.errors import ConfigError
from fabricamp.launch import check_environment, detect
from fabricamp.launch.environment import first_host
from fabricamp.strategies.base import Environment

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_NODEID": "3",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_NODELIST": "gpu[003-005,9]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.fixture
def variables(monkeypatch):
    """Returns a function that sets exactly the given variables of the starters."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("SLURM_", "FABRICAMP_", "SUBMITIT_")):
            monkeypatch.delenv(name)

    def set_all(values):
        # monkeypatch knows these names, so the test's end also removes values that detect() sets.
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in values.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_all


def test_plain_process(variables):
    variables({"MASTER_ADDR": "left", "MASTER_PORT": "1"})
    assert detect() is None


def test_torchrun(variables):
    variables(TORCHRUN)
    assert detect() == Environment(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1, name="torchrun")


def test_torchrun_without_group_rank_counts_machines(variables):
    variables(TORCHRUN | {"GROUP_RANK": None})
    assert detect().node_rank == 1


def test_own_workers_are_named(variables):
    variables(TORCHRUN | {"FABRICAMP_STARTED_BY": "spawn"})
    assert detect().name == "spawn"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"LOCAL_RANK": None}, "LOCAL_RANK"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"RANK": None}, "RANK"),
        ({"RANK": "8"}, "RANK=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"RANK": "0"}, "RANK=0"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
    ],
)
def test_contradictions_are_named(variables, change, named):
    variables(TORCHRUN | change)
    with pytest.raises(ConfigError, match=named):
        detect()


def test_submitits_tasks_on_this_machine(variables):
    tasks = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_ID": "77"}
    variables(tasks | {"SUBMITIT_LOCAL_GLOBALID": "1"})
    assert detect() == Environment(rank=1, local_rank=1, world_size=2, local_world_size=2, name="submitit")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", "12077")
    variables(tasks | {"SUBMITIT_LOCAL_NTASKS": "1"})
    assert detect() is None
    variables(tasks | {"SUBMITIT_LOCAL_GLOBALID": "2"})
    with pytest.raises(ConfigError, match="SUBMITIT_LOCAL_GLOBALID=2"):
        detect()


def test_srun(variables):
    variables(SLURM)
    assert detect() == Environment(rank=6, local_rank=0, world_size=7, local_world_size=1, node_rank=3, name="slurm")
    assert os.environ["MASTER_ADDR"] == "gpu003"
    assert 1024 < int(os.environ["MASTER_PORT"]) < 32768


def test_srun_keeps_a_given_address(variables):
    variables(SLURM | {"MASTER_ADDR": "here", "MASTER_PORT": "5"})
    detect()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("here", "5")


def test_steps_of_one_job_get_different_ports(variables):
    ports = set()
    for step in ("0", "1"):
        variables(SLURM | {"SLURM_STEP_ID": step})
        detect()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 2


def test_torchrun_inside_slurm_is_torchrun(variables):
    variables(SLURM | TORCHRUN)
    assert detect().name == "torchrun"


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": None},
        {"SLURM_JOB_NAME": "bash"},
        {"SLURM_JOB_NAME": "interactive"},
        {"SLURM_STEP_ID": None},  # the shell of an sbatch script
        {"SLURM_PROCID": None},
    ],
)
def test_a_shell_within_slurm_is_a_plain_process(variables, change):
    variables(SLURM | change)
    assert detect() is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID"),
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID=4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2 each"}, "SLURM_TASKS_PER_NODE"),
    ],
)
def test_slurm_contradictions_are_named(variables, change, named):
    variables(SLURM | change)
    with pytest.raises(ConfigError, match=named):
        detect()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[003-007,9],login", "gpu003"),
        ("gpu[9,003-007]", "gpu9"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("node-a.example,node-b", "node-a.example"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@given(
    prefix=st.from_regex(r"[a-z]{1,5}-?", fullmatch=True),
    start=st.integers(0, 50),
    more=st.integers(0, 50),
    width=st.integers(1, 4),
)
def test_first_host_of_a_range(prefix, start, more, width):
    assert (
        first_host(f"{prefix}[{start:0{width}d}-{start + more:0{width}d}],other[1-2]") == f"{prefix}{start:0{width}d}"
    )


def test_what_the_trainer_asks_for_has_to_fit():
    environment = Environment(world_size=8, local_world_size=4, name="torchrun")
    check_environment(environment, 4, 2)
    check_environment(environment, None, None)
    check_environment(environment, None, 1)
    check_environment(None, 3, 1)
    with pytest.raises(ConfigError, match=r"devices asks for 2 .* torchrun started 4"):
        check_environment(environment, 2, 2)
    with pytest.raises(ConfigError, match=r"num_nodes=3, .* on 2 machine"):
        check_environment(environment, 4, 3)
    with pytest.raises(ConfigError, match=r"num_nodes=2, .*torchrun --nnodes=2 --nproc_per_node=4"):
        check_environment(None, 4, 2)
