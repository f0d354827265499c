"""The ``confed`` command; one module per family of verbs."""

from confed.cli.app import app, main

# The order of the verbs in the help is the order in which their modules are imported.
# isort: off
from confed.cli import init as beginning
from confed.cli import run as running
from confed.cli import compare as comparing
from confed.cli import attack as attacking
from confed.cli import predict as asking
from confed.cli import list as looking
from confed.cli import data as datasets
from confed.cli import federation as federating
# isort: on

__all__ = ["app", "main"]
