"""Reading of a site's reply: its head and body are checked against the request, the model, the method and the task."""

from collections.abc import Callable

from confed.engines.perform import Setup, Workspace
from confed.engines.remote.protocol import Answer, Limits, Refused, open_body, printable, schema_of
from confed.engines.remote.reply_checks import check_content
from confed.federation.client_info import ClientInfo
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Scope
from confed.privacy.guards import ValueBound, check_reply

__all__ = ["ReplyReader"]


class ReplyReader:
    """Reader of replies; what is faulty in one becomes its error, and nothing of it reaches the method.

    Args:
        setup: the run.
        workspace: the model, for the names, shapes and scopes of tensors.
        limits: how large replies may be; None for those that follow from the model.
        judge: raises an error where an evaluation is none; any that consists of numbers passes all other checks.

    Attributes:
        limits: as given, or from the model.
        values: the absolute bound on values.
    """

    def __init__(
        self, setup: Setup, workspace: Workspace, limits: Limits | None, judge: Callable[[ClientInfo, Message], None]
    ) -> None:
        self._setup, self._workspace, self._judge = setup, workspace, judge
        self._known = schema_of(workspace.tensors)
        self.limits = Limits.of(self._known) if limits is None else limits
        self.values = ValueBound.of(workspace.tensors.values(), setup.algorithm.traits.sums)

    def read(self, call: Call, identity: str, head: bytes, body: bytes) -> tuple[Reply, bool, str]:
        """The reply, whether the site has saved its state, and what it says of its journals.

        Args:
            call: what was asked.
            identity: of the request.
            head: of the reply.
            body: its message.
        """
        client = call.client

        def refused(why: object) -> tuple[Reply, bool, str]:
            return Reply(client, Message(), f"ValueError: update refused: {why}"), False, ""

        try:
            answer = Answer.from_bytes(head, self.limits)
            if answer.id != identity:
                return refused(f"the reply is to {answer.id[:120]!r}, the request was {identity!r}")
            if answer.error is not None:
                return Reply(client, Message(), answer.error), False, ""
            scopes = self._workspace.scopes(self._setup.algorithm, client)
            shared = frozenset(name for name, scope in scopes.items() if scope is Scope.SHARED)
            exact = None if call.expects is None else schema_of(call.expects)
            message = open_body(body, self.limits, self._known, shared, exact)
            check_content(self._setup.algorithm, self._setup.task_of(client.id), call.action, message)
            if (problem := self.values.problem(message.tensors)) is not None:  # what sites refuse, no server averages
                return refused(problem)
        except Refused as error:
            return refused(error)
        if call.action == "evaluate" and (problem := self._misjudged(client, message)):
            return Reply(client, Message(), problem), False, ""
        return check_reply(call, Reply(client, message)), answer.saved, answer.journals

    def _misjudged(self, client: ClientInfo, message: Message) -> str:
        try:
            self._judge(client, message)
        except Exception as error:  # whatever sums and counts of a site's making may lead to
            return f"ValueError: evaluation refused: {type(error).__name__}: {printable(str(error), 200)}"
        return ""
