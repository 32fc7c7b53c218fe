"""The module that ``import apex`` finds in a spawned process, through this folder on its path; it installs fabricamp.apex."""

from fabricamp.apex.install import install

install()
