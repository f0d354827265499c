"""Final results of the sites of a federation: kept by model, so that late sites are added and nothing is replaced."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confed.engines.remote.protocol import digest, seal
from confed.federation.checkpoint import write_atomically
from confed.federation.messages import Message
from confed.federation.state import ServerState

Values = Mapping[str, float]  # metric -> value, of one view at one site


def model_digest(servers: Mapping[str, ServerState]) -> str:
    parts = [[name, digest(b"", seal(Message(server.params)))] for name, server in sorted(servers.items())]
    return digest(json.dumps(parts).encode(), b"")


class FinalResults:
    """Results of one final model at the sites: a part of ``final.json`` in the run folder.

    The file holds model digest -> {"round", "sites": site -> {"results": view -> metrics, "reason"}}. A result that is
    there stays; a reason why there is none gives way to a result.
    """

    def __init__(self, path: Path, round: int, model: str) -> None:
        self._path, self.round, self.model = path, round, model
        self._models: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self._sites: dict[str, dict[str, Any]] = self._models.setdefault(model, {"round": round, "sites": {}})["sites"]

    @property
    def of_other_models(self) -> list[str]:
        """Sites whose only results are of another model than this one."""
        others: set[str] = set()
        for model in self._models.values():
            others |= {name for name, site in model["sites"].items() if site["results"]}
        return sorted(name for name in others if not self.of(name))

    def of(self, site: str) -> Mapping[str, Values]:
        """View -> metrics; empty where the site was not evaluated."""
        return self._sites.get(site, {}).get("results", {})

    def reason(self, site: str) -> str:
        """Why a site was asked and has no result; empty where it was not asked."""
        return str(self._sites.get(site, {}).get("reason", ""))

    def add(self, results: Mapping[str, Mapping[str, Values]], reasons: Mapping[str, str]) -> None:
        """New results, and the reasons of sites without any, on disk when this returns."""
        for site in [*results, *reasons]:
            if not self.of(site):
                views = {view: dict(values) for view, values in results.get(site, {}).items()}
                self._sites[site] = {"results": views, "reason": "" if views else reasons.get(site, "")}
        write_atomically(self._path, json.dumps(self._models, indent=1).encode(), sync=True)
