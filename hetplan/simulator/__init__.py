"""A plan under traffic and a spot market: what is served, how late, at what cost."""
