"""The version of Lightning whose names and arguments the alias has."""

version = "2.6.6"
