"""Calls on tensors: argument checks, direct calls of C++, registered ops with gradients."""
