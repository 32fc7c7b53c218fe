"""The commands `fabricamp bench`, `doctor`, `export` and `help`; runs/ has those on runs: plot, list, verify."""
