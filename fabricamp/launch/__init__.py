"""The launcher: this process's rank (torchrun, SLURM), the devices that it may use, and the start of further processes."""

from fabricamp.launch.devices import resolve_devices as resolve_devices
from fabricamp.launch.environment import check_environment as check_environment
from fabricamp.launch.environment import detect as detect
from fabricamp.launch.environment import requeue_job as requeue_job
from fabricamp.launch.environment import restarts as restarts
from fabricamp.launch.failures import PEER_FAILURE_NOTE as PEER_FAILURE_NOTE
from fabricamp.launch.failures import exit_code_on_record as exit_code_on_record
from fabricamp.launch.failures import explained_without_traceback as explained_without_traceback
from fabricamp.launch.failures import record_end as record_end
from fabricamp.launch.failures import record_failure as record_failure
from fabricamp.launch.failures import record_others as record_others
from fabricamp.launch.on_first import call_on_first as call_on_first
from fabricamp.launch.on_first import is_on_first as is_on_first
from fabricamp.launch.on_first import runs_on_first as runs_on_first
from fabricamp.launch.processes import hold_logging_at_fork as hold_logging_at_fork
from fabricamp.launch.processes import run_function as run_function
from fabricamp.launch.processes import run_script as run_script
from fabricamp.launch.start import choose_start_method as choose_start_method
from fabricamp.launch.start import has_run as has_run
from fabricamp.launch.start import in_call as in_call
from fabricamp.launch.start import interactive as interactive
from fabricamp.launch.start import note_run as note_run
from fabricamp.launch.start import script_can_rerun as script_can_rerun
