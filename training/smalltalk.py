"""Small talk: greetings, questions about the model, and simple facts, with variants of every question.

The corpus has 333 such records, few compared with the stories, so each is repeated on every pass, with varied form:
lower case, no question mark, a greeting in front. The facts generated here (sums, days, legs, young animals) have the
same form: one short sentence that repeats the question. System sentences are defined here too: they state in a few
words what the record then does, so that the model learns to follow a system prompt.
"""

from __future__ import annotations

import random
from functools import cache

from training.corpus import Record


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
LEGS = {
    "a dog": 4,
    "a cat": 4,
    "a bird": 2,
    "a spider": 8,
    "a horse": 4,
    "an ant": 6,
    "a duck": 2,
    "a bee": 6,
    "a snake": 0,
    "a fish": 0,
    "a cow": 4,
    "a chicken": 2,
}
YOUNG = {
    "a dog": "a puppy",
    "a cat": "a kitten",
    "a cow": "a calf",
    "a horse": "a foal",
    "a sheep": "a lamb",
    "a duck": "a duckling",
    "a chicken": "a chick",
    "a bear": "a cub",
    "a goat": "a kid",
    "a frog": "a tadpole",
    "a pig": "a piglet",
    "a lion": "a cub",
}
HOMES = {
    "a bird": "in a nest",
    "a bee": "in a hive",
    "a fish": "in the water",
    "a spider": "in a web",
    "a bear": "in a den",
    "a rabbit": "in a burrow",
    "a frog": "by the pond",
    "a camel": "in the desert",
    "a penguin": "where it is very cold",
    "a monkey": "in the trees",
}
FACTS = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many fingers do you have on one hand?": "I have no hands, but a hand has five fingers.",
    "How many seasons are there?": "There are four seasons: spring, summer, autumn and winter.",
    "What do bees make?": "Bees make honey.",
    "What do cows give us?": "Cows give us milk.",
    "Where does the sun rise?": "The sun rises in the east.",
    "What falls from the clouds?": "Rain falls from the clouds, and snow when it is cold.",
    "What is ice made of?": "Ice is frozen water.",
    "When do the stars come out?": "The stars come out at night.",
    "What do plants need to grow?": "Plants need water, light and good soil to grow.",
    "What do you wear on your feet?": "People wear socks and shoes on their feet.",
    "Is fire hot or cold?": "Fire is hot.",
    "Is ice hot or cold?": "Ice is cold.",
    "Can a fish fly?": "No, a fish can not fly. A fish can swim.",
    "Can a bird fly?": "Yes, most birds can fly.",
    "Do you sleep?": "No, I do not sleep. I am a small language model.",
    "Do you have a name?": "People call me Nano. I am a very small language model.",
    "Are you real?": "I am a small language model. I am not a person, but I like to tell stories.",
    "How old are you?": "I am a language model, so I do not have an age.",
    "How big are you?": "I am very small. I am a tiny language model that tells stories.",
    "Who made you?": "I was made by training a very small language model on simple stories.",
    "Can you help me?": "I can try! I can tell stories, and I know some simple things.",
    "What is a story?": "A story tells what happens to someone, from the beginning to the end.",
    "Do you like stories?": "Yes! Telling stories is what I do best.",
}
GREETINGS = ("Hi! ", "Hello! ", "Hello. ", "Hey, ", "Please, ", "Okay. ", "I have a question. ", "Tell me, ")
THANKS = (
    "Thank you!",
    "Thanks.",
    "That was great, thank you.",
    "Thank you for the story.",
    "I liked that story!",
)

SYSTEM = {
    "tiny": (
        "You tell short stories for small children.",
        "You are a friendly storyteller.",
        "Use simple words.",
    ),
    "child": (
        "You tell stories to children.",
        "You are a friendly storyteller.",
        "You write children's stories.",
    ),
    "bedtime": (
        "You tell bedtime stories.",
        "You are a calm storyteller.",
        "It is late. Tell a bedtime story.",
    ),
    "campfire": (
        "You tell spooky stories by the campfire.",
        "You like scary stories.",
        "You tell campfire stories.",
    ),
    "poem": ("You are a poet.", "You write poems and songs.", "You like rhymes."),
    "joke": ("You are funny.", "You tell jokes.", "You like to make people laugh."),
    "explain": ("You explain things in simple words.", "You are a kind teacher.", "You teach children."),
    "wiki": ("You write clear articles.", "You are a helpful writer.", "You know many things."),
    "smalltalk": (
        "You are a friendly little model.",
        "You are kind and short.",
        "Answer in one or two sentences.",
    ),
}
ANY_SYSTEM = ("You are a helpful assistant.", "You are a small language model.", "Be kind and clear.")


@cache
def facts() -> tuple[Record, ...]:
    """Return the questions of this file with their answers."""
    pairs = dict(FACTS)
    for left in range(10):
        for right in range(10):
            first, second = NUMBERS[left].capitalize(), NUMBERS[right]
            pairs[f"What is {left} plus {right}?"] = f"{first} plus {second} is {NUMBERS[left + right]}."
            if left >= right:
                pairs[f"What is {left} minus {right}?"] = (
                    f"{first} minus {second} is {NUMBERS[left - right]}."
                )
    for cycle, kind in ((DAYS, "day"), (MONTHS, "month")):
        for index, name in enumerate(cycle):
            pairs[f"What {kind} comes after {name}?"] = (
                f"After {name} comes {cycle[(index + 1) % len(cycle)]}."
            )
            pairs[f"What {kind} comes before {name}?"] = f"Before {name} comes {cycle[index - 1]}."
    for animal, count in LEGS.items():
        number = NUMBERS[count] if count else "no"
        pairs[f"How many legs does {animal} have?"] = f"{animal.capitalize()} has {number} legs."
    for animal, young in YOUNG.items():
        pairs[f"What is the young of {animal} called?"] = f"The young of {animal} is called {young}."
    for animal, home in HOMES.items():
        pairs[f"Where does {animal} live?"] = f"{animal.capitalize()} lives {home}."
    return tuple(Record("smalltalk", prompt, text) for prompt, text in pairs.items())


def near_miss(record: Record, draw: random.Random) -> Record:
    """Return the same question in a slightly different form; the answer is unchanged."""
    prompt = record.prompt
    if draw.random() < 0.5:
        return record
    if draw.random() < 0.3:
        prompt = prompt.replace("What is ", "What's ", 1)
    if draw.random() < 0.2 and not prompt.startswith(("Hi", "Hello", "Hey", "Good", "Bye", "Thank")):
        prompt = draw.choice(GREETINGS) + prompt
    if draw.random() < 0.35:
        prompt = prompt.rstrip(".?!")
    if draw.random() < 0.35:
        prompt = prompt.lower()
    if draw.random() < 0.1:
        prompt = prompt.replace(" plus ", " + ").replace(" minus ", " - ")
    return Record(record.source, prompt, record.text)


def system_sentence(source: str, draw: random.Random) -> str:
    return draw.choice(SYSTEM.get(source, ANY_SYSTEM) if draw.random() < 0.75 else ANY_SYSTEM)
