"""Runs libraries in separate processes (teams), finds peers, and writes the report pages."""
