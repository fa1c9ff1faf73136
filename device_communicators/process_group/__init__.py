"""Communicators over torch's process groups: gloo, torch's NCCL, and torch's `fake` backend.

This package is allowed to import `routing` and the packages below `routing`.
"""
