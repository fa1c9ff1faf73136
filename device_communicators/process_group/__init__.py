"""Communicators over torch's process groups: gloo, torch's NCCL, and torch's `fake` backend."""
