"""Small data files of every kind, for trainers run on pico."""

import json

ROWS = {
    "text": [{"text": f"the sum of {a} and {a} is {2 * a}."} for a in range(7)],
    "chat": [
        {"messages": [{"role": "user", "content": f"{a}+{a}="}, {"role": "assistant", "content": f"{2 * a}"}]}
        for a in range(7)
    ],
    "pair": [
        {"prompt": f"{a}+{a}=", "chosen": f"{2 * a}", "rejected": f"{3 * a + 1} or so", "margin": a / 7}
        for a in range(7)
    ],
    "labelled": [{"prompt": f"{a}+{a}=", "completion": f"{2 * a + a % 2}", "label": a % 2 == 0} for a in range(7)],
    "stepwise": [
        {"prompt": f"{a}*3?", "completions": [f"{a}+{a}={2 * a}", f"so {3 * a + a % 2}"], "labels": [1, 1 - a % 2]}
        for a in range(7)
    ],
    "prompt": [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(7)],
}

# A reward that random bytes already differ in.
JUDGE = """
def score(text, answer):
    return sum(ord(letter) % 7 for letter in text) / 20 + (answer in text)
"""


def write_judge(folder):
    file = folder / "judge.py"
    file.write_text(JUDGE, encoding="utf-8")
    return f"{file}:score"


def write_rows(kind, folder):
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]), encoding="utf-8")
    return str(file)
