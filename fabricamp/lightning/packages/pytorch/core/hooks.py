# Written by tools/write_aliases.py
"""Lightning's paths to the hooks of a module."""

from fabricamp.hooks import ModuleHooks as CheckpointHooks
from fabricamp.hooks import ModuleHooks as DataHooks
from fabricamp.hooks import ModuleHooks as ModelHooks

__all__ = ["CheckpointHooks", "DataHooks", "ModelHooks"]
