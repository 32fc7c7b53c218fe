"""What a program that was written for Lightning gets as in Lightning, where fabricamp's own behaviour differs on purpose.

A process has one set of habits: :data:`NATIVE`, or :data:`LIGHTNING` where Lightning's names are fabricamp's
(``python -m fabricamp.lightning``).  Each field is a row marked **L** of docs/from-lightning.md, and its docstring the beginning of
the row; fabricamp's own behaviour stands in the row's next column.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Final

from fabricamp._utils.first_rank import started_rank
from fabricamp._utils.say_once import say_once


@dataclass(frozen=True)
class Habits:
    """One field for each behaviour; True is Lightning's, but for ``says_differences``: Lightning logs no such lines."""

    says_differences: bool = False
    """a difference in a row marked **line**: there is none, so a line is logged in each run to which the row applies"""

    schedules_move_with_each_step: bool = False
    """schedules by steps if steps may be skipped (a dynamic loss scale, ``nan_policy``): move with the step"""

    schedules_count_batches: bool = False
    """scheduler ``frequency`` by steps: counts batches, and restarts in each epoch"""

    one_cycle_passes_its_end: bool = False
    """OneCycleLR after the last of its ``total_steps``: is moved once more: the rate rises to 0.0188 after 4e-7"""

    stop_validates: bool = False
    """``should_stop`` within an epoch: validates, and logs the last step's values"""

    private_names_are_lightnings: bool = False
    """a method under a private name of Lightning's that your class calls itself: overrides Lightning's: a ConfigError here"""

    trainer_by_private_name: bool = False
    """``module._trainer``, set to anything: is the module's Trainer"""

    outputs_are_shares: bool = False
    """``outputs`` of ``on_train_batch_end``: the loss divided by ``accumulate_grad_batches``; ``{}`` for None"""

    steps_may_train_nothing: bool = False
    """a ``training_step`` that never returns a value: runs, and trains nothing"""

    cut_epochs_count: bool = False
    """``current_epoch`` after ``max_steps``, ``min_steps`` or ``should_stop`` ended a run within an epoch: the next epoch"""

    results_are_of_the_epoch: bool = False
    """what ``validate`` and ``test`` return of a value by step: nothing; of one with ``on_epoch=True`` too, the mean"""

    unknown_indices_are_empty: bool = False
    """sample indices for a prediction writer that cannot be known, as of a stream: an empty list"""

    summaries_read_example_inputs: bool = False
    """a property ``example_input_array`` that draws: ``ModelSummary`` reads it three times, and what it draws counts"""

    first_checkpoint_callback_counts: bool = False
    """``trainer.checkpoint_callback``: the first ``Checkpoint`` of any kind"""

    loaders_end_at_their_last_batch: bool = False
    """a ``generator`` of a loader or a sampler, without workers: a pass ends at its last batch"""

    loaders_are_tried: bool = False
    """a loader that is no ``DataLoader``: ``iter()`` is called once more, before the first pass, and what it draws counts"""

    manual_steps_keep_the_first_rate: bool = False
    """``Tuner.lr_find`` with manual optimization: trains at the first rate, which it suggests"""

    state_key_without_filename: bool = False
    """``ModelCheckpoint.state_key``: has the cadence's three arguments"""

    best_models_are_shared: bool = False
    """a change in the dict ``best_k_models`` of ``ModelCheckpoint`` itself: is the callback's"""

    checkpoints_hold_objects: bool = False
    """objects in checkpoints, without ``checkpoint_objects``: are in the file"""

    files_have_lightnings_names: bool = False
    """classes of the package, among the objects in a checkpoint: have Lightning's names"""

    packages_add_callbacks: bool = False
    """callbacks of installed packages (entry points ``lightning.pytorch.callbacks_factory``): are added to each Trainer"""

    lightnings_seed_first: bool = False
    """``PL_GLOBAL_SEED``, set by the program after a ``seed_everything(1)``, in ``seed_everything()``: is the seed"""

    last_closure_call_counts: bool = False
    """values that the calls of a closure log (LBFGS, sharpness-aware), and ``outputs``: the value of the last call"""

    runs_are_in_lightning_logs: bool = False
    """the folder of runs, if you give file loggers no ``name``, and W&B's project, if none is given: ``lightning_logs``"""

    one_process_gathers_nothing: bool = False
    """``self.all_gather(x)`` in one process: ``x`` unchanged"""

    fp16_is_bf16_on_a_cpu: bool = False
    """``precision="16-mixed"`` on a CPU: is ``"bf16-mixed"``"""


NATIVE: Final = Habits()
LIGHTNING: Final = Habits(**{one.name: True for one in fields(Habits)})

_present = NATIVE


def habits() -> Habits:
    """Returns the habits of this process."""
    return _present


def take_up(new: Habits) -> None:
    """Makes ``new`` the habits of this process; called when the import hook for Lightning's names is installed."""
    global _present  # noqa: PLW0603 - a process has one import system
    _present = new


def say_difference(message: str) -> None:
    """Logs once, on rank 0 of a program written for Lightning, why its results differ from Lightning's."""
    if _present.says_differences and started_rank() == 0:
        say_once(f"{message} (fabricamp help from-lightning)", logging.INFO)
