"""Encodes values of known types, and limits what the bytes of a peer can decode to."""
