"""The control plane: exits of ranks, agreements among ranks, questions to a rank. docs/protocol.md describes it."""
