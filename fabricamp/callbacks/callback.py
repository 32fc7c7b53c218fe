"""Lightning's path to the base of callbacks."""

from fabricamp.callbacks.base import Callback as Callback
