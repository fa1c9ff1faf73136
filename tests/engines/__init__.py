"""Tests with real engines and trainers: `make test-engines`."""
