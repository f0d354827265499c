"""Calls to ``fit`` and ``evaluate`` answered for several clients at once, with stacked parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from confed.engines.perform import Setup, Workspace, accepted, check_secrets, client_of
from confed.federation.algorithm import Algorithm
from confed.federation.client import Client, Session
from confed.federation.equivalence import unstacked_setting
from confed.federation.evaluation import asked_examples, evaluated
from confed.federation.messages import Call, Message, Reply
from confed.federation.params import Params, Scope, copy_into
from confed.federation.randomness import derive, isolated, refuse_random_numbers
from confed.federation.stacked import train_stacked
from confed.federation.stacked_evaluation import evaluate_stacked
from confed.federation.stacked_passes import StackedPasses
from confed.federation.state import ClientState, Store
from confed.federation.train import needs_two, trained

FEW = "fewer than two have a model of their own"
"""No reason for a note: there is nothing to stack."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def answer_together(
    setup: Setup, workspace: Workspace, calls: Sequence[Call], store: Store, round: int, passes: StackedPasses
) -> list[Reply] | str:
    """Replies of several clients that are trained, or whose own models are evaluated, at once."""
    action = calls[0].action
    together = _fit if action == "fit" else _evaluate
    before = [store.load(call.client.id) for call in calls]
    after = [state.copy() for state in before]
    try:
        with isolated(derive(setup.seed, round, calls[0].client.id, action)):
            messages = together(setup, workspace, calls, after, round, passes)
    except Exception as error:  # what torch.func cannot map, or one client's own failure, which is found one by one
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(messages, str):
        return messages
    return [
        accepted(call, message, old, new, store, setup.local.lr)
        for call, message, old, new in zip(calls, messages, before, after, strict=True)
    ]


def _evaluate(
    setup: Setup,
    workspace: Workspace,
    calls: Sequence[Call],
    states: Sequence[ClientState],
    round: int,
    passes: StackedPasses,
) -> list[Message] | str:
    """The global model is evaluated client by client: it is one model, and its batches are large already."""
    if reason := unstacked_setting(setup.local, only=("precision", "eval_batch_size")):
        return reason
    asked = [call.message.scalars.get("personal", True) for call in calls]
    with_personal = [i for i, state in enumerate(states) if asked[i] and "personal" in state.tensors]
    if len(with_personal) < 2:
        return FEW
    task = setup.task_of(calls[with_personal[0]].client.id)
    if any(setup.task_of(calls[i].client.id) is not task for i in with_personal):
        return "clients have tasks of their own"
    workspace.set_task(task)
    clients = [client_of(setup, workspace, calls[i], states[i], round) for i in with_personal]
    if any(client.scopes is not clients[0].scopes for client in clients):
        return "clients have tensors of their own"
    batches, limit = zip(
        *(asked_examples(c, calls[i].message) for c, i in zip(clients, with_personal, strict=True)), strict=True
    )
    values = _loaded(clients, [states[i].tensors["personal"] for i in with_personal])
    workspace.model.eval()
    examples = [of_client(setup.local.eval_batch_size) for of_client in batches]
    with refuse_random_numbers():
        personal = dict(zip(with_personal, evaluate_stacked(values, examples, task, passes, limit[0]), strict=True))
    replies: list[Message] = []
    for i, (call, state) in enumerate(zip(calls, states, strict=True)):
        workspace.set_task(setup.task_of(call.client.id))
        alone = Message(call.message.tensors, {**call.message.scalars, "personal": False})
        shared = setup.algorithm.evaluate(client_of(setup, workspace, call, state, round), alone)
        mine = evaluated({"personal": personal[i]} if i in personal else {})
        replies.append(Message({**shared.tensors, **mine.tensors}, {**shared.scalars, **mine.scalars}))
    return replies


def _fit(
    setup: Setup,
    workspace: Workspace,
    calls: Sequence[Call],
    states: Sequence[ClientState],
    round: int,
    passes: StackedPasses,
) -> list[Message] | str:
    if reason := unstacked_setting(setup.local):
        return reason
    first = setup.task_of(calls[0].client.id)
    if any(setup.task_of(call.client.id) is not first for call in calls):
        return "clients have tasks of their own"
    workspace.set_task(first)
    clients = [
        client_of(setup, workspace, call, state, round, Session()) for call, state in zip(calls, states, strict=True)
    ]
    if any(client.scopes is not clients[0].scopes for client in clients):
        return "clients have tensors of their own"
    values = _loaded(clients, [call.message.tensors for call in calls])
    if not trained(clients[0]):
        return "nothing is trained"
    if reason := _unstacked_model(clients[0]):
        return reason
    replies: list[Message] = []
    plain = type(setup.algorithm).objective is Algorithm.objective
    with refuse_random_numbers():
        found = train_stacked(clients, values, setup.algorithm.objective, passes, first if plain else None)
    for client, (own, loss) in zip(clients, found, strict=True):
        client.tensors = {**workspace.tensors, **own}
        client.remember()
        # As an upload, without a copy: nobody else has these tensors.
        shared = {name: client.tensors[name].detach().cpu() for name in client.names(Scope.SHARED)}
        message = Message(shared, {"loss": loss})
        check_secrets(client, message)
        replies.append(message)
    return replies


def _unstacked_model(client: Client) -> str:
    """Why a client's model, which is in training mode from now on, cannot be stacked; "" where it can."""
    client.model.train()
    for module in client.model.modules():
        if isinstance(module, _DROPOUTS):
            if module.p > 0:
                return "the model has dropout, whose random numbers would be others"
            module.train(False)  # it draws numbers that it does not need, which torch.func refuses
    return "the model normalises over the examples of a batch, or the loss compares them" if needs_two(client) else ""


def _loaded(clients: Sequence[Client], shared: Sequence[Params]) -> list[dict[str, Tensor]]:
    """Values of all tensors that clients of equal scopes may have their own of; the workspace gets all others."""
    starts = [client.begins(values) for client, values in zip(clients, shared, strict=True)]
    scopes = clients[0].scopes
    client_names = [name for name in starts[0] if scopes[name] in (Scope.SHARED, Scope.PRIVATE)]
    common = [name for name in starts[0] if name not in client_names]
    copy_into([clients[0].tensors[name] for name in common], [starts[0][name] for name in common])
    device = next(iter(clients[0].tensors.values())).device
    loaded: list[dict[str, Tensor]] = []
    for values in starts:
        loaded.append({name: values[name].to(device) for name in client_names})
    return loaded
