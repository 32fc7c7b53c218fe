"""Watching over a run from beside it: any rank may ask to stop, and a rank that fails, hangs or is gone ends the run."""

from __future__ import annotations

from fabricamp.watchdog.signals import interrupts
from fabricamp.watchdog.stop import StopAgreement
from fabricamp.watchdog.watch import Watchdog

__all__ = ["StopAgreement", "Watchdog", "interrupts"]
