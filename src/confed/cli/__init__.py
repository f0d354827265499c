"""The ``confed`` command; one module per family of verbs."""

from confed.cli.app import app, main

# The order of the verbs in the help is the order in which their modules are imported.
# isort: off
from confed.cli import running
from confed.cli import comparing
from confed.cli import asking
from confed.cli import looking
from confed.cli import datasets
from confed.cli import pretraining
# isort: on

__all__ = ["app", "asking", "comparing", "datasets", "looking", "main", "pretraining", "running"]
