# Written by tools/write_aliases.py
"""Lightning 1's path to the functions that open paths and URLs."""

from fabricamp.lightning.packages.fabric.utilities.cloud_io import _is_dir as _is_dir
from fabricamp.lightning.packages.fabric.utilities.cloud_io import _is_local_file_protocol as _is_local_file_protocol
from fabricamp.lightning.packages.fabric.utilities.cloud_io import _load as _load
from fabricamp.lightning.packages.fabric.utilities.cloud_io import get_filesystem as get_filesystem
