"""Requeues a SLURM job that SLURM is about to end."""

from __future__ import annotations

import os
import shutil
import subprocess

_SECONDS = 60


def requeue_job() -> str:
    """Asks SLURM to requeue this job, and returns the result as text; empty outside a SLURM job."""
    variables = os.environ
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return ""
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        job = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    command = shutil.which("scontrol")
    if command is None:
        return f"job {job} is not requeued: there is no scontrol on the PATH"
    words = [command, "requeue", job]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"job {job} is not requeued: scontrol did not answer within {_SECONDS} s"
    if done.returncode:
        return f"job {job} is not requeued: {done.stderr.strip() or f'scontrol ended with exit code {done.returncode}'}"
    return f"job {job} is requeued"
