"""Rows, global order, prefetch and position."""
