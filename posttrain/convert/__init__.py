"""Weights from one layout to another: Hugging Face, Megatron core, Megatron legacy, our own checkpoints."""
