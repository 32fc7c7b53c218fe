"""Where this process stands among others, which devices it may use, and how further processes are started."""

from fabricamp.launch.devices import resolve_devices
from fabricamp.launch.environment import check_environment, detect
from fabricamp.launch.processes import run_function, run_script
from fabricamp.launch.recording import record_end, record_failure, record_others
from fabricamp.launch.slurm import requeue_job
from fabricamp.launch.start import choose_start_method, in_call, interactive, script_can_rerun

__all__ = [
    "check_environment",
    "choose_start_method",
    "detect",
    "in_call",
    "interactive",
    "record_end",
    "record_failure",
    "record_others",
    "requeue_job",
    "resolve_devices",
    "run_function",
    "run_script",
    "script_can_rerun",
]
