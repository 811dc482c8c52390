"""All settings of the server, documented and validated in one place.

Each field of `ServerSettings` is a flag of `birkhoff serve`, an environment variable `BIRKHOFF_<NAME>` and a key of the
TOML file. The options of the model (device, dtype, cache, ...) are separate and go to `birkhoff.load`. The defaults are
safe on a laptop: loopback only, and every resource is limited. Listening on another address without a key is refused
unless `i_know_this_is_open` is set.

This module imports neither PyTorch nor pydantic, so that the command line can list its flags quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from birkhoff.api.options import EngineOptions, help_text
from birkhoff.errors import OptionError, quoted
from birkhoff.option_checks import check_bool, check_choice, check_float, check_int, is_loopback

MIB = 1 << 20
MAX_SECONDS = 86400
MAX_COUNT = 2**40
INT_RANGES = {
    "port": (0, 65535),
    "max_queue": (0, MAX_COUNT),
    "capture_spill_max_bytes": (0, MAX_COUNT),
}  # other integers: 1 to MAX_COUNT


def setting(default: Any, help: str) -> Any:
    """A field with its help text; its type is the type of the default."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServerSettings:
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.")
    api_key: tuple[str, ...] = setting((), "API key that clients must send; repeatable.")
    steering_api_key: tuple[str, ...] = setting(
        (), "Key for changing global steering, modules and SAE clamps; repeatable."
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Host name that clients may use, in addition to this machine's own; repeatable."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Web origin that may call from a browser, in addition to localhost; repeatable."
    )
    i_know_this_is_open: bool = setting(False, "Allow a non-loopback address without an API key.")
    served_name: str = setting(
        "", "Model names in the API, joined by commas, the main one first; by default the name of the model."
    )
    any_model: bool = setting(False, "Accept every model name a call gives, such as gpt-4o or claude-sonnet.")
    ssl_certfile: str = setting("", "PEM file of the certificate chain; serves HTTPS together with the key.")
    ssl_keyfile: str = setting("", "PEM file of the certificate's key.")
    capture_root: str = setting("", help_text(EngineOptions, "capture_root"))
    capture_consumers: tuple[str, ...] = setting(
        (), "Consumer of captured rows, as [NAME=]KIND[:key=value,...]; repeatable."
    )
    capture_overload_policy: str = setting(
        EngineOptions.capture_overload_policy, help_text(EngineOptions, "capture_overload_policy")
    )
    capture_dispatch_queue_size: int = setting(
        EngineOptions.capture_dispatch_queue_size, help_text(EngineOptions, "capture_dispatch_queue_size")
    )
    capture_spill_dir: str = setting("", help_text(EngineOptions, "capture_spill_dir"))
    capture_spill_max_bytes: int = setting(
        EngineOptions.capture_spill_max_bytes, help_text(EngineOptions, "capture_spill_max_bytes")
    )
    steering_modules: tuple[str, ...] = setting(
        (),
        "[NAME=]PATH of a vector (.safetensors), tiers (.json) or an SAE directory to register; repeatable.",
    )
    sae: tuple[str, ...] = setting((), "NAME=PATH of an SAE to attach at start; repeatable.")
    sae_full: tuple[str, ...] = setting(
        (), "NAME=PATH of an SAE whose reconstruction may replace activations; repeatable."
    )
    sae_root: str = setting("", "Directory whose SAEs calls may register by path.")
    max_queue: int = setting(32, "Maximum number of waiting requests; more are refused with 429.")
    max_connections: int = setting(64, "Maximum number of open connections.")
    max_choices: int = setting(8, "Maximum number of choices (n) per call.")
    max_body_bytes: int = setting(4 * MIB, "Maximum size of a request body.")
    max_upload_bytes: int = setting(32 * MIB, "Maximum size of a request body that uploads vectors.")
    max_header_bytes: int = setting(16 * 1024, "Maximum size of the request headers.")
    max_header_fields: int = setting(64, "Maximum number of request header fields.")
    max_depth: int = setting(64, "Maximum nesting depth of a JSON body.")
    header_seconds: float = setting(15.0, "Timeout for receiving the request headers.")
    body_seconds: float = setting(60.0, "Timeout for receiving the request body.")
    stall_seconds: float = setting(10.0, "Drop a client that reads nothing for this long.")
    keep_alive_seconds: float = setting(30.0, "Close an idle connection after this long.")
    ping_seconds: float = setting(10.0, "Interval of heartbeats in an idle stream.")
    drain_seconds: float = setting(30.0, "On shutdown, wait this long for running requests.")
    capture_max_request_bytes: int = setting(256 * MIB, "Maximum bytes the captures of one call may store.")
    capture_inline_max_bytes: int = setting(256 * 1024, "Maximum bytes of captured rows in a response.")
    lens_max_tokens: int = setting(1024, "Maximum text length for lens, attention and features.")
    metrics: bool = setting(True, "Serve Prometheus metrics at /metrics.")
    debug_prompts: bool = setting(False, "Show the beginning of prompts in /slots.")
    log: str = setting("text", "Access log on stderr: text, json or off.")

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check_type(each.name, type(each.default))
        saes: dict[str, str] = {}
        for option in ("sae", "sae_full"):
            for text in getattr(self, option):
                name, _, path = text.partition("=")
                if not name or not path:
                    raise OptionError(f"{option} is {quoted(text)}, expected NAME=PATH.")
                if name in saes:
                    raise OptionError(
                        f"{option} is {quoted(text)}, but {saes[name]} has this name already. Give every SAE a "
                        "name of its own."
                    )
                saes[name] = f"{option} {quoted(text)}"
        names = self.model_names
        if len(set(names)) < len(names):
            raise OptionError(f"served_name is {quoted(self.served_name)}, expected each name once.")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise OptionError("HTTPS needs both --ssl-certfile and --ssl-keyfile.")
        check_choice("log", self.log, ("text", "json", "off"))
        for name in ("api_key", "steering_api_key"):
            if any(
                not key.isascii() or not key.isprintable() or len(key) > 512 for key in getattr(self, name)
            ):
                raise OptionError(f"a {name} must be printable ASCII of at most 512 characters.")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise OptionError(f"one {name} is given twice. Give every key once: each is one client.")
        if not is_loopback(self.host) and not self.api_key and not self.i_know_this_is_open:
            raise OptionError(
                f"host is {quoted(self.host)}, which others can reach, and there is no key. Set --api-key, listen on "
                "127.0.0.1, or say --i-know-this-is-open."
            )

    @property
    def model_names(self) -> list[str]:
        """The names of `served_name`; none by default."""
        return [name.strip() for name in self.served_name.split(",") if name.strip()]

    def url(self, host: str, port: int) -> str:
        """The URL at which a client on this machine opens a server that listens on an address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{'https' if self.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def _check_type(self, name: str, expected: type[Any]) -> None:
        """Check one setting against the type of its default; sequences become tuples."""
        value: Any = getattr(self, name)
        if expected is tuple:
            object.__setattr__(self, name, tuple(value))
            if not all(isinstance(item, str) and item for item in value):
                raise OptionError(f"{name} is {quoted(value)}, expected texts that are not empty.")
        elif expected is float:
            check_float(name, value, 0, MAX_SECONDS, exclude_low=True)
        elif expected is bool:
            check_bool(name, value)
        elif expected is int:
            check_int(name, value, *INT_RANGES.get(name, (1, MAX_COUNT)))
        elif not isinstance(value, str):
            raise OptionError(f"{name} is {quoted(value)}, expected text.")
