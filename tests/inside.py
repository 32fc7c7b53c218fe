"""What tests read behind the public names of a Trainer: one function for each place, so that a new design changes one line."""

from __future__ import annotations


def runner(trainer):
    """Returns what the Trainer starts its runs with."""
    return trainer._runner


def session(trainer):
    """Returns the parts of the run that goes on, or of the last one."""
    return runner(trainer).session


def settings(trainer):
    """Returns the checked arguments of the Trainer."""
    return runner(trainer).settings


def graph_update(trainer):
    """Returns the update that captures steps as CUDA graphs; None if the run has none."""
    return session(trainer).graphs.update


def captured_steps(update):
    """Returns the captured steps of an update, by the form of their batch and their place in the accumulation."""
    return update.graphs.steps


def captured_groups(update):
    """Returns the captured launches of several steps; empty for an ``update`` that launches each step by itself, and for None."""
    return {} if update is None else update.graphs.groups


def captured_evaluations(trainer):
    """Returns the evaluations of the run whose steps are captured."""
    return session(trainer).graphs._evaluations.values()


def averaged_steps(callback):
    """Returns the number of steps in a callback's average of the weights."""
    return int(callback._averages.count)


def replaced_weights(callback):
    """Returns the weights that a callback has replaced by their average, by name."""
    return callback._raw
