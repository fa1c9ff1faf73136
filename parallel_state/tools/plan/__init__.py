"""`python -m parallel_state plan`: a layout before anything is started. `command` is the way in."""
