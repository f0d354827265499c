"""The ``confed`` command; one module per family of verbs."""

from confed.cli.app import app, main

# The order of the verbs in the help is the order in which their modules are imported.
# isort: off
from confed.cli import running
from confed.cli import comparing
from confed.cli import sweeping
from confed.cli import tuning
from confed.cli import forgetting
from confed.cli import attacking
from confed.cli import telling
from confed.cli import asking
from confed.cli import evaluating
from confed.cli import looking
from confed.cli import datasets
from confed.cli import converting
from confed.cli import pretraining
from confed.cli import federating
from confed.cli import federation_cards
# isort: on

__all__ = [
    "app",
    "asking",
    "attacking",
    "comparing",
    "converting",
    "datasets",
    "evaluating",
    "federating",
    "federation_cards",
    "forgetting",
    "looking",
    "main",
    "pretraining",
    "running",
    "sweeping",
    "telling",
    "tuning",
]
