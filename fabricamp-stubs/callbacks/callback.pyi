from fabricamp.callbacks.base import Callback as Callback
