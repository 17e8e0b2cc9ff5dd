"""The time that a finished run took for sampling and for updates, read from its metrics."""

from __future__ import annotations

from pathlib import Path

from burnish.config.manifest import FORMAT, MANIFEST, read_manifest
from burnish.errors import UserError
from burnish.plan.simulation import Profile
from burnish.report.metrics import read_metrics


def read_profile(run: Path, stage: str | None = None) -> tuple[str, Profile]:
    """The name of a stage that learns from its own completions, and how long its iterations took.

    The first iteration is left out, since it also loads kernels, unless it is the only one.

    Args:
        run: the folder of a run.
        stage: the stage; by default the only one that samples while it trains.

    Raises:
        UserError: if there is no such run or stage, or its batches were sampled ahead.
    """
    if not (run / MANIFEST).is_file():
        raise UserError(f"--profile {run}: not the folder of a run: {MANIFEST} is missing")
    manifest = read_manifest(run / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"--profile {run}: a run of another version of Burnish: profile a run of this one")
    recipe = manifest["recipe"]
    lines = {one["name"]: read_metrics(run / one["name"]) for one in recipe["stages"]}
    sampling = [name for name, of in lines.items() if any("generation_seconds" in line for line in of)]
    if stage is None and len(sampling) == 1:
        (stage,) = sampling
    if stage is None or stage not in sampling:
        have = f"stages that do are {', '.join(sampling)}" if sampling else "none of its stages does"
        named = "several stages sample" if stage is None and sampling else f"stage {stage or 'of this run'} does not"
        raise UserError(f"--profile {run}: {named} while they train: {have}: name one with --stage")
    settings = next(one for one in recipe["stages"] if one["name"] == stage)
    if settings["method"].get("max_staleness"):
        raise UserError(
            f"--profile {run}: stage {stage} sampled while it trained, so its times overlap: profile a run with "
            "max_staleness: 0"
        )
    sampled, updated = iterations(lines[stage])
    skipped = int(len(sampled) > 1)
    processes = next(one for one in manifest["stages"] if one["name"] == stage).get("processes", 1)
    return stage, Profile(
        sampling=tuple(sampled[skipped:]),
        updating=tuple(updated[skipped:]),
        workers=settings["generator"].get("workers") or processes,
        trainers=processes,
        rollouts=settings["trainer"]["per_device_train_batch_size"] * settings["generation"]["samples"],
    )


def iterations(lines: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """The seconds of sampling and the other seconds of each iteration. A line without sampling belongs to the last."""
    sampled: list[float] = []
    updated: list[float] = []
    for line in lines:
        if "seconds" not in line:
            continue
        generation = line.get("generation_seconds", 0.0)
        if "generation_seconds" in line:
            sampled.append(generation)
            updated.append(0.0)
        if updated:
            updated[-1] += line["seconds"] - generation
    return sampled, updated
