"""What the commands `fabricamp bench` and `fabricamp doctor` do; runs/ has those that look at runs."""
