"""Clients' examples on the GPU of a process, where ``run.device_data`` gives room for them."""

from collections.abc import Iterable

import torch

from confed.engines.perform import Setup, Workspace
from confed.federation.device_tables import DeviceCounts, DeviceTables


def keep_data(setup: Setup, workspace: Workspace, processes: int = 1) -> None:
    """Has a process's clients read their examples from the device from now on, where there is another than the CPU."""
    device = torch.device(workspace.device)
    if setup.device_data and device.type != "cpu":
        workspace.examples = DeviceTables(device, setup.device_data // processes)


def counts_of(setup: Setup, workspace: Workspace) -> DeviceCounts:
    """What lies on a process's device, or why nothing does."""
    if workspace.examples is not None:
        return workspace.examples.counts
    return DeviceCounts(reason="run.device is 'cpu'" if setup.device_data else "run.device_data is 0")


def added_up(counts: Iterable[DeviceCounts]) -> DeviceCounts:
    """Counts of all processes of a run."""
    each = list(counts)
    reasons = [own.reason for own in each if own.reason]
    return DeviceCounts(sum(own.held for own in each), sum(own.left for own in each), reasons[0] if reasons else "")
