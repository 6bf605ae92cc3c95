"""Operations of a decode step, in PyTorch (`reference`) and Triton (`triton`)."""
