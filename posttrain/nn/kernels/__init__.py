"""The operations of fused layers, in PyTorch (`reference`), Triton (`triton`) and without storage (`meta`)."""
