"""Where the time of a run went, over all its restarts."""
