"""The Trainer's step in a loop of the user's own."""

from fabricamp.own_loop.loop import Loop

__all__ = ["Loop"]
