"""Numbers and reports for people."""
