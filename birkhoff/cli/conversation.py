"""A chat conversation and the slash commands of `birkhoff chat`.

A `Conversation` holds the messages, streams answers to the terminal and keeps the token ids of the last exchange for
`/mix`. A turn that fails leaves the messages unchanged; an interrupted turn keeps the partial answer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from birkhoff.cli.charts import mixing_matrix
from birkhoff.cli.engine_io import ChatGeneration, summarize
from birkhoff.cli.steer_option import load_vectors, parse_steer
from birkhoff.cli.terminal import escape_control
from birkhoff.errors import OptionError, PromptError, SiteError, quoted
from birkhoff.steering.edit_syntax import print_line
from birkhoff.text.events import ContentDelta, Event, ReasoningDelta

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.output import Output

MIX = "/mix [LAYER]"
HELP = {
    "/help": "show this list",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/reset": "clear the messages, keep the system message",
    "/steer LINE": "steer the next answers, as --steer: +2.0 NAME @ HOOK[LAYERS] stream=1; 'off' removes it",
    MIX: "show the 4x4 mixing matrices of the last token (default: last layer)",
    "/quit": "leave (also /exit, Ctrl-D)",
    "//TEXT": "send a message that begins with a slash",
}
SUBLAYERS = {"attn": "attention", "ffn": "experts"}


class Conversation:
    """Messages, chat options and steering of one conversation with an engine."""

    def __init__(
        self,
        engine: Engine,
        sampling: Mapping[str, Any],
        *,
        system: str | None = None,
        thinking: bool = False,
        effort: str | None = None,
        steer: list[Any] | None = None,
        steer_line: str = "",
    ):
        self.engine = engine
        self.sampling = sampling
        self.system = system
        self.steer = steer
        self.steer_line = steer_line  # `steer` as text
        self.thinking = thinking
        self.effort = effort
        self.messages: list[dict[str, str]] = []
        self.last_ids: list[int] = []
        self.console = Console(highlight=False, markup=False, soft_wrap=True)

    def send(self, text: str, silent: bool = False, stop: threading.Event | None = None) -> Output:
        """Send a user message and print the answer as it streams, until it ends or `stop` is set."""
        messages = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        generation = ChatGeneration(
            self.engine,
            [*system, *messages],
            self.sampling,
            thinking=self.thinking,
            effort=self.effort,
            steer=self.steer,
        )
        try:
            for events in generation:
                if not silent:
                    self._show(events)
                if stop is not None and stop.is_set():
                    break
        finally:
            generation.close()  # also after an interrupt: the printed part is kept
            if not silent:
                self.console.print()
        output = generation.output
        if output.error is not None:
            raise output.error
        reply = {"role": "assistant", "content": output.text}
        if output.message.reasoning:
            reply["reasoning_content"] = output.message.reasoning
        self.messages = [*messages, reply]
        self.last_ids = output.prompt_token_ids + output.token_ids
        if self.console.is_terminal and not silent:
            self.console.print(summarize(output), style="dim")
        return output

    def command(self, line: str) -> bool:
        """Run a slash command; return False for `/quit` and `/exit`."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/help":
            for usage, description in self._help().items():
                self.console.print(f"{usage:<14} {description}")
        elif name == "/system":
            self.system = argument or None
        elif name == "/reset":
            self.messages = []
            self.last_ids = []
        elif name == "/steer":
            self._steer(argument)
        elif name == "/mix":
            self._mix(argument)
        elif name in ("/quit", "/exit"):
            return False
        else:
            raise OptionError(f"{quoted(name)} is no command here. There is {', '.join(self._help())}.")
        return True

    def _help(self) -> dict[str, str]:
        """Commands for this model by usage, with descriptions."""
        if self.engine.num_streams is not None:
            return HELP
        left = {usage: text.replace(" stream=1", "") for usage, text in HELP.items()}
        del left[MIX]
        return left

    def _show(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ContentDelta):
                self._write(event.text, "")
            elif isinstance(event, ReasoningDelta) and self.console.is_terminal:
                self._write(event.text, "dim")  # printed on terminals only

    def _write(self, text: str, style: str) -> None:
        shown = escape_control(text) if self.console.is_terminal else text
        self.console.print(Text(shown, style), end="")
        sys.stdout.flush()

    def _steer(self, line: str) -> None:
        """Set the steering of the next answers, then print it. An invalid line raises and changes nothing."""
        if line:
            parsed = [] if line == "off" else parse_steer(line)
            edits = load_vectors(parsed, self.engine)
            self.engine.resolve(edits, [0], 1)
            self.steer = edits or None
            self.steer_line = print_line(parsed)
        self.console.print(f"steering: {self.steer_line or 'none'}")

    def _mix(self, argument: str) -> None:
        """Print the mixing matrices of the last token at a layer (default: the last)."""
        if self.engine.num_streams is None:
            raise OptionError(
                "/mix shows how the residual streams of DeepSeek-V4 are mixed; this model has one residual."
            )
        if not self.last_ids:
            raise PromptError(
                "nothing has been said yet, so there is no token to look at. Send a message first."
            )
        layers = self.engine.config.num_hidden_layers
        try:
            layer = int(argument or -1)
        except ValueError:
            raise OptionError(
                f"/mix was given {quoted(argument)}, expected the number of a layer, such as /mix 3."
            ) from None
        if not -layers <= layer < layers:
            raise SiteError(f"layer {layer}: this model has layers 0..{layers - 1}.")
        layer %= layers
        hooks = [f"mhc_{name}_{kind}_mix" for name in SUBLAYERS for kind in ("res", "pre", "post")]
        trace = self.engine.trace(self.last_ids, hooks=hooks)
        tables = []
        for name, label in SUBLAYERS.items():
            mix, read, write = (
                trace[f"mhc_{name}_{kind}_mix", layer][-1].tolist() for kind in ("res", "pre", "post")
            )
            tables.append(mixing_matrix(f"layer {layer}, {label}", mix, read, write))
        token = escape_control(self.engine.tokenizer.decode(self.last_ids[-1:]))
        self.console.print(f"token {len(self.last_ids)} of {len(self.last_ids)}, {token!r}", style="dim")
        self.console.print(Columns(tables, padding=(0, 3)), soft_wrap=False)
