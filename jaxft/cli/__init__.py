"""Commands for people who look after runs."""
