"""Start-up of a world: environment variables, network interfaces, rendezvous, core binding."""
