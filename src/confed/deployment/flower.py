"""Federation over Flower: the server's end and a site's, each in the process of its command."""

import math
from pathlib import Path
from threading import Event
from typing import Any

from confed.deployment.authority import settle_key
from confed.deployment.manifest import accept, check_signed, read_certificate
from confed.deployment.provision import SITES, Federation, provision, read_sites
from confed.deployment.roles import Action
from confed.deployment.roster import Roster, check_key
from confed.deployment.server import run_server
from confed.deployment.site import ASK_FOR_IT, open_site, signatures_by_list, signer_by_list
from confed.deployment.transports import FederationTransport, Joining, Leading, Signature
from confed.engines.flower import superlink
from confed.engines.flower.supernode import SuperNode, public_of, read_key, read_public
from confed.engines.flower.transport import FlowerTransport, client_app
from confed.recipes.recipe import Recipe
from confed.system import events
from confed.system.events import Note, Progress
from confed.system.folder_lock import exclusive


class FlowerFederation:
    """Flower's Fleet API, served and dialled by our own processes."""

    def provision(self, root: Path, federation: Federation) -> None:
        provision(root, federation)

    def lead(self, recipe: Recipe, leading: Leading, progress: Progress) -> dict[str, Any]:
        tls, state = leading.kit, leading.state
        if (tls is None) != leading.insecure:
            raise ValueError("give either --tls DIR, or --insecure to go without")
        listed = leading.sites or (None if tls is None else tls / SITES)
        if listed is None:
            raise ValueError("--sites must name the list of sites and their public keys")
        roster = Roster(listed, read_public, lambda text: progress(Note(text)))
        certificate, key = (None, None) if tls is None else (tls / "server.crt", tls / "server.key")
        if tls is not None:
            settle_key(tls)
            check_key(tls, tls / "server.key", Action.run)
        with exclusive(state):
            pass  # a second server on the state is refused before it touches the first one's messages
        waiting = state.with_name(f"{state.name}.post")  # beside the run folder, which may not be there yet
        opened = superlink.open_superlink(
            roster, leading.host, leading.port, certificate=certificate, key=key, waiting=waiting,
            refusal=roster.refusal,
        )  # fmt: skip
        with opened as (grid, port):
            roster.added, roster.changed = grid.admit, grid.renew_certificate
            without = ", without TLS" if leading.insecure else ""
            progress(Note(f"listening on {leading.host}:{port}{without}"))
            return run_server(
                recipe, state, FlowerTransport(grid, roster.active), names=roster.values(), wait=leading.wait,
                timeouts=leading.timeouts, whole=leading.whole, bounds=leading.bounds,
                signatures=signatures_by_list(recipe, read_sites(listed)), deliver=leading.deliver, progress=progress,
            )  # fmt: skip

    def signature(self, joining: Joining, recipe: str, card: Path | None, unsigned: bool) -> Signature | None:
        if (joining.ca is None) != joining.insecure:
            raise ValueError("give either --ca FILE, or --insecure to go without TLS")
        if not joining.site:
            raise ValueError("--site must name the client of the data that this site is")
        if joining.ca is None or unsigned:
            return None
        public = public_of(read_key(joining.key))
        return check_signed(joining.ca.parent, joining.ca, recipe, card, joining.site, public)

    def join(
        self, recipe: Recipe, joining: Joining, signature: Signature | None, stop: Event, progress: Progress
    ) -> bool:
        secret, private = read_key(joining.key), joining.private
        root = None if joining.ca is None else read_certificate(joining.ca)
        signed = None if signature is None else signature[1].sites

        def tell(event: events.Event) -> None:
            progress(event)
            if joining.once and site.problem is not None:
                stop.set()

        with exclusive(private):
            if signature is not None:
                accept(private, *signature)
            site = open_site(
                recipe, joining.site, private, tell, policy=joining.policy,
                signer=signer_by_list(recipe, joining.site, joining.key, joining.members, signed),
                over=stop.set if joining.once else lambda: None, checkpoint=joining.checkpoint,
            )  # fmt: skip
            node = SuperNode(joining.server, secret, root, largest=site.largest, progress=tell)
            gone = node.serve(client_app(lambda _: site), stop, joining.patience if joining.once else math.inf)
        if gone:
            progress(Note(f"{gone}: the run may be over; {ASK_FOR_IT}"))
        return not gone and site.problem is None

    def commands(self, port: int) -> tuple[str, str]:
        lead = f"--state state --tls . --port {port}"
        return lead, f"--site SITE --server localhost:{port} --ca ca.crt --once"


TRANSPORT: FederationTransport = FlowerFederation()
