"""Basics of both packages, parallel_state and device_communicators: errors, settings, limits, torch's private names."""
