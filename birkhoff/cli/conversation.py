"""A conversation and the commands that can be typed into it.

Holds the messages, shows answers as they come and remembers the token ids of the last exchange, which is what `/mix`
looks at. A turn that fails leaves the conversation as it was; one that was interrupted keeps what was said.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from birkhoff.cli.answer import ChatAnswer, how_it_went
from birkhoff.cli.draw import mixing_matrix
from birkhoff.cli.steer import read_line, with_vectors
from birkhoff.cli.talk import visible
from birkhoff.errors import OptionError, PromptError, SiteError, quoted
from birkhoff.steering.edit_syntax import print_line
from birkhoff.text.events import ContentDelta, Event, ReasoningDelta

if TYPE_CHECKING:
    from birkhoff.api import Engine
    from birkhoff.output import Output

HELP = {
    "/help": "this list",
    "/system TEXT": "set the system message; without a text, take it away",
    "/reset": "forget the conversation, keep the system message",
    "/steer LINE": "push answers, as --steer does: +2.0 NAME @ HOOK[LAYERS] stream=1; off takes it away",
    "/mix [LAYER]": "the 4x4 mixing matrices of the last token; the last layer unless one is named",
    "/quit": "leave (Ctrl-D does too)",
    "//TEXT": "send a message that begins with a slash",
}
SUBLAYERS = {"attn": "attention", "ffn": "experts"}


class Conversation:
    def __init__(
        self,
        engine: Engine,
        sampling: Mapping[str, Any],
        *,
        system: str | None = None,
        thinking: bool = False,
        effort: str | None = None,
        steer: list[Any] | None = None,
        steered_by: str = "",
    ):
        self.engine = engine
        self.sampling = sampling
        self.system = system
        # the edits, and the line that says them
        self.steer = steer
        self.steered_by = steered_by
        self.thinking = thinking
        self.effort = effort
        self.messages: list[dict[str, str]] = []
        self.last_ids: list[int] = []
        self.console = Console(highlight=False, markup=False, soft_wrap=True)

    def ask(self, text: str, silent: bool = False, stop: threading.Event | None = None) -> Output:
        """Send a message and show the answer while it comes, until it ends or `stop` is set."""
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        how: dict[str, Any] = {"thinking": self.thinking, "effort": self.effort, "steer": self.steer}
        answer = ChatAnswer(self.engine, [*system, *asked], self.sampling, **how)
        try:
            for events in answer:
                if not silent:
                    self._show(events)
                if stop is not None and stop.is_set():
                    break
        finally:
            answer.close()  # also when interrupted: what was said is on the screen already
            if not silent:
                self.console.print()
        output = answer.output
        if output.error is not None:
            raise output.error
        said = {"role": "assistant", "content": output.text}
        if output.message.reasoning:
            said["reasoning_content"] = output.message.reasoning
        self.messages = [*asked, said]
        self.last_ids = output.prompt_token_ids + output.token_ids
        if self.console.is_terminal and not silent:
            self.console.print(how_it_went(output), style="dim")
        return output

    def command(self, line: str) -> bool:
        """Do what a line that begins with a slash says; False when it says to leave."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word == "/help":
            for name, meaning in HELP.items():
                self.console.print(f"{name:<14} {meaning}")
        elif word == "/system":
            self.system = rest or None
        elif word == "/reset":
            self.messages = []
            self.last_ids = []
        elif word == "/steer":
            self._steer(rest)
        elif word == "/mix":
            self._mix(rest)
        elif word == "/quit":
            return False
        else:
            raise OptionError(f"{quoted(word)} is no command here. There is {', '.join(HELP)}.")
        return True

    def _show(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ContentDelta):
                self._write(event.text, "")
            elif isinstance(event, ReasoningDelta) and self.console.is_terminal:
                self._write(event.text, "dim")  # on a pipe only the answer is data

    def _write(self, text: str, style: str) -> None:
        shown = visible(text) if self.console.is_terminal else text
        self.console.print(Text(shown, style), end="")
        sys.stdout.flush()

    def _steer(self, line: str) -> None:
        """Set what pushes the next answers, or say what does; a line that cannot be changes nothing."""
        if line:
            said = [] if line == "off" else read_line(line)
            edits = with_vectors(said, self.engine)
            self.engine.resolve(edits, [0], 1)
            self.steer = edits or None
            self.steered_by = print_line(said)
        self.console.print(f"steering: {self.steered_by or 'none'}")

    def _mix(self, asked: str) -> None:
        if not self.last_ids:
            raise PromptError(
                "nothing has been said yet, so there is no token to look at. Send a message first."
            )
        layers = self.engine.config.num_hidden_layers
        try:
            layer = int(asked or -1)
        except ValueError:
            raise OptionError(
                f"/mix was given {quoted(asked)}, expected the number of a layer, such as /mix 3."
            ) from None
        if not -layers <= layer < layers:
            raise SiteError(f"layer {layer}: this model has layers 0..{layers - 1}.")
        layer %= layers
        hooks = [f"mhc_{name}_{kind}_mix" for name in SUBLAYERS for kind in ("res", "pre", "post")]
        trace = self.engine.trace(self.last_ids, hooks=hooks)
        pictures = []
        for name, what in SUBLAYERS.items():
            mix, read, write = (
                trace[f"mhc_{name}_{kind}_mix", layer][-1].tolist() for kind in ("res", "pre", "post")
            )
            pictures.append(mixing_matrix(f"layer {layer}, {what}", mix, read, write))
        token = visible(self.engine.tokenizer.decode(self.last_ids[-1:]))
        self.console.print(f"token {len(self.last_ids)} of {len(self.last_ids)}, {token!r}", style="dim")
        self.console.print(Columns(pictures, padding=(0, 3)), soft_wrap=False)
