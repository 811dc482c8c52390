"""Everything that can be set on the server, in one place, checked once.

Each field is a flag of `birkhoff serve`, a variable `BIRKHOFF_NAME` and a key of the TOML file; the model's own
settings (device, dtype, cache, ...) stand beside them and go to `birkhoff.load`. Defaults are safe for a laptop:
loopback only, bounded everywhere. Listening on any other address without a key is refused unless it is said out loud.

Nothing here imports PyTorch or the web framework, so that the command line can list the flags at once.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from typing import Any

from birkhoff.api.options import EngineOptions, help_text
from birkhoff.errors import OptionError, quoted

MIB = 1 << 20
MAY_BE_ZERO = ("port", "max_queue")


def setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServerSettings:
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = setting((), "Key that callers must show; may be given several times.")
    steering_api_key: tuple[str, ...] = setting(
        (), "Key for changes of global steering, modules and SAEs; several too."
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Host name callers may use, beside this machine's own; several too."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Web origin that may call from a browser, beside localhost's."
    )
    i_know_this_is_open: bool = setting(False, "Allow another address than loopback without a key.")
    served_name: str = setting("", "Name of the model on the wire; its own unless given.")
    capture_root: str = setting("", help_text(EngineOptions, "capture_root"))
    steering_modules: tuple[str, ...] = setting(
        (), "Vector file to register at start; may be given several times."
    )
    sae: tuple[str, ...] = setting(
        (), "NAME=PATH of a dictionary of features to attach at start; several too."
    )
    sae_full: tuple[str, ...] = setting(
        (), "The same, for one whose reconstruction may replace rows; several too."
    )
    max_queue: int = setting(32, "Most answers that wait for a place; more are refused with 429.")
    max_connections: int = setting(64, "Most connections at a time.")
    max_choices: int = setting(8, "Most answers of one call.")
    max_body_bytes: int = setting(4 * MIB, "Largest body of a call.")
    max_upload_bytes: int = setting(32 * MIB, "Largest body of a call that brings vectors to register.")
    max_header_bytes: int = setting(16 * 1024, "Largest head of a call.")
    max_header_fields: int = setting(64, "Most header fields of a call.")
    max_depth: int = setting(64, "Deepest nesting of a JSON body.")
    header_seconds: float = setting(15.0, "Time for the head of a call to arrive.")
    body_seconds: float = setting(60.0, "Time for the body of a call to arrive.")
    stall_seconds: float = setting(10.0, "How long a reader may take nothing before it is dropped.")
    keep_alive_seconds: float = setting(30.0, "How long an idle connection stays open.")
    ping_seconds: float = setting(10.0, "Sign of life in a stream that has nothing to say.")
    drain_seconds: float = setting(30.0, "Time for running answers to end when the server is told to stop.")
    capture_max_request_bytes: int = setting(256 * MIB, "Most bytes the captures of one call may store.")
    capture_inline_max_bytes: int = setting(256 * 1024, "Most bytes of captured rows in an answer itself.")
    lens_max_tokens: int = setting(1024, "Longest text for the lens.")
    metrics: bool = setting(True, "Answer /metrics.")
    debug_prompts: bool = setting(False, "Show the beginning of prompts in /slots.")
    log: str = setting("text", "Log of calls on stderr: text, json or off.")

    def __post_init__(self) -> None:
        for each in fields(self):
            value: Any = getattr(self, each.name)
            wanted = type(each.default)
            if wanted is tuple:
                object.__setattr__(self, each.name, tuple(value))
                if not all(isinstance(item, str) and item for item in value):
                    raise OptionError(f"{each.name} is {quoted(value)}, expected texts that are not empty.")
            elif wanted is float:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 86400:
                    raise OptionError(f"{each.name} is {quoted(value)}, expected seconds, more than 0.")
            elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
                raise OptionError(f"{each.name} is {quoted(value)}, expected a {wanted.__name__}.")
            elif (
                isinstance(value, int)
                and wanted is int
                and not (0 if each.name in MAY_BE_ZERO else 1) <= value < 2**40
            ):
                raise OptionError(f"{each.name} is {value}, expected a whole number above 0.")
        for which in ("sae", "sae_full"):
            for text in getattr(self, which):
                name, _, path = text.partition("=")
                if not name or not path:
                    raise OptionError(f"{which} is {quoted(text)}, expected NAME=PATH.")
        if self.port > 65535:
            raise OptionError(f"port is {self.port}, expected 0 to 65535.")
        if self.log not in ("text", "json", "off"):
            raise OptionError(f"log is {quoted(self.log)}, expected text, json or off.")
        for name in ("api_key", "steering_api_key"):
            if any(
                not key.isascii() or not key.isprintable() or len(key) > 512 for key in getattr(self, name)
            ):
                raise OptionError(f"a {name} must be printable ASCII of at most 512 characters.")
        if not is_loopback(self.host) and not self.api_key and not self.i_know_this_is_open:
            raise OptionError(
                f"host is {quoted(self.host)}, which others can reach, and there is no key. Set --api-key, listen on "
                "127.0.0.1, or say --i-know-this-is-open."
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
