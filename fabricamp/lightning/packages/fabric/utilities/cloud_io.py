"""Opens paths and URLs through fsspec."""

from __future__ import annotations

from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol


def get_filesystem(path: Any, **kwargs: Any) -> Any:
    """Returns fsspec's file system of a path or URL."""
    return url_to_fs(str(path), **kwargs)[0]


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Returns the result of ``torch.load`` for a path, a URL or an open file; loads objects only with ``weights_only=False``."""
    weights_only = weights_only is not False  # torch.load(weights_only=None) follows an environment variable
    if hasattr(path_or_url, "read"):
        return torch.load(path_or_url, map_location=map_location, weights_only=weights_only)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=weights_only)


def _is_dir(fs: Any, path: Any, strict: bool = False) -> bool:
    """Returns whether ``path`` is a folder."""
    there: bool = fs.isdir(str(path))
    return there


def _is_local_file_protocol(path: Any) -> bool:
    protocol: str = get_protocol(str(path))
    return protocol == "file"
