"""CUDA graphs of decode steps. A graph is valid as long as weights, cache and state stay at their addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from posttrain.nn.training_graphs import CAPTURE_LOCK


class DecodeGraphs:
    """Runs functions that read and write fixed tensors: eagerly the first time, then as captured graphs."""

    def __init__(self) -> None:
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.seen: set[Hashable] = set()
        self.pool = torch.cuda.graph_pool_handle()  # graphs run one after another, so they share scratch memory

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call `function`, or replay its graph. Equal keys must stand for equal work on the same tensors."""
        if key not in self.seen:  # an eager step, which also compiles kernels and warms up libraries
            self.seen.add(key)
            function()
            return
        if key not in self.captured:
            graph = torch.cuda.CUDAGraph()
            # thread_local: training may run in another thread.
            with CAPTURE_LOCK, torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                function()
            self.captured[key] = graph
        self.captured[key].replay()
