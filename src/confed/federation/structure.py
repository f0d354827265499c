"""What a method may ask of a model before it runs: which submodule answers, and how wide its features are.

A model says so in its attribute ``answer_head``, the name of the submodule that turns features into answers.
"""

from torch import nn

from confed.federation.params import named_tensors

__all__ = ["feature_width", "private_head"]


def feature_width(model: nn.Module, method: str) -> int:
    """D of the features (B, D), which is what the answer head reads.

    Args:
        model: the model.
        method: whose modules need it, for the message.

    Raises:
        ValueError: the model does not name its answer head, or the head has no weight matrix.
    """
    name = getattr(model, "answer_head", None)
    if not isinstance(name, str):
        raise ValueError(
            f"{method} needs to know how wide the features are: the model's attribute 'answer_head' must name the "
            f"submodule that reads them, got {name!r} in {type(model).__name__}"
        )
    matrix = next((p for p in model.get_submodule(name).parameters() if p.ndim == 2), None)
    if matrix is None:
        raise ValueError(f"{method} needs an answer head with a weight matrix, {name!r} has none")
    return matrix.shape[1]


def private_head(model: nn.Module, wanted: tuple[str, ...], method: str) -> tuple[str, ...]:
    """The submodules that make up a client's own head.

    Args:
        model: the model.
        wanted: names of submodules; empty for the model's answer head.
        method: who keeps it private, for the message.

    Raises:
        ValueError: the model does not name its head, a name has no trained tensors, or nothing would be shared.
    """
    known = getattr(model, "answer_head", None)
    head = wanted or ((known,) if isinstance(known, str) else ())
    if not head:
        raise ValueError(
            f"{method} keeps the answer head private, and this model does not say what its head is (attribute "
            "answer_head); algorithm.head must name the submodules"
        )
    trained = set(named_tensors(model)) - set[str](getattr(model, "frozen", ()))
    for part in head:
        if not any(name.startswith(f"{part}.") for name in trained):
            modules = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"algorithm.head must name submodules with trained tensors, got {part!r}; the model has {modules}"
            )
    if all(name.startswith(tuple(f"{part}." for part in head)) for name in trained):
        raise ValueError(f"algorithm.head must leave something to share, got {head}, which is all that is trained")
    return head
