"""The forward pass with its layers, attention, language-model head, optimizer and CUDA graphs of training."""
