"""Which blocks of the KV cache are free, which tokens the others hold, and how many sequences use each of them.

Knows nothing of tensors. A block whose tokens are known by the hash of all tokens up to its end can serve any later
sequence that begins with the same tokens, until the block is needed for others or the weights change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from posttrain.core.types import Ints

UNUSED_BLOCK = 0
"""Never allocated: rows of a decode step that have no sequence read and write it."""


class BlockPool:
    """Hands out blocks of `size` positions. A block that several sequences share is free when all have released it."""

    def __init__(self, count: int, size: int) -> None:
        """`count`: blocks that can be allocated; they are numbered from 1."""
        self.count, self.size = count, size
        self.references: list[int] = []
        self.free: list[int] = []
        self.block_of: dict[bytes, int] = {}  # hash of all tokens up to the end of a block -> the block
        self.hash_of: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}  # known blocks that no sequence uses, least recently used first
        self.reset()

    def reset(self) -> None:
        """End all uses of blocks, whose sequences are gone; known blocks remain known."""
        self.references = [0] * (self.count + 1)
        self.idle |= dict.fromkeys(self.hash_of)
        # The most recently released block is used first: memory that was never used stays untouched.
        self.free = [block for block in range(self.count, 0, -1) if block not in self.hash_of]

    def forget(self) -> None:
        """Know no tokens any more, because the weights have changed."""
        self.free.extend(self.idle)
        self.idle, self.block_of, self.hash_of = {}, {}, {}

    @property
    def available(self) -> int:
        """How many blocks can be allocated now."""
        return len(self.free) + len(self.idle)

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks for one sequence; the caller has checked that they are available."""
        assert count <= self.available, f"{count} blocks of {self.available}"
        while len(self.free) < count:
            oldest = next(iter(self.idle))
            del self.idle[oldest], self.block_of[self.hash_of.pop(oldest)]
            self.free.append(oldest)
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Let another sequence use blocks that are in use or known; returns them."""
        for block in blocks:
            assert self.references[block] > 0 or block in self.idle, f"block {block} is free"
            self.idle.pop(block, None)
            self.references[block] += 1
        return list(blocks)

    def register(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Remember the tokens of full blocks; hashes[i] is of all tokens up to the end of blocks[i]."""
        for block, known in zip(blocks, hashes, strict=False):
            if known not in self.block_of and block not in self.hash_of:
                self.block_of[known], self.hash_of[block] = block, known

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the known blocks of the longest beginning of a sequence."""
        found = []
        for known in hashes:
            if known not in self.block_of:
                break
            found.append(self.block_of[known])
        return found

    def release(self, blocks: Sequence[int]) -> None:
        """End one sequence's use of these blocks."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} was released twice"
            if self.references[block]:
                continue
            if block in self.hash_of:
                self.idle[block] = None
            else:
                self.free.append(block)


def block_hashes(tokens: Ints, size: int, known: Sequence[bytes] = (), adapter: str = "") -> list[bytes]:
    """Return the hash of all tokens up to the end of each full block; `known`: the first of them.

    Blocks that another adapter computed have other hashes.
    """
    hashes = list(known[: len(tokens) // size])
    for end in range((len(hashes) + 1) * size, len(tokens) + 1, size):
        before = hashes[-1] if hashes else adapter.encode()
        hashes.append(
            hashlib.blake2b(before + tokens[end - size : end].astype("<i4").tobytes(), digest_size=16).digest()
        )
    return hashes
