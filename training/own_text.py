"""Generate text with nano: answers to many requests, as JSON lines of conversations.

    python -m training.own_text OUT [COUNT]

SAE features are described and streams are analysed on this text, so that no training text needs to be shown.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import birkhoff

FORMS = [
    "Tell me a story about {}.",
    "Write a bedtime story about {}.",
    "Tell me a spooky campfire story about {}.",
    "Write a poem about {}.",
    "Explain {} to a child.",
    "Write a children's story about {}.",
]
THINGS = (
    "a cat,a lost dog,the moon,a brave girl,an old clock,the sea,a red kite,a small bear,winter,a magic tree,a baker,"
    "two brothers,a robot,a dragon,the garden,a quiet town,a birthday cake,a train,a sad king,a whale,the forest,"
    "a song,a new friend,a broken toy,the school,a mouse,a storm,a hidden door,a lantern,grandmother,a farmer,"
    "the stars,a ghost,a river,a bird,the market,a boat,a rabbit,snow,a wise owl,a queen,the mountain,a secret,a puppy,"
    "the library,a fox,a pirate,the rain,a giant,a painter"
).split(",")
BATCH = 24


def write(out: Path, count: int) -> None:
    """Answer the first `count` requests."""
    asked = [form.format(thing) for thing, form in itertools.product(THINGS, FORMS)][:count]
    with birkhoff.load("nano", max_requests=BATCH) as engine, out.open("w", encoding="utf-8") as stream:
        for start in range(0, len(asked), BATCH):
            some = asked[start : start + BATCH]
            prompts = [engine.encode_chat([{"role": "user", "content": request}]) for request in some]
            outputs = engine.generate(prompts, max_tokens=140, temperature=0.8, top_k=40, seed=start)
            for request, output in zip(some, outputs):
                messages = [
                    {"role": "user", "content": request},
                    {"role": "assistant", "content": output.text},
                ]
                stream.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300)


if __name__ == "__main__":
    main()
