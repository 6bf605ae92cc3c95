"""Runs the roles of a run in worker processes: pools, messages, transports, placement on devices."""
