# Written by tools/write_aliases.py
"""The package of Lightning's connectors; fabricamp's Trainer has their values as its own attributes."""
