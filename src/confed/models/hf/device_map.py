"""Frozen base of a vision-language model spread over several devices, by ``accelerate``; what learns stays on one.

Blocks follow each other over the devices, each of which computes in turn; activations travel. The factors of LoRA are
parameters of one device, so that methods, optimisers and messages know of one only, and go to their layer's device
where a pass needs them: they are small, and gradients come back the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["check_spreadable", "gpus", "moved", "spread"]

SHARE = 0.8
"""Share of a GPU's free memory that the base may take; the rest is for activations."""


def check_spreadable(model: nn.Module, body: nn.Module) -> None:
    """Check that nothing that learns lies within the base but factors of LoRA.

    Args:
        model: the whole model, with what a method has added to it.
        body: its base.

    Raises:
        ValueError: names the parameter.
    """
    own = {id(parameter) for linear in _factors(body) for parameter in linear.parameters()}
    for name, parameter in body.named_parameters():
        if parameter.requires_grad and id(parameter) not in own:
            raise ValueError(
                f"model.device_map = 'auto' spreads a base in which the factors of LoRA alone learn, and {name!r} is "
                f"none of them in this {type(model).__name__}; set model.device_map = 'one', or another method"
            )


def gpus(device: str) -> list[tuple[torch.device, int]]:
    """GPUs of this machine with the bytes that a base may take of each; none for a single device such as "cuda:1"."""
    if device != "cuda" or not torch.cuda.is_available():
        return []
    return [
        (torch.device("cuda", number), int(SHARE * torch.cuda.mem_get_info(number)[0]))
        for number in range(torch.cuda.device_count())
    ]


def spread(model: nn.Module, body: Any, places: Sequence[tuple[torch.device, int]]) -> torch.device:
    """Placement of a base on several devices; returns the one that what learns is on, as are inputs and results.

    Args:
        model: the whole model.
        body: its base, a model of ``transformers``, with LoRA in it.
        places: devices with the bytes that the base may take of each; the base fills them in this order.

    Raises:
        ValueError: the base does not fit.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, send_to_device

    whole: Any = body._no_split_modules  # declared by the library
    options: dict[str, Any] = {"no_split_module_classes": sorted(whole or ())}
    given: Any = {number: size for number, (_, size) in enumerate(places)}
    room: Any = get_balanced_memory(body, max_memory=given, **options)
    found: Any = infer_auto_device_map(body, max_memory=room, **options)
    if not all(isinstance(number, int) for number in found.values()):
        needed, there = sum(tensor.nbytes for tensor in body.parameters()), sum(size for _, size in places)
        raise ValueError(
            f"model.device_map = 'auto': the base has {needed / 2**30:.1f} GiB and does not fit on {len(places)} "
            f"devices, of which it may take {there / 2**30:.1f} GiB"
        )
    for linear in _factors(body):
        linear.forward = _at_input(linear)
    devices = {name: places[int(number)][0] for name, number in found.items()}
    embedding = _name_of(body, body.get_input_embeddings())
    main = next(device for name, device in devices.items() if _within(embedding, name))
    skipped: Any = body._skip_keys_device_placement  # caches stay with their layers
    for name, block in body.named_modules():
        device = next((device for own, device in devices.items() if _within(name, own)), None)
        if device is None:  # it spans several
            continue
        if name in devices:
            block.to(device)
        block.register_forward_pre_hook(_sender(device, skipped), with_kwargs=True)
    for child in model.children():
        if child is not body:
            child.to(main)
    for parameter in body.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(main)

    def home(module: nn.Module, given: Any, output: Any) -> Any:
        del module, given
        return send_to_device(output, main, skip_keys=["past_key_values"])

    for module in (body.model, body.get_decoder(), body.get_output_embeddings()):
        module.register_forward_hook(home)
    return main


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a mapping of tensors, on a device; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(part, device) for key, part in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value


def _sender(device: torch.device, skipped: Any) -> Any:
    """Hook before a module's pass that brings what it is given to its device."""
    from accelerate.utils import send_to_device

    def send(module: nn.Module, given: Any, named: Any) -> Any:
        del module
        return send_to_device(given, device), send_to_device(named, device, skip_keys=skipped)

    return send


def _factors(body: nn.Module) -> list[nn.Linear]:
    """Linear layers A and B of LoRA."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in body.modules() if isinstance(module, LoraLayer)]
    return [linear for layer in layers for part in (layer.lora_A, layer.lora_B) for linear in part.values()]  # pyright: ignore


def _at_input(linear: nn.Linear) -> Any:
    """A linear layer's pass with its weights brought to where its input is."""

    def forward(given: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(given.device)  # pyright: ignore[reportUnnecessaryComparison]
        return functional.linear(given, linear.weight.to(given.device), bias)

    return forward


def _name_of(body: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in body.named_modules() if module is wanted)


def _within(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(f"{block}.")
