"""CUDA graphs of decode steps. Weights, cache and state stay where they are; a graph serves until one of them moves."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from posttrain.nn.training_graphs import CAPTURE_LOCK


class Graphs:
    """Runs a function that reads and writes fixed tensors: the first time as it is, then captured."""

    def __init__(self) -> None:
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.seen: set[Hashable] = set()
        self.pool = (
            torch.cuda.graph_pool_handle()
        )  # graphs run one after another, so they may share their scratch memory

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call `function`, by its graph if there is one. Equal keys must mean equal work on the same tensors."""
        if key not in self.seen:  # a real step that also builds kernels and warms up libraries
            self.seen.add(key)
            function()
            return
        if key not in self.captured:
            graph = torch.cuda.CUDAGraph()
            # A trainer may be at work, on another thread.
            with CAPTURE_LOCK, torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                function()
            self.captured[key] = graph
        self.captured[key].replay()
