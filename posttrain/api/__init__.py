"""The public Python API. `posttrain` itself exports all of it; its modules load PyTorch only when a function runs."""
