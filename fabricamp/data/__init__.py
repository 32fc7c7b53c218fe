"""Data for the step: resumable samplers, loaders wired for the ranks, the prefetch to the device."""

from fabricamp.data.combined import CombinedLoader, combine, leaves_of, most_batches
from fabricamp.data.datamodule import DataModule
from fabricamp.data.feed import Feed
from fabricamp.data.length_groups import LengthGroups
from fabricamp.data.lengths import batch_sizes, check_equal_lengths, check_limit, limit_batches, loader_length
from fabricamp.data.loaders import (
    draw_a_pass,
    release_workers,
    set_epoch,
    set_sampler_epoch,
    try_loaders,
    wire_loader,
)
from fabricamp.data.resident import ResidentLoader, is_resident
from fabricamp.data.samplers import EvalSampler, TrainSampler
from fabricamp.data.sharding import Sharded, look_for_doubles
from fabricamp.data.transfer import move_to_device

__all__ = [
    "CombinedLoader",
    "DataModule",
    "EvalSampler",
    "Feed",
    "LengthGroups",
    "ResidentLoader",
    "Sharded",
    "TrainSampler",
    "batch_sizes",
    "check_equal_lengths",
    "check_limit",
    "combine",
    "draw_a_pass",
    "is_resident",
    "leaves_of",
    "limit_batches",
    "loader_length",
    "look_for_doubles",
    "most_batches",
    "move_to_device",
    "release_workers",
    "set_epoch",
    "set_sampler_epoch",
    "try_loaders",
    "wire_loader",
]
