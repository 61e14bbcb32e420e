"""Steps on disk: when, what, how, and back again."""
