"""Checks before a run's first batch: the source of module and callbacks, sharding, monitored names."""
