"""How long a stage takes and how much it holds: the paper's model and the corrected default."""
