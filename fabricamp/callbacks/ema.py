"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from fabricamp.arguments.checks import check_number
from fabricamp.callbacks.weight_averaging import WeightAveraging, exponential


class EMA(WeightAveraging):
    """Keeps an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    The average covers the parameters that the optimizers update (fp32 masters at O2 and O5), in fp32, and running statistics;
    other buffers stay the module's.  The first update sets the average to the weights.  Validation, test and prediction run with
    the average, and the module has the average at the end of training.  A checkpoint has both: the average as ``state_dict``, the
    weights as ``current_model_state``.  If every step since the last update was skipped for overflow, the average is not updated.

    Args:
        decay: the share of the old average that each update keeps.
        every: number of steps between two updates.
        start: the first step that may update.
        use_buffers: the averaged buffers, as in :class:`WeightAveraging`.

    Raises:
        ConfigError: for wrong arguments, and with another callback that averages weights.

    Example:
        >>> ema = EMA(decay=0.9999, every=10, start=1000)
    """

    def __init__(
        self,
        decay: float = 0.999,
        every: int = 1,
        start: int = 0,
        use_buffers: bool | Sequence[str] | None = None,
    ) -> None:
        super().__init__(use_buffers=use_buffers)
        self._rule = exponential(self, decay)
        self.decay = decay
        self.every = check_number("every", every, owner="EMA", least=1)
        self.start = check_number("start", start, owner="EMA", least=0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Returns whether ``every`` divides the number of this step (from 1) and ``start`` is reached."""
        if step_idx is None:
            return False
        return step_idx + 1 >= self.start and (step_idx + 1) % self.every == 0
