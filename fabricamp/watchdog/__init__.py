"""The watchdog: a second thread with heartbeats; any rank may ask to stop, and a rank that fails, hangs or dies ends the run."""

from fabricamp.watchdog.leaving import end_by_sigint_at_exit, leave_at_exit
from fabricamp.watchdog.requests import LoopRequests
from fabricamp.watchdog.signals import exit_code, hand_on, ignore_at_exit, interrupts
from fabricamp.watchdog.stop import StopAgreement
from fabricamp.watchdog.watch import Watchdog

__all__ = [
    "LoopRequests",
    "StopAgreement",
    "Watchdog",
    "end_by_sigint_at_exit",
    "exit_code",
    "hand_on",
    "ignore_at_exit",
    "interrupts",
    "leave_at_exit",
]
