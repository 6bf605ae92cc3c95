"""Child processes with limits: one supervisor for reward functions, environments and programs that a model wrote."""
