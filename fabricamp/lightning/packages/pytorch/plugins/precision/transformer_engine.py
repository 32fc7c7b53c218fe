# Written by tools/write_aliases.py
"""Lightning's path to TransformerEnginePrecision."""

from fabricamp.lightning.packages.pytorch.plugins.precision import (
    TransformerEnginePrecision as TransformerEnginePrecision,
)
