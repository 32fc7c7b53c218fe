"""The memory of a training step, told before it runs: traced without values, and placed as torch's allocator would place it.

:func:`plan_memory` (``memory_plan.py``) runs the module's own step once on tensors without memory (``tracing.py``), replays what it
took and gave back in a model of the allocator (``allocator.py``), and compares with a card (``cards.py``).
"""

from __future__ import annotations

from fabricamp.engine.planning.memory_plan import MemoryPlan, plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
