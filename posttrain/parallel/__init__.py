"""Divides a model among processes (FSDP, tensor, context, expert parallelism); sends weights between them."""
