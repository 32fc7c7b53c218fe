"""Reads this process's rank and world size from the launcher's environment variables (torchrun, SLURM, submitit, or none).

After :func:`detect` and the checks come the starters one by one; last, the request to SLURM to run this job again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from fabricamp._utils.first_rank import STARTED_BY
from fabricamp.errors import ConfigError
from fabricamp.launch.failures import report_uncaught
from fabricamp.launch.on_first import note_end_at_exit
from fabricamp.launch.start import end_with_starter
from fabricamp.strategies.base import Environment

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SUBMITIT = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_JOB_ID")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID")


def detect() -> Environment | None:
    """Returns this process's rank data if torchrun, SLURM, submitit or fabricamp started it; None for a plain process.

    Raises :class:`ConfigError` for contradicting variables.  Under srun it sets MASTER_ADDR and MASTER_PORT if they are missing.
    In a worker that fabricamp started by rerunning the script, it routes uncaught exceptions to the starter; under other starters
    an uncaught fabricamp error is shown with its message before its traceback.
    """
    started_by = os.environ.get(STARTED_BY)
    if started_by == "script":
        report_uncaught(to_the_starter=True)
        end_with_starter()
    environment = _from_variables(os.environ)
    if started_by == "script" and environment is not None and environment.rank == 0:
        note_end_at_exit()
    if environment is not None and started_by is None:
        report_uncaught(to_the_starter=False)
    return environment


def _from_variables(variables: Mapping[str, str]) -> Environment | None:
    # torchrun's come first: it may itself run in a SLURM job.
    if any(name in variables for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _torchrun(variables)
    if _under_srun(variables):
        return _slurm(variables)
    if variables.get("SUBMITIT_EXECUTOR") == "local" and variables.get("SUBMITIT_LOCAL_NTASKS", "1") != "1":
        return _submitits_local(variables)
    return None


def restarts() -> int:
    """Returns the number of worker restarts that torchrun's agent on this machine has counted."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def check_environment(environment: Environment | None, num_processes: int | None, num_nodes: int | None = None) -> None:
    """Raises :class:`ConfigError` if ``Trainer(devices=, num_nodes=)`` contradict what the starter started.

    ``num_processes``: processes per machine that ``devices`` asks for; None for "auto", which accepts any number.
    """
    if environment is None:
        if num_nodes is not None and num_nodes > 1:
            raise ConfigError(
                f"num_nodes={num_nodes}, but this run was not started on several machines, as torchrun and srun do: "
                f"run for example `torchrun --nnodes={num_nodes} --nproc_per_node={num_processes or 1} --rdzv_backend=c10d "
                f"--rdzv_endpoint=HOST:PORT train.py` on each; or use num_nodes=1"
            )
        return
    starter = environment.name
    if num_processes is not None and num_processes != environment.local_world_size:
        raise ConfigError(
            f"devices asks for {num_processes} process{'' if num_processes == 1 else 'es'} on each machine, but {starter} started "
            f"{environment.local_world_size} on this one, and each of them runs this script; write "
            f'devices={environment.local_world_size} or devices="auto", or start {num_processes} with {starter}. Trainers with '
            "different devices can share a script that starts its processes itself (python train.py)"
        )
    nodes = -(-environment.world_size // environment.local_world_size)
    if num_nodes is not None and num_nodes not in (1, nodes):
        raise ConfigError(
            f"num_nodes={num_nodes}, but {starter} runs {environment.world_size} processes on {nodes} machine(s); "
            f"use num_nodes={nodes}, or start on {num_nodes} machines"
        )


def _torchrun(variables: Mapping[str, str]) -> Environment:
    rank, local_rank, world_size, local_world_size = _numbers(variables, _TORCHRUN, "torchrun")
    node_rank = rank // local_world_size if local_world_size > 0 else 0
    if "GROUP_RANK" in variables:
        (node_rank,) = _numbers(variables, ("GROUP_RANK",), "torchrun")
    name = variables.get(STARTED_BY, "torchrun")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if world_size > 1 and missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing beside WORLD_SIZE={world_size}: start with torchrun, which sets them"
        )
    environment = Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        name=name,
    )
    _check_consistent(environment, variables, _TORCHRUN)
    return environment


def _under_srun(variables: Mapping[str, str]) -> bool:
    """Returns whether srun started this process together with others.

    The shell of an sbatch script or of salloc has the job's SLURM variables too (SLURM_PROCID=0 of SLURM_NTASKS=4 with no other
    task running): waiting for the other ranks there would hang forever.  Only a job step has a step id.
    """
    if "SLURM_PROCID" not in variables or variables.get("SLURM_NTASKS", "1") == "1":
        return False
    if variables.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return False
    in_step = "SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables
    return in_step or "SLURM_JOB_ID" not in variables


def _slurm(variables: Mapping[str, str]) -> Environment:
    rank, local_rank, world_size, node_rank = _numbers(variables, _SLURM, "srun")
    environment = Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_tasks_on_node(variables, node_rank, world_size),
        node_rank=node_rank,
        name="slurm",
    )
    _check_consistent(environment, variables, (*_SLURM, "SLURM_STEP_TASKS_PER_NODE"))
    nodes = (
        variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    )
    os.environ.setdefault("MASTER_ADDR", first_host(nodes) if nodes else "127.0.0.1")
    job = int(variables.get("SLURM_JOB_ID", 0)) + int(variables.get("SLURM_STEP_ID", 0))
    os.environ.setdefault("MASTER_PORT", str(_port_of(job)))
    return environment


def _submitits_local(variables: Mapping[str, str]) -> Environment:
    """Returns the rank data of a task of submitit's ``LocalExecutor`` on this machine; tasks of its SLURM jobs count as srun's."""
    rank, tasks, job = _numbers(variables, _SUBMITIT, "submitit")
    environment = Environment(rank=rank, local_rank=rank, world_size=tasks, local_world_size=tasks, name="submitit")
    _check_consistent(environment, variables, _SUBMITIT)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_port_of(job)))
    return environment


def _port_of(job: int) -> int:
    """Returns a port below Linux's ephemeral range, and different for neighbouring jobs on a shared machine."""
    return 12000 + job % 20000


def _tasks_on_node(variables: Mapping[str, str], node_rank: int, world_size: int) -> int:
    """Returns a node's number of tasks from SLURM's ``"2(x3),1"`` (two tasks on each of three machines, one on the fourth)."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    if text is None:
        nodes = int(variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or 1)
        return world_size // max(nodes, 1)
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text!r} cannot be read: expected a form such as '2(x3),1'")
        tasks += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node_rank < len(tasks):
        raise ConfigError(f"SLURM_NODEID={node_rank}, but SLURM_TASKS_PER_NODE={text!r} lists {len(tasks)} machine(s)")
    return tasks[node_rank]


def first_host(nodelist: str) -> str:
    """Returns the first machine of SLURM's short form: ``"gpu[003-007,9],login"`` gives ``"gpu003"``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else nodelist


def _numbers(variables: Mapping[str, str], names: tuple[str, ...], starter: str) -> list[int]:
    missing = [name for name in names if name not in variables]
    if missing:
        given = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise ConfigError(
            f"the environment has {given} but not {', '.join(missing)}; {starter} sets all of them: "
            f"start with {starter}, set the missing, or unset those for a run of one process"
        )
    try:
        return [int(variables[name]) for name in names]
    except ValueError:
        given = ", ".join(f"{name}={variables[name]!r}" for name in names)
        raise ConfigError(f"the environment has {given}, which have to be whole numbers") from None


def _check_consistent(environment: Environment, variables: Mapping[str, str], names: tuple[str, ...]) -> None:
    ranks_fit = environment.local_rank <= environment.rank < environment.world_size
    local_ranks_fit = 0 <= environment.local_rank < environment.local_world_size
    if ranks_fit and local_ranks_fit and environment.local_world_size <= environment.world_size:
        return
    given = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
    raise ConfigError(
        f"the environment contradicts itself: {given} (a rank has to be below its size, a local size not above the whole); "
        f"unset what an earlier run left behind, or start with torchrun"
    )


_REQUEUE_SECONDS = 60


def requeue_job() -> str:
    """Asks SLURM to requeue this job, and returns the result as text; empty outside a SLURM job."""
    variables = os.environ
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return ""
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        # Only this task of the array.
        job = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return f"job {job} is not requeued: there is no scontrol on the PATH"
    command = [scontrol, "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REQUEUE_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"job {job} is not requeued: scontrol did not answer within {_REQUEUE_SECONDS} s"
    if done.returncode:
        return f"job {job} is not requeued: {done.stderr.strip() or f'scontrol ended with exit code {done.returncode}'}"
    return f"job {job} is requeued"
