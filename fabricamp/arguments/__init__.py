"""Checks of arguments, and hints for arguments under other names."""
