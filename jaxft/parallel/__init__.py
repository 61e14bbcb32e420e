"""Placement and processes: where arrays live."""
