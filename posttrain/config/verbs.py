"""The verbs that are not algorithms, with one line of help each; an algorithm registers its own."""

PIPELINES = {
    "rejection-sampling": "generate, keep the best answer to each prompt, fine-tune on these; again and again",
    "iterative-dpo": "generate, set the best against the worst answer, DPO against the initial model; again and again",
    "conditional-sft": "fine-tune on answers whose prompts say what they are worth, then ask for good ones",
}

TOOLS = {
    "demo": "see it work: a toy model through SFT, reward model, DPO and GRPO on this machine in 3 minutes",
    "data": "check files before training, or tokenise them once: data check, data preprocess",
    "rewards": "judge saved answers and see why: rewards check",
    "generate": "answers of a model to the prompts of a file, several to each if wanted; goes on after a kill",
    "score": "rewards for a file of answers: verifiers, functions, services, reward models",
    "select": "rows to train on from scored answers: best of n, pairs, conditional prompts, the best of all",
    "eval": "how good a model is on prompts: accuracy, pass@k, intervals, its failures; or against another model",
    "chat": "talk to a model or a run, or to two side by side",
    "serve": "a model behind an OpenAI-compatible API, or a reward model behind /v1/score",
    "samples": "the answers that a run learnt from, with their rewards",
    "plan": "batches, steps and memory of a configuration, without loading the model",
    "slurm": "a script that trains a configuration on several machines of a Slurm cluster",
    "export": "a run's model as a plain Hugging Face folder, checked after writing",
    "convert": "weights between Hugging Face, Megatron core, Megatron legacy and our checkpoints, all accounted for",
    "inspect": "what a folder of weights holds: format, family, layout, parameters, types, tokenizer",
    "diff": "which tensors of two checkpoints differ and by how much, whatever their formats",
    "cluster": "a Ray cluster on this machine to try --cluster.ray_address on: cluster up, cluster down",
    "doctor": "what is installed, what is missing and how to mend it",
}
