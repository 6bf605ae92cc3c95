"""vLLM as an engine: started with the settings of a run, its weights replaced at every update."""
