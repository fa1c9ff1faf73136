"""Real engines and trainers over this library; `make test-engines`, not a part of `make test`."""
