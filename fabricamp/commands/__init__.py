"""The commands `fabricamp bench`, `doctor` and `export`; runs/ has the commands that read the logs of runs."""
