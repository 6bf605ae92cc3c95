"""An environment of several short turns."""


class Again:
    """Asks up to three times, with few tokens; even completions of an untrained model get different rewards."""

    def start(self, row):
        self.turns = 0
        return row["messages"]

    def step(self, reply):
        self.turns += 1
        reward = sum(map(ord, reply)) % 5 / 10
        if self.turns == 3 or reward == 0.4:
            return None, reward
        return [{"role": "user", "content": str(self.turns)}], reward
