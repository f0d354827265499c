"""Status display of a server: connected sites, the round, what each site is doing, and bytes."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from confed.api.progress import escape
from confed.system import format as formats
from confed.system.events import Caution, Event, Note, RunProgress, SiteStates, SiteStatus


class StatusPage:
    """Table that is updated on a terminal, otherwise lines; a context manager."""

    def __init__(self, console: Console, folder: Path, quiet: bool = False) -> None:
        self._console, self._folder, self._quiet = console, folder, quiet
        self._live: Live | None = None
        if console.is_terminal and not quiet:
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._said: dict[str, tuple[str, str]] = {}
        self._text, self._shown = "", 0.0

    def __enter__(self) -> "StatusPage":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, SiteStates):
            self._show_sites(event.sites)
        elif isinstance(event, Caution):
            self._console.print(f"[yellow]warning:[/] {escape(event.text)}", soft_wrap=True, highlight=False)
        elif isinstance(event, Note):
            self.line(event.text)
        elif isinstance(event, RunProgress):
            self._text = f"round {event.round}/{event.rounds}: {event.text}"
            if self._live is None:
                self.line(self._text)

    def _show_sites(self, sites: Mapping[str, SiteStatus]) -> None:
        """Shows the sites' states; on a terminal at most five times a second."""
        for name, site in sites.items():
            connection = "away" if site.state == "away" else "connected"
            if self._said.get(name, ("away", "")) != (connection, site.note):
                self._said[name] = connection, site.note
                self.line(f"site {name}: {connection}" + (f" ({site.note})" if site.note else ""))
        if self._live is not None and time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            self._live.update(self._table(sites), refresh=True)

    def line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True, highlight=False)

    def _table(self, sites: Mapping[str, SiteStatus]) -> Table:
        table = Table(title=escape(f"{self._folder}  {self._text}"), title_justify="left")
        for column in ("site", "doing", "sent to it", "came from it", "last trouble"):
            table.add_column(column)
        for name, site in sorted(sites.items()):
            table.add_row(
                *map(escape, (name, site.state, formats.size(site.down), formats.size(site.up), site.note[:80]))
            )
        return table
