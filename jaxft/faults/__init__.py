"""How failures and stop requests are seen."""
