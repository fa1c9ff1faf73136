"""`python -m parallel_state plan`: shows a layout without starting ranks."""
