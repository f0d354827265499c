"""A recipe as Flower's two applications, for existing SuperLinks and SuperNodes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from confed.deployment.policy import SitePolicy, read_policy
from confed.deployment.provision import read_sites, with_card
from confed.deployment.server import run_server
from confed.deployment.site import open_site, signatures_by_list, signer_by_list, site_recipe
from confed.engines.flower.transport import FlowerTransport, client_app, server_app
from confed.engines.remote.client import Site
from confed.engines.remote.sites import Timeouts
from confed.report.report import write_report
from confed.system.folder_lock import exclusive


def _path(config: Mapping[str, object], key: str) -> Path | None:
    return Path(str(config[key])) if key in config else None


def apps(recipe: Path) -> tuple[ServerApp, ClientApp]:
    """The server's application and the clients'.

    The server's run configuration: ``state`` (the run folder, with its report at the end), ``sites`` (how many must
    answer), ``wait`` and ``deadline`` (seconds), ``card`` (a file) where the server holds no examples, and ``members``
    (the list of all sites' public keys), by which it leaves out who signs secure aggregation with another key. A
    SuperNode's own configuration: ``site`` (which client it is), ``private`` (the folder for what stays there),
    ``policy`` (a file, see :mod:`confed.deployment.policy`), ``evaluations`` and ``epsilon`` (which narrow it), ``key``
    and ``members`` (a private key and the list of all sites' public keys, which sign secure aggregation), and
    ``data-KEY`` for keys of the recipe's section ``[data]``.
    """
    opened: dict[str, Site] = {}

    def given(context: Context, key: str) -> str:
        text = context.node_config.get(key)
        if not isinstance(text, str):
            raise ValueError(f"the SuperNode's --node-config must set {key!r} to a text, got {text!r}")
        return text

    def alone(context: Context) -> AbstractContextManager[None]:
        return exclusive(Path(given(context, "private")))

    def site(context: Context) -> Site:
        config = context.node_config
        name = given(context, "site")
        if name not in opened:
            data = [f"{key.removeprefix('data-')}={value}" for key, value in config.items() if key.startswith("data-")]
            evaluations, limit, file = config.get("evaluations"), config.get("epsilon"), _path(config, "policy")
            policy = SitePolicy() if file is None else read_policy(file)
            opened[name] = open_site(
                site_of_recipe := site_recipe(recipe, data, handed_out=True), name, Path(given(context, "private")),
                policy=policy.narrowed(
                    None if limit is None else float(limit), None if evaluations is None else str(evaluations)
                ),
                signer=signer_by_list(site_of_recipe, name, Path(str(config["key"])), _path(config, "members"))
                if "key" in config else None,
            )  # fmt: skip
        return opened[name]

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        timeouts = Timeouts(minimum=int(config.get("sites", 1)), deadline=float(config.get("deadline", 3600.0)))
        state = Path(str(config.get("state", "federation-state")))
        led, card = site_recipe(recipe), str(config.get("card", ""))
        led = with_card(led, Path(card)) if card else led
        members = _path(config, "members")
        run_server(
            led, state, FlowerTransport(grid), wait=float(config.get("wait", 600.0)), timeouts=timeouts,
            signatures=None if members is None else signatures_by_list(led, read_sites(members)),
            pieces=False,  # a message of Flower's own processes takes seconds, of whatever size
        )  # fmt: skip
        write_report(state)

    return server_app(main), client_app(site, alone)
