"""A FLARE job in one process: real Collab objects and FLARE's own serialiser, without sockets.

FLARE has no such thing; this uses parts of it that are not its public interface, and is written for the versions that
``pyproject.toml`` allows.
"""

import logging
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.signal import Signal
from nvflare.collab import CollabCallError, collab
from nvflare.collab.api._invocation import _InvocationDispatcher  # pyright: ignore[reportPrivateUsage]
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.api.group_call_context import GroupCallContext
from nvflare.collab.api.proxy import Proxy
from nvflare.collab.runtime.defs import CallHeaderKey, CallReplyKey, ObjectCallKey
from nvflare.collab.runtime.dispatch import _call_app_method  # pyright: ignore[reportPrivateUsage]
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.utils import fobs

from confed.engines.flare.transport import Callee, FlareTransport, SiteEndpoint
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named


class _Server:
    """Server application that FLARE needs; the caller leads."""

    @collab.main
    def lead(self) -> None:
        """Never called: the caller leads."""


class _Loopback(_InvocationDispatcher):
    """Hands calls to a site's application in this process, in FLARE's bytes there and back."""

    def __init__(self, app: ClientApp, turn: threading.Lock) -> None:
        super().__init__(Signal())
        self._app, self._turn = app, turn

    def call_target_in_group(self, gcc: GroupCallContext, func_name: str, *args: Any, **kwargs: Any) -> None:
        """See FLARE's dispatcher over cells, which sends the same payload and headers."""
        headers = {
            CallHeaderKey.TARGET_NAME: gcc.target_name,
            CallHeaderKey.METHOD_NAME: func_name,
            CallHeaderKey.AUTHENTICATED_CALLER: "server",
        }
        payload = {ObjectCallKey.CALLER: "server", ObjectCallKey.ARGS: args, ObjectCallKey.KWARGS: kwargs}
        payload |= {ObjectCallKey.TARGET_NAME: gcc.target_name, ObjectCallKey.METHOD_NAME: func_name}
        with self._turn:
            request = new_cell_message(headers, fobs.loads(fobs.dumps(payload)))
            reply = _call_app_method(request, self._app, logging.getLogger(__name__))
        result: dict[str, Any] = fobs.loads(fobs.dumps(reply.payload))
        if error := result.get(CallReplyKey.ERROR):
            gcc.set_exception(CollabCallError(gcc.target_name, func_name, error))
        else:
            gcc.set_result(result.get(CallReplyKey.RESULT))
        gcc.call_completed()


def callees_in(answering: dict[str, SiteEndpoint]) -> list[Callee]:
    """Sites of this process as FLARE shows those of a job to its server."""
    server, turn = ServerApp(_Server()), threading.Lock()
    callees: list[Any] = []
    for name, end in answering.items():
        app = ClientApp(end)
        app.name = name
        # "" are the methods of FLARE's application itself, which has none; those of ours are a child's.
        interface = app.get_collab_interface()
        backend = _Loopback(app, turn)
        proxy = Proxy(server, name, name, backend, interface[""])
        for child in interface.keys() - {""}:
            proxy.add_child(child, Proxy(server, f"{name}.{child}", "", backend, interface[child]))
        callees.append(proxy)
    return callees


def transport_in(setup: Setup, root: Path) -> FlareTransport:
    """One site per client of a run, each with a separate folder."""
    names = [setup.population.info(number).id for number in range(len(setup.population))]

    def end(name: str) -> SiteEndpoint:
        site = Site(setup, client_named(setup, name), root / name)
        return SiteEndpoint(lambda: site)

    # What FLARE allows as a name is not what a client's may be.
    calls = {f"site-{number}": name for number, name in enumerate(names)}
    return FlareTransport(callees_in({flare: end(name) for flare, name in calls.items()}), calls)
