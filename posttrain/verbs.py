"""The verbs and what they do, in a line each. Imports nothing, so that help is instant."""

TRAINERS = {
    "pretrain": "continue pretraining on plain text: loss on all tokens",
    "sft": "supervised fine-tuning on conversations: loss on the assistant's tokens",
    "reward": "a reward model from pairs of a better and a worse answer",
    "prm": "a process reward model from answers labelled step by step",
    "dpo": "direct preference optimisation: also IPO, cDPO, hinge and robust",
    "kto": "preference learning from single answers labelled good or bad",
    "simpo": "preference learning without a reference model, length-normalised",
    "orpo": "fine-tuning and preference learning in one, by odds ratio",
    "cpo": "contrastive preference optimisation, without a reference model",
    "distill": "learn a teacher's next-token distribution",
}

TOOLS = {
    "demo": "see it work: fine-tune, rank and align a toy model on this machine in 3 minutes",
    "data": "check files before training, or tokenise them once: data check, data preprocess",
    "plan": "batches, steps and memory of a configuration, without loading the model",
    "export": "a run's model as a plain Hugging Face folder, checked after writing",
    "doctor": "what is installed, what is missing and how to mend it",
}
