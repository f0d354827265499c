"""A Flower grid in one process: real applications and Flower's own bytes, without sockets."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from confed.engines.flower.private_api import NodeInfo, ProtoMessage, TaskIdentity, message_from_proto, message_to_proto
from confed.engines.flower.transport import client_app
from confed.engines.perform import Setup
from confed.engines.remote.client import Site, client_named


class LoopbackGrid:
    """Grid whose messages are answered when their replies are asked for, through Flower's serialisation."""

    def __init__(
        self, apps: Mapping[int, ClientApp], configs: Mapping[int, dict[str, bool | float | int | str]] | None = None
    ) -> None:
        self._configs = configs or {}
        self._apps = apps
        self.since = dict.fromkeys(apps, "first")  # node that is connected -> a text that changes when it connects anew
        self._sent: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n, status="online", last_activated_at=s) for n, s in self.since.items()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers: list[str] = []
        for message in messages:
            numbers.append(str(len(self._sent)))
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self._sent[numbers[-1]] = message
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Flower's ``Grid``; this is when applications compute."""
        waiting = [self._sent[number] for number in message_ids]
        return [self._answer(message) for message in waiting if message.metadata.dst_node_id in self.since]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(1, node, self._configs.get(node, {}), RecordDict(), {})
        try:
            reply = self._apps[node](_through_bytes(message), context)
        except Exception as error:  # as a SuperNode does
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        return _through_bytes(reply)


def _through_bytes(message: Message) -> Message:
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


def sites_in(setup: Setup, root: Path, edge: Callable[[ClientApp], ClientApp] = lambda app: app) -> LoopbackGrid:
    """One node per client of a run, each with a separate folder."""
    infos = [setup.population.info(number) for number in range(len(setup.population))]

    def app(name: str) -> ClientApp:
        site = Site(setup, client_named(setup, name), root / name)
        return edge(client_app(lambda _: site))

    return LoopbackGrid({number: app(info.id) for number, info in enumerate(infos)})
