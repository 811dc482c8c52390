"""The child process of `json_schema.SchemaCompiler`: compiles grammars that come as JSON lines on standard input.

Run as a file with the limits as arguments (processor seconds per grammar, bytes of address space). The answer to a
line is the reason why the grammar is refused, as a JSON line; empty if it compiles and allows something. Exceeding a
limit kills the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys


def main(seconds: float, max_bytes: int) -> None:
    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = llguidance.LLTokenizer("byte")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, in native code too
        limits = llguidance.LLParserLimits(initial_lexer_fuel=400_000, max_grammar_size=100_000)
        matcher = llguidance.LLMatcher(
            tokenizer, llguidance.LLMatcher.grammar_from_lark(json.loads(line)), log_level=0, limits=limits
        )
        reason = matcher.get_error().split("\n")[0] or "no reason" if matcher.is_error() else ""
        if not reason:
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
