"""Runs each compared library in its own processes (a team), finds installed libraries, and writes the report pages."""
