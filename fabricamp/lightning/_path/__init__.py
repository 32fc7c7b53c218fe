"""A folder for ``sys.path``: its modules have Lightning's names."""
