"""Options that every verb has, ``--allow-code``, ``--grant`` and ``--quiet``, and what they were given."""

from typing import Annotated, Any

import typer
import typer.main

from confed.registry import allow_code, grant

_QUIET: list[bool] = []
"""Whether the command was given ``--quiet``."""

_ALLOWED: list[str] = []
"""What the command was given with ``--allow-code``."""


def permission_options() -> list[Any]:
    """The options ``--allow-code`` and ``--grant`` of every verb."""
    carrier = typer.Typer(add_completion=False)

    def allow(modules: list[str] | None) -> None:
        _ALLOWED[:] = modules or []
        allow_code(*_ALLOWED)

    def permit(kinds: list[str] | None) -> None:
        grant(*(kinds or ()))

    @carrier.command()
    def verb(  # pyright: ignore[reportUnusedFunction]
        allow_code: Annotated[
            list[str] | None,
            typer.Option(
                "--allow-code",
                metavar="MODULE",
                callback=allow,
                expose_value=False,
                is_eager=True,
                show_default=False,
                help="Allow recipes to name this module, whose code is then run; repeatable.",
            ),
        ] = None,
        given: Annotated[
            list[str] | None,
            typer.Option(
                "--grant",
                metavar="network|disk",
                callback=permit,
                expose_value=False,
                is_eager=True,
                show_default=False,
                help="Grant recipes from elsewhere the network, or files outside of their folder; repeatable.",
            ),
        ] = None,
    ) -> None:
        """Carrier of the options; does nothing."""

    command: Any = typer.main.get_command(carrier)
    return [parameter for parameter in command.params if parameter.name in ("allow_code", "given")]


def quiet_option() -> Any:
    """The option ``--quiet`` of every verb."""
    carrier = typer.Typer(add_completion=False)

    def silence(wanted: bool) -> None:
        _QUIET[:] = [wanted]

    @carrier.command()
    def verb(  # pyright: ignore[reportUnusedFunction]
        quiet: Annotated[
            bool,
            typer.Option(
                "--quiet", "-q", callback=silence, expose_value=False, show_default=False,
                help="Print results, warnings and errors, but no progress.",
            ),
        ] = False,
    ) -> None:  # fmt: skip
        """Carrier of the option; does nothing."""

    command: Any = typer.main.get_command(carrier)
    return next(parameter for parameter in command.params if parameter.name == "quiet")


def is_quiet() -> bool:
    """Whether the command prints no progress."""
    return any(_QUIET)


def allowed_modules() -> tuple[str, ...]:
    """Modules that the command was given with ``--allow-code``, for a command that goes on with its work."""
    return tuple(_ALLOWED)
