"""The command `check`: tests whether a job will work."""
