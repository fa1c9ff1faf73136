"""The command `plan`: shows a layout."""
