"""The commands `fabricamp bench` and `fabricamp doctor`; runs/ has the commands that look at runs."""
