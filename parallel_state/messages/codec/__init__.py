"""Encodes values of known types; limits what a peer's bytes may decode to."""
