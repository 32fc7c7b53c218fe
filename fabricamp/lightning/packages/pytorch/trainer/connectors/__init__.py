# Written by tools/write_aliases.py
"""The package of Lightning's connectors; what they hold is an attribute of the Trainer here."""
