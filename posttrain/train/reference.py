"""The reference model: log-probabilities of a frozen policy, which may follow the policy every N steps (TR-DPO)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from posttrain.checkpoints import checkpoint
from posttrain.core.errors import CheckpointError
from posttrain.core.types import Sample, SamplingDistribution
from posttrain.models.merging import MergeSettings, merge_models
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.offload import Offloader
from posttrain.train.run import Run


class ReferenceModel:
    """Fills samples with the reference's log-probabilities."""

    def __init__(
        self,
        run: Run,
        policy: LearnerGroup,
        model: LearnerGroup | None,
        offloader: Offloader,
        *,
        distribution: SamplingDistribution,
        sync_steps: int,
        mixup_alpha: float,
        load: Callable[[str], LearnerGroup],
    ) -> None:
        """`model`: the frozen model; None: the reference is the policy without its adapters.

        `sync_steps`: the reference is replaced by the current policy every N steps (0: never), or with `mixup_alpha`
        below 1 by an average with this share of the policy; `load` loads a model.
        """
        self.run, self.policy, self.model, self.offloader = run, policy, model, offloader
        self.distribution, self.sync_steps, self.load = distribution, sync_steps, load
        self.mixup_alpha = mixup_alpha
        self.step = 0  # the reference is the policy after this step
        self.precomputed = False
        self.offload()

    def fill(self, samples: Sequence[Sample]) -> None:
        """Compute ref_logprobs of the samples, unless they were precomputed."""
        if self.precomputed:
            return
        if self.model is None:
            streams = self.policy.logprobs(samples, adapters=False, distribution=self.distribution)
        else:
            with self.offloader.on_device("reference", self.model):
                streams = self.model.logprobs(samples, distribution=self.distribution)
        for sample, stream in zip(samples, streams, strict=True):
            sample.ref_logprobs = stream

    def precompute(self) -> None:
        """Compute ref_logprobs of all examples of the run and free the model."""
        data = self.run.data
        self.run.log.message("computing the reference's log-probabilities of all examples")
        datasets = [data.train, data.eval] if data.eval else [data.train]
        for dataset in datasets:
            dataset.examples.hold()
        self.fill([sample for dataset in datasets for sample in dataset.samples()])
        self.precomputed = True
        if self.model is not None:
            self.model.workers.close()
            self.model = None

    def sync(self, step: int) -> None:
        """Make the reference the policy as it was after the last multiple of `sync_steps` steps, or mix it in.

        Its weights are kept in the run directory, copied from that step's checkpoint, so that a resumed run has the
        same reference.
        """
        every = self.sync_steps
        wanted = step // every * every if every else 0
        if wanted == self.step:
            return
        directory = self.run.directory.path / "reference"
        saved = self.save_reference(directory, wanted, step)
        assert self.model is not None, "with adapters the reference is the base model, which does not change"
        self.model.workers.close()
        self.model = self.load(str((saved / "model").absolute()))
        self.offload()
        self.step = wanted
        checkpoints = checkpoint.list_checkpoints(self.run.directory.checkpoints)
        oldest = min(map(checkpoint.step_of, checkpoints), default=step)
        for other in checkpoint.list_checkpoints(directory):
            if checkpoint.step_of(other) < oldest // every * every:  # no checkpoint of the run needs it any more
                shutil.rmtree(other)
        share = f" by {self.mixup_alpha:g}" if self.mixup_alpha < 1 else ""
        self.run.log.message(f"the reference is now the policy of step {wanted}{share}")

    def save_reference(self, directory: Path, wanted: int, step: int) -> Path:
        """Write the reference of step `wanted` into `directory`, unless it is there; return its folder."""
        run = self.run
        checkpoint.remove_temporaries(directory)
        for other in checkpoint.list_checkpoints(directory):
            if checkpoint.step_of(other) > step:  # written by a run that got further and was then resumed from earlier
                shutil.rmtree(other)
        saved = checkpoint.checkpoint_path(directory, wanted)
        if checkpoint.is_valid(saved):
            return saved
        run.finish_save()
        if wanted == step and run.saved_step != step:
            run.save(step, self.policy)
        source = run.directory.checkpoints / saved.name / "model"
        if not source.is_dir():
            raise CheckpointError(
                f"{saved}: the reference is the policy of step {wanted}, but its weights are missing, so the run "
                "cannot be resumed"
            )

        known: checkpoint.FileEntries = {}

        def write(folder: Path) -> None:
            if self.mixup_alpha < 1:
                self.mix(source, self.previous_reference(directory, wanted), folder / "model")
            else:
                shutil.copytree(source, folder / "model", copy_function=link_or_copy)
                known.update(linked_files(folder, source.parent))

        checkpoint.start_checkpoint(directory, wanted, write, lambda: known)()
        return saved

    def previous_reference(self, directory: Path, wanted: int) -> Path:
        """Return the folder of the reference before the one of step `wanted`; the first is written from the model."""
        before = wanted - self.sync_steps
        saved = checkpoint.checkpoint_path(directory, before)
        if before == 0 and not checkpoint.is_valid(saved):
            model = self.model
            assert model is not None and self.step == 0
            checkpoint.write_checkpoint(directory, 0, lambda folder: model.save_weights(folder / "model"))
        if not checkpoint.is_valid(saved):
            raise CheckpointError(
                f"{saved}: the reference of step {wanted} is mixed from that of step {before}, which is missing, so "
                "the run cannot be resumed"
            )
        return saved / "model"

    def mix(self, policy: Path, previous: Path, out: Path) -> None:
        """Write the average of two models, in float32: small steps would be lost in a half-precision file."""
        weights = (self.mixup_alpha, 1 - self.mixup_alpha)
        merge_models([str(policy), str(previous)], out, MergeSettings(weights=weights), dtype=torch.float32)

    def offload(self) -> None:
        if self.model is not None:
            self.offloader.offload("reference", self.model)


def linked_files(folder: Path, source: Path) -> checkpoint.FileEntries:
    """Return the files of the checkpoint `source` that the folder has links to: they were synced and hashed with it."""
    saved = {name: entry for name, entry in checkpoint.saved_files(source).items() if (folder / name).exists()}
    return {name: entry for name, entry in saved.items() if (folder / name).samefile(source / name)}


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file that does not change; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
