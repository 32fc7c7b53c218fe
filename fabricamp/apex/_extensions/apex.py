"""What ``import apex`` finds in a spawned process, whose path has this folder: it puts fabricamp.apex in its own place."""

from fabricamp.apex.install import install

install()
