"""Runs Lightning's objects in fabricamp's Trainer, and ``python -m fabricamp.lightning script.py``.  Never imports Lightning."""
