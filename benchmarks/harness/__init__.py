"""Runs libraries in separate processes (teams), finds the peers to compare with, and writes the report pages."""
