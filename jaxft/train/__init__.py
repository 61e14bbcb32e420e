"""State and the traced training step."""
