"""The keys that Lightning needs to load a fabricamp checkpoint: its version, and its loops' counters."""

from __future__ import annotations

from typing import Any

VERSION = "pytorch-lightning_version"
"""The key by which Lightning recognises a checkpoint."""

_LAYOUT = "2.6.0"
"""The Lightning version whose layout the counters follow."""


def lightning_keys(
    *, epochs: int, batches: int, batches_in_all: int, steps: int, automatic: bool, ended: bool, ending: bool
) -> dict[str, Any]:
    """Returns dotted keys and values for finished ``epochs``, ``batches`` of the next epoch, and ``steps``.

    ``ended``: the file is from the end of an epoch, and not from before or after training.  ``ending``: it is from between an
    epoch's last batch and the epoch's end.  The last batch then counts as not completed, and Lightning resumes with the next epoch.
    """
    none = _progress(0)
    idle = {"state_dict": {}, "batch_progress": {"total": none, "current": none, "is_last_batch": False}}
    begun = _progress(epochs, ready=epochs + (batches > 0))
    optimizer = {
        "step": {"total": _counts(steps * automatic), "current": _counts(0)},
        "zero_grad": {"total": _started(steps * automatic), "current": _started(0)},
    }
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps - ending},
        "epoch_loop.batch_progress": {
            "total": {**_progress(batches_in_all), "completed": batches_in_all - ending},
            "current": {**_progress(batches), "completed": batches - ending},
            "is_last_batch": ended or ending,
        },
        "epoch_loop.scheduler_progress": {"total": _counts(0), "current": _counts(0)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {
            "total": _counts(steps * (not automatic)),
            "current": _counts(0),
        },
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": idle["batch_progress"],
        "epoch_progress": {"total": begun, "current": begun},
    }
    return {
        VERSION: _LAYOUT,
        "loops.fit_loop": fit,
        "loops.validate_loop": idle,
        "loops.test_loop": idle,
        "loops.predict_loop": {"state_dict": {}, "batch_progress": {"total": none, "current": none}},
    }


def _progress(done: int, ready: int | None = None) -> dict[str, int]:
    ready = done if ready is None else ready
    return {"ready": ready, "started": ready, "processed": done, "completed": done}


def _counts(done: int) -> dict[str, int]:
    return {"ready": done, "completed": done}


def _started(done: int) -> dict[str, int]:
    return {**_counts(done), "started": done}
