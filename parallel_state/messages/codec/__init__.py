"""Encodes values of known and registered types, and limits what a peer's bytes may decode to."""
