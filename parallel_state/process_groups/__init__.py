"""torch's process groups: ranks agree before they create one; groups with equal ranks and options are shared."""
