"""Groups of commands: an unknown command is answered with the nearest one and with the list of all."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from birkhoff.errors import did_you_mean


class CommandGroup(TyperGroup):
    """Typer group that lists its commands when an unknown one is given."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            verbs = sorted(self.list_commands(ctx))
            ctx.fail(f"there is no {args[0]!r}.{did_you_mean(args[0], verbs)} There is: {', '.join(verbs)}.")
        return super().resolve_command(ctx, args)
