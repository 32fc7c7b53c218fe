# Written by tools/write_aliases.py
"""Lightning's path to BitsandbytesPrecision."""

from fabricamp.lightning.packages.fabric.plugins.precision import BitsandbytesPrecision as BitsandbytesPrecision
