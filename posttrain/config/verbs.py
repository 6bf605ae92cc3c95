"""The verbs that are not algorithms, with one line of help each; an algorithm registers its own."""

PIPELINES = {
    "rejection-sampling": "generate completions, fine-tune on the best one of each prompt, repeat",
    "iterative-dpo": "generate completions, train by DPO on the best against the worst one of each prompt, repeat",
    "conditional-sft": "fine-tune on completions whose rewards are written into the prompts, then ask for high rewards",
}

TOOLS = {
    "demo": "train a toy model with SFT, a reward model, DPO and GRPO on this machine in 3 minutes",
    "data": "check, mix, split or tokenize files before training: data check, data mix, data split, data preprocess",
    "rewards": "score saved completions: rewards check; list the verifiers: rewards list; measure them: rewards audit",
    "generate": "generate completions for the prompts of a file, one or several per prompt; resumes after a kill",
    "score": "add rewards to a file of completions: by verifiers, functions, services or reward models",
    "select": "select training examples from scored completions: best of n, pairs, conditional prompts, a threshold",
    "eval": "evaluate a model on prompts: accuracy, pass@k, confidence intervals, failures; or compare two models",
    "chat": "chat with a model or a run, or with two side by side",
    "serve": "serve a model over an OpenAI-compatible API, or a reward model at /v1/score",
    "import": "write a file or command of TRL, verl, OpenRLHF, LLaMA-Factory, axolotl ... as a configuration",
    "run": "start a file or command of another library as it is: import, then the verb",
    "samples": "show the completions that a run was trained on, with their rewards",
    "board": "show runs on a local web page: state, curves, completions with their tokens, settings, logs",
    "plot": "draw curves of one or several runs: in the terminal, as SVG or PNG, or as one HTML page",
    "plan": "print batches, steps and memory of a configuration, without loading the model",
    "slurm": "print a script that trains a configuration on several machines of a Slurm cluster",
    "export": "write a run's model as a Hugging Face directory, GGUF, FP8, AWQ or GPTQ, and verify it",
    "merge": "merge several models or adapters into one: linear, SLERP, TIES, DARE",
    "convert": "convert weights between Hugging Face, Megatron core, Megatron legacy and checkpoints of posttrain",
    "inspect": "describe a directory of weights: format, model family, layout, parameters, types, tokenizer",
    "diff": "list the tensors that differ between two checkpoints, in any formats, and by how much",
    "cluster": "run a Ray cluster on this machine, to try --cluster.ray_address: cluster up, cluster down",
    "doctor": "check what is installed, what is missing and how to fix it",
}
