"""How far predictions are from measured runs: reading them, scoring them, keeping a ledger."""
