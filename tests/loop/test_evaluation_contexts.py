"""An interruption at any point of an evaluation leaves torch's state unchanged."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.small import Classifier, loader, quiet_trainer


class BehindNoGrad:
    """A trace function that interrupts at the first call after ``no_grad.__enter__``."""

    def __init__(self):
        self.entered = self.raised = False

    def __call__(self, frame, event, _):
        if event == "return":
            self.entered = True
        elif event == "call" and self.entered and not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        inside = frame.f_code.co_name == "__enter__" and isinstance(frame.f_locals.get("self"), torch.no_grad)
        return self if inside else None


def test_an_interruption_right_behind_the_entry_of_a_context():
    trainer, trace = quiet_trainer(max_epochs=1), BehindNoGrad()
    module = Classifier()
    module.on_validation_model_eval = lambda: sys.settrace(trace)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.fit(module, loader(), loader())
    finally:
        sys.settrace(None)
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    assert trace.raised
    assert enabled
