"""Convert weights between layouts: Hugging Face, Megatron core, Megatron legacy, and checkpoints of posttrain."""
