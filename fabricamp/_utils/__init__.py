"""Helpers of the package itself, below everything else; Lightning's helpers for users are in ``utilities``."""
