"""`python -m parallel_state check`: tests whether a job will work here, and how fast."""
