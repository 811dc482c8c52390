"""Replace the names of people in a story, so that each pass over the text differs.

First names are found by list, and each is replaced by another of the same gender throughout request and answer: the
model has to copy the requested name instead of memorising it. Not replaced: names that are also words or places (Ruby,
April, Frank), variants of one name in one record (Tim and Timmy are one person), and names in use by another person.
"""

from __future__ import annotations

import random
import re


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Common names first: a replacement is drawn with weight 1/sqrt(rank), so they stay common.
GIRLS = _words(
    """Lily Emily Mia Lucy Emma Sara Anna Sarah Jane Amy Sue Luna Maya Ava Molly Sally Ella Zara Aria Lila Sophia Rachel
    Lena Sophie Alice Mary Elara Bella Jenny Kate Lola Ellie Nora Zoe Chloe Clara Eva Maria Mira Ada Julia Hannah Laura
    Leila Tara Nina Jill Annie Katie Susan Olivia Isabella Abigail Charlotte Elizabeth Victoria Samantha Margaret Helen
    Elena Ruth Martha Agnes Nancy Wendy Monica Rosa Ana Edith Bonnie Caroline Sheila Ellen Anne Miriam Kayla Natalie
    Yvonne Rita Lydia Gwendolyn Mindy Kristi Deanna Shirley Ida Teresa Everly Minnie Isabelle Becky Joyce Irene Kimberly
    Gloria Stacy Marissa Tracy Haley Selma Eleanor Nellie Claire Gertrude Nicole Scarlett Mathilda Beatrice Megan
    Bridget Marian Colleen Lottie Arianna Glenda Penelope Abby Khloe Susie Natasha Kathryn Audrey Peggy Leah Zoey Aliyah
    Henrietta Diane Paulette Diana Effie Harriet Christina Della Jenna Antoinette Lindsey Camila Wilma Marguerite
    Bernice Winifred Rhonda Judy Jennifer Patsy Estelle Mariah Rebekah Carmen Madelyn Evelyn Kristina Tabitha Miranda
    Rebecca Naomi Gianna Shawna Danielle Kara Alma Maureen Adriana Melanie Dolores Estella Roxanne Mildred Cynthia
    Eileen Lillian Esther Juliana Verna Gabriela Marcella Lauren Suzanne Maryann Adalynn Kaylee Callie Myra Rena Irma
    Tammy Shelly Loretta Bethany Ashley Ramona Cecelia Belinda Ashlyn Cora Janice Lizzie Olga Felicia Eloise Lynda
    Marjorie Katelyn Julie Carla Mila Josephine Sonia Muriel Brittany Mamie Kristin Linda Melissa Joanne Priscilla
    Eunice Frieda Jeanne Hilda Madeline Karina Kaitlyn Wanda Paula Phyllis Mandy Giselle Catherine Vicky Luella Dianne
    Laila Emmeline Pamela Inez Gabrielle Jaclyn Leilani Jessica Lela Velma Celia Juanita Delia Dora Greta Ingrid Iris
    Amelia Harper Layla Stella Hazel Aurora Savannah Valentina Elsie Millie Emiko Aisha Sofia Vivian Rosalie Camille
    Daphne Sylvia Marlene Thelma Opal Bertha Edna Freda Bessie Norah Jolene Tessa Kira Ines Noelle Annabelle"""
)
BOYS = _words(
    """Tim Tom Max Jack Sam Timmy Ben Bob John Jake Leo Henry Tommy Joe Alex Pete Billy Jimmy Peter Jim George Charlie
    Michael Ethan Liam Noah Finn Oliver Luke Danny Fred Kai Thomas Daniel Ryan David Adam Steve Kael Jasper Edward Gus
    Sammy Theo Lucas Mateo Owen Nathan Oscar Arthur Harry Simon Andy Eddie Johnny William James Robert Alexander Silas
    Julian Louis Elijah Tyler Axel Lewis Gilbert Luca Mario Francisco Hector Otto Ralph Richard Everett Stanley Ronnie
    Lawrence Gary Larry Juan Nelson Ted Barry Percy Carl Elbert Ricky Jackson Cesar Roger Justin Clyde Antonio Sidney
    Harrison Gerard Tristan Brian Joel Gavin Donald Garry Jorge Fernando Samuel Ezra Devon Martin Nicolas Mitchell
    Freddie Colin Todd Remy Jonathan Randolph Marvin Devin Landon Diego Chester Karl Evan Jeffery Malachi Norman Leon
    Vincent Willis Amos Brandon Kyle Clayton Caleb Bruce Nicholas Christopher Paul Kenneth Homer Gregory Arnold Philip
    Salvatore Andre Darren Clifford Elias Lloyd Blake Patrick Delbert Wesley Cecil Spencer Jaden Edmund Nathaniel
    Zachary Alton Allan Jalen Rudolph Irvin Josiah Herbert Seth Braden Derrick Luther Wilbert Shaun Alvin Albert Vernon
    Moses Hudson Tyrone Russell Darin Douglas Wendell Cody Aiden Willard Jerome Ricardo Raymond Caden Kirk Dennis Emmett
    Erick Charles Damon Warren Jason Hayden Preston Roland Ian Terrance Rodney Dylan Joseph Elmer Jonah Ronald Bert
    Brayden Allen Hiram Morris Floyd Keith Luis Stewart Felix Hugo Ivan Omar Rafael Ernest Walter Victor Isaac Levi
    Wyatt Sebastian Gabriel Anthony Dominic Austin Connor Ramon Pablo Marco Sergio Alfred Harvey Oswald Byron Kevin Eric
    Scott Stephen Timothy Benjamin Harold Reginald Edwin Gerald Bradley Jesse Tony Terry Jerry Kaito Rohan Amir"""
)
GENDER = dict.fromkeys(GIRLS, GIRLS) | dict.fromkeys(BOYS, BOYS)

# Replacing these would break rhymes, or they are names of real people.
KEEP_NAMES = frozenset({"poem", "joke", "wiki", "explain"})

_CAPITALISED = re.compile(r"\b[A-Z][A-Za-z]+\b")
_WEIGHTS = {id(names): [(rank + 1) ** -0.5 for rank in range(len(names))] for names in (GIRLS, BOYS)}


def find_names(text: str) -> list[str]:
    """Return listed first names in `text` by first appearance, without variants such as Tim and Timmy."""
    words = dict.fromkeys(_CAPITALISED.findall(text))
    listed = [word for word in words if word in GENDER]
    stems = [word.rstrip("s") for word in words]
    return [name for name in listed if not any(_same_family(name, stem) for stem in stems)]


def _same_family(name: str, other: str) -> bool:
    """True for Tim and Timmy, Sam and Samantha; false for Tom and Tomorrow."""
    shorter, longer = sorted((name, other), key=len)
    related = longer in GENDER or len(longer) - len(shorter) <= 3
    return (
        name != other
        and len(shorter) >= 2
        and longer.startswith(shorter)
        and related
        and longer != shorter + "s"
    )


def fresh_names(text: str, draw: random.Random) -> dict[str, str]:
    """Map every name that can be changed safely to a new one that does not appear in `text`."""
    taken = set(_CAPITALISED.findall(text))
    mapping: dict[str, str] = {}
    for name in find_names(text):
        pool = GENDER[name]
        for _ in range(20):
            new = draw.choices(pool, _WEIGHTS[id(pool)])[0]
            if new not in taken and not any(_same_family(new, word) for word in taken):
                mapping[name] = new
                taken.add(new)
                break
    return mapping


def rename(text: str, mapping: dict[str, str]) -> str:
    """Replace whole words, also in capitals, simultaneously, so that swaps do not chain."""
    if not mapping:
        return text
    table = mapping | {old.upper(): new.upper() for old, new in mapping.items()}
    return _CAPITALISED.sub(lambda match: table.get(match.group(), match.group()), text)
